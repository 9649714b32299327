"""The process that writes the roster of a fleet on Ray is kept running, without Ray."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tercet.cluster.child_process import Process, StartFailed
from tercet_ray import ray_fleet
from tercet_ray.ray_fleet import Follower
from tests.longest_wait import LONGEST_WAIT_S

pytestmark = pytest.mark.processes


async def test_a_follower_that_the_system_does_not_start_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_fleet, "AGAIN_SECONDS", 0.01)
    follower = Follower(tmp_path / "fleet", tmp_path / "roster.json", tmp_path)
    follower.process = Process("ray", [sys.executable, "-c", "raise SystemExit(3)"], {}, tmp_path / "ray.log")
    start, refused, said = Process.start, iter((True, True)), list[str]()
    await follower.process.start()

    async def full(process: Process) -> None:
        if next(refused, False):
            raise StartFailed("ray cannot be started: No space left on device")
        await start(process)

    monkeypatch.setattr(Process, "start", full)
    keeping = asyncio.create_task(follower.keep(lambda name, state: said.append(f"{name}: {state}")))
    async with asyncio.timeout(LONGEST_WAIT_S):
        while len(said) < 4:
            assert not keeping.done()
            await asyncio.sleep(0.01)
    keeping.cancel()
    await asyncio.wait({keeping})
    await follower.process.stop()
    ended, cannot = "ended with exit code 3", "cannot be started: No space left on device"
    rest = "and is restarted; engines continue to run"
    assert said[:4] == [f"ray: the follower {how} {rest}" for how in (ended, cannot, cannot, ended)]
