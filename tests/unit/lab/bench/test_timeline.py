"""Timelines of simulated runs: they change no figure, are the same each time, and stay within their bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tercet.router.page.records import DEAD, Frame
from tercet_lab.bench.results import load_result
from tercet_lab.bench.simulated import Experiment, Fleet, Record, SyntheticWorkload
from tercet_lab.bench.simulated import recording as timelines
from tercet_lab.bench.simulated.simulation import SimulationReport

RATE = 20.0


def simulation(fleet: str = "1P2D", requests: int = 60) -> Experiment:
    return Experiment(
        program="disaggregated",
        fleet=Fleet(fleet, profile="llama-3.1-8b-h100-tp1"),
        work=SyntheticWorkload(rate=1, requests=requests),
    )


def recorded(every: float | None, **more: Any) -> SimulationReport:
    return recording(simulation(**more), every).report([RATE], "x")


def recording(made: Experiment, every: float | None) -> Experiment:
    return msgspec.structs.replace(made, record=Record(frames_every=every))


def frames_of(report: SimulationReport) -> list[Frame]:
    (frames,) = msgspec.json.decode(report.to_json())["timelines"].values()
    return msgspec.convert(frames, list[Frame])


def test_recording_changes_no_figure_and_is_the_same_each_time(tmp_path: Any) -> None:
    without, once, twice = recorded(None), recorded(0.1), recorded(0.1)
    assert once.to_json() == twice.to_json()
    found = msgspec.json.decode(once.to_json())
    del found["timelines"]
    assert found == msgspec.json.decode(without.to_json())
    (tmp_path / "run.json").write_bytes(once.to_json())
    assert load_result(tmp_path / "run.json").points[0].metrics["completed"] == 60


def test_a_timeline_has_every_request_and_token() -> None:
    report = recorded(0.1)
    frames = frames_of(report)
    assert frames[0].engines is not None
    assert [seat.name for seat in frames[0].engines] == ["prefill-0", "decode-0", "decode-1"]
    assert frames[0].about is not None
    assert [frame.t for frame in frames] == sorted(frame.t for frame in frames)
    points = [values for frame in frames for point in frame.points for values in point.programs.values()]
    assert sum(values.done for values in points) == 60
    assert sum(values.tokens for values in points) == 60 * 128
    assert {span.verb for frame in frames for span in frame.spans} == {"prep_recv", "remote_send", "start_generate"}


@pytest.mark.slow
def test_a_long_run_has_frames_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    every = frames_of(recorded(0.01))
    monkeypatch.setattr(timelines, "MOST_FRAMES", 70)
    fewer = frames_of(recorded(0.01))
    assert len(every) > 200
    assert 35 <= len(fewer) <= 70
    assert fewer[-1].t == every[-1].t
    assert sum(len(frame.points) for frame in fewer) <= len(every)


def test_a_dead_engine_is_dead_in_the_frames(tmp_path: Any) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("engines: [{role: both, count: 2}]\nfaults: [{engine: both-1, kind: die, at: 0.5, down: 1.0}]\n")
    made = msgspec.structs.replace(simulation(str(file)), program="data_parallel")
    frames = frames_of(recording(made, 0.1).report([RATE], "x"))
    states = [(frame.t, row[7]) for frame in frames for row in frame.loads if row[0] == 1]
    assert any(state & DEAD for t, state in states if 0.5 <= t <= 1.6)
    assert not states[-1][1] & DEAD
