"""How far a start has come, from the stages in its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from tercet.cluster import running_fleet
from tercet.cluster.running_fleet import StartProgress
from tercet.vllm_plugin.start.process_output import MARK


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(running_fleet, "time", clock)
    return clock


def test_stages_are_read_as_they_come_and_the_long_ones_are_summed_up(tmp_path: Path, clock: Clock) -> None:
    log = tmp_path / "log"
    progress = StartProgress(log)
    assert not progress.look()  # there is no log yet
    log.write_text("importing stage: nothing\n")
    assert not progress.look()
    clock.now += 12
    with log.open("a") as out:
        out.write(f"INFO 11-23 {MARK}weights\nINFO 11-23 {MARK}KV ca")
    assert progress.look()
    assert progress.stage == "weights"
    clock.now += 3
    assert not progress.look()  # the line is not whole
    with log.open("a") as out:
        out.write("che\n")
    assert progress.look()
    assert progress.stage == "KV cache"
    clock.now += 0.4
    assert progress.summary() == "15 s (starting 12 s, weights 3 s)"


def test_a_server_without_stages_has_only_its_time(tmp_path: Path, clock: Clock) -> None:
    progress = StartProgress(tmp_path / "log")
    clock.now += 4
    assert progress.summary() == "4 s"
