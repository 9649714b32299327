"""The short form of `test_ray_fleet.py`: a real Ray cluster, simulated engines, processes are killed.

`make test` runs the first test, whose cluster is one machine; `make test-long` runs all.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from tercet.cluster.model import resolve_tokenizer
from tercet.cluster.up_config import UpConfig
from tercet_ray.ray_fleet import ray_fleet
from tests.long_runs import in_full
from tests.unit.cluster.whole_streams import read_whole

from .ray_cluster import RayCluster, ray_cluster
from .test_ray_fleet import SIMULATED, World, engines, one_engine, until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray"),
]


async def test_an_engine_is_lost_and_replaced_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERCET_TEST_RAY", str(tmp_path))
    said: list[str] = []
    model = await asyncio.to_thread(resolve_tokenizer, "smollm2")
    with ray_cluster(nodes=0, head_cpus=2) as cluster:
        config = UpConfig(
            on=f"ray:{cluster.address}", port=0, log_dir=str(tmp_path), fleet_name="short", engines_on_head=True,
            **SIMULATED,
        )  # fmt: skip
        async with ray_fleet(config, model, lambda name, state: said.append(f"{name}: {state}")) as fleet:
            keeping = asyncio.create_task(fleet.until_broken(lambda *_: None))
            world = World(cluster, fleet, said)
            async with aiohttp.ClientSession() as session:
                reading = [
                    asyncio.create_task(read_whole(session, fleet.url, f"{number}. One two.", 300))
                    for number in range(6)
                ]
                before = world.roster()["decode-0"].uid
                one_engine(world, "decode-0", tmp_path).kill()
                await asyncio.gather(*reading)
                await world.until_replaced("decode-0", before)
                await read_whole(session, fleet.url, "One two three.", 10)
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        assert not engines(tmp_path), said


@in_full("one engine that is killed, in this file")
async def test_a_keeper_is_lost_and_then_the_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERCET_TEST_RAY", str(tmp_path))
    said: list[str] = []
    model = await asyncio.to_thread(resolve_tokenizer, "smollm2")
    with ray_cluster(nodes=1) as cluster:
        config = UpConfig(on=f"ray:{cluster.address}", port=0, log_dir=str(tmp_path), fleet_name="lost", **SIMULATED)
        async with ray_fleet(config, model, lambda name, state: said.append(f"{name}: {state}")) as fleet:
            keeping = asyncio.create_task(fleet.until_broken(lambda name, state: said.append(f"{name}: {state}")))
            world = World(cluster, fleet, said)
            async with world.streams():
                before = world.roster()
                for node in (cluster.head, *cluster.nodes):
                    node.signal(signal.SIGKILL, "ray::FleetKeeper")
                one_engine(world, "decode-0", tmp_path).kill()
                await world.until_replaced("decode-0", before["decode-0"].uid)
                assert world.roster()["prefill-0"] == before["prefill-0"], "who was well has stayed"
            assert fleet.router.pid is not None
            os.killpg(fleet.router.pid, signal.SIGKILL)
            await until(lambda: said[-1].startswith("router: ready"))
            async with world.streams():
                assert world.roster().keys() == before.keys()
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        assert not engines(tmp_path), said


def up_on(cluster: RayCluster, place: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tercet.cli", "up", "--on", f"ray:{cluster.address}", "--port", "0"]
    with log.open("wb") as out:
        return subprocess.Popen(
            [*command, "--fleet-name", "kept", "--simulate", SIMULATED["simulate"], "--log-dir", str(place)],
            stdout=out, stderr=out,
        )  # fmt: skip


@in_full("one engine that is killed, in this file")
async def test_a_killed_command_leaves_engines_that_the_next_one_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERCET_TEST_RAY", str(tmp_path))
    log = tmp_path / "up.log"
    with ray_cluster(nodes=1) as cluster:
        first = up_on(cluster, tmp_path, log)
        await until(lambda: "Ctrl-C" in log.read_text())
        before = {each.pid for each in engines(tmp_path)}
        assert len(before) == 2
        first.kill()
        first.wait()
        second = up_on(cluster, tmp_path, log)
        try:
            await until(lambda: "Ctrl-C" in log.read_text())
            assert {each.pid for each in engines(tmp_path)} == before
            url = log.read_text().split("ready at ")[-1].split(",")[0]
            async with aiohttp.ClientSession() as session:
                await read_whole(session, url, "One two three.", 10)
        finally:
            second.terminate()
            second.wait()
        assert not engines(tmp_path), log.read_text()
