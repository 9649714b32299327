"""The owner of an engine, without Ray around it: it starts a simulated engine, again when that dies, and ends it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest

from tercet.cluster.engine_command import EngineSpec
from tercet.cluster.model import resolve_tokenizer
from tercet_ray import fleet_keeper
from tercet_ray.fleet_keeper import EngineOwner, OwnerReport, WantedEngine
from tests.longest_wait import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
until = partial(wait_until, seconds=200, every=0.05)


def servers_at(url: str) -> list[psutil.Process]:
    """Processes whose command names the port, but for guards; then the guards."""
    port = url.rpartition(":")[2]
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if port in process.cmdline():
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return sorted(found, key=lambda each: "guard.py" in " ".join(each.cmdline()))


def test_an_engine_is_started_again_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_keeper, "the_ray", lambda: None)
    monkeypatch.setattr(fleet_keeper, "here", lambda _: ("127.0.0.1", "node"))
    spec = EngineSpec(
        name="e", model=str(resolve_tokenizer("smollm2")), served_model_name="m", host="", port=0,
        simulate="llama-3.1-8b-h100-tp1",
    )  # fmt: skip
    wanted = WantedEngine(spec, "both", {"TERCET_SECRET": "s"}, restarts=1, log_dir=str(tmp_path))
    owner = EngineOwner(msgspec.json.encode(wanted), 1)

    def report() -> OwnerReport:
        return msgspec.json.decode(owner.report(), type=OwnerReport)

    until(lambda: report().state == "ready")
    first = report()
    assert (first.node, first.host, Path(first.log).parent) == ("node", "127.0.0.1", tmp_path)
    engine = servers_at(first.url)[0]
    assert engine.environ()["TERCET_SECRET"] == "s"
    engine.kill()
    until(lambda: report().uid != first.uid and report().state == "ready")
    second = report()
    assert second.url != first.url
    assert second.log != first.log
    owner.stop()
    assert report().state == "the engine has ended"
    until(lambda: not servers_at(first.url) and not servers_at(second.url))
