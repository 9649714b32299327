"""A fleet on a Ray cluster of three machines: every end of something on it, under streams. `make test-long` has it.

A cluster of four nodes takes a quiet machine: Ray gives up a node that has not started within 30 s.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest

from tercet.cluster.model import resolve_model, resolve_tokenizer
from tercet.cluster.up_config import UpConfig
from tercet.fleet.discovery import RosterEntry
from tercet_ray.ray_fleet import RayFleet, ray_fleet
from tests import longest_wait
from tests.unit.cluster.whole_streams import read_whole

from .ray_cluster import Node, RayCluster, ray_cluster

LONG = pytest.mark.skipif(not os.environ.get("TERCET_LONG_TESTS"), reason="takes minutes; make test-long")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(900), LONG]
STREAMS, TOKENS = 20, 40
SECONDS = 240
HEAD_AWAY_SECONDS = 90


class Streams:
    """Clients that read streams until `over`: each must be whole."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.over = False
        self.whole = 0

    async def read(self, session: aiohttp.ClientSession) -> None:
        while not self.over:
            await read_whole(session, self._url, "One two three.", TOKENS)
            self.whole += 1


class World:
    def __init__(self, cluster: RayCluster, fleet: RayFleet, said: list[str]) -> None:
        self.cluster, self.fleet, self.said = cluster, fleet, said

    def roster(self) -> dict[str, RosterEntry]:
        content = self.fleet.follower.roster.read_bytes()
        return {each.name: each for each in msgspec.json.decode(content, type=list[RosterEntry])}

    def hosts(self) -> set[str]:
        return {each.url.split("/")[2].split(":")[0] for each in self.roster().values()}

    def node_of(self, name: str) -> Node:
        host = self.roster()[name].url.split("/")[2].split(":")[0]
        return next(node for node in self.cluster.nodes if node.host == host)

    async def members(self) -> dict[str, dict[str, Any]]:
        async with aiohttp.ClientSession() as session, session.get(f"{self.fleet.url}/tercet/v1/engines") as response:
            found: list[dict[str, Any]] = await response.json()
        names = [each["name"] for each in found]
        assert len(names) == len(set(names)), f"no member is there twice: {names}"
        assert len({each["url"] for each in found}) == len(found)
        return {each["name"]: each for each in found}

    async def until_replaced(self, name: str, uid: str) -> None:
        """Until the router serves another start of the engine than that of ``uid``, and all are well."""
        await until(lambda: self.roster().get(name) is not None and self.roster()[name].uid != uid)
        async with asyncio.timeout(SECONDS):
            while True:
                roster, members = self.roster(), await self.members()
                fits = {each: members.get(each, {}).get("url") == entry.url for each, entry in roster.items()}
                well = members.keys() == roster.keys() and all(
                    each["reachable"] and not each["draining"] for each in members.values()
                )
                if well and all(fits.values()) and not any(entry.withheld for entry in roster.values()):
                    return
                await asyncio.sleep(0.2)

    @asynccontextmanager
    async def streams(self) -> AsyncGenerator[Streams]:
        """Have clients read while entered; each has read two whole answers more at the end."""
        streams = Streams(self.fleet.url)
        timeout = aiohttp.ClientTimeout(total=SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
            for _ in range(STREAMS):
                group.create_task(streams.read(session))
            await until(lambda: streams.whole > STREAMS)
            yield streams
            enough = streams.whole + 2 * STREAMS
            await until(lambda: streams.whole > enough)
            streams.over = True


until = partial(longest_wait.until, seconds=SECONDS, every=0.1)


def engines(place: Path) -> list[psutil.Process]:
    """The servers of the test's engines, wherever they hang; not their guards, which name the same command."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            command = process.cmdline()
            is_server = "--served-model-name" in command and not any("guard.py" in part for part in command)
            if is_server and process.environ().get("TERCET_TEST_RAY") == str(place):
                found.append(process)
    return found


SIMULATED: dict[str, Any] = {"simulate": "llama-3.1-8b-h100-tp1"}
REAL: dict[str, Any] = {"engine_cpus": 1.0, "engine_args": ("--max-num-seqs", "32")}


@pytest.fixture(params=[SIMULATED, pytest.param(REAL, marks=pytest.mark.engines)], ids=["simulated", "vllm"])
async def world(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[World]:
    monkeypatch.setenv("TERCET_TEST_RAY", str(tmp_path))
    said: list[str] = []
    model = await asyncio.to_thread(resolve_model if request.param is REAL else resolve_tokenizer, "smollm2")
    with ray_cluster(nodes=3) as cluster:
        config = UpConfig(
            on=f"ray:{cluster.address}", port=0, log_dir=str(tmp_path), fleet_name="test", **request.param
        )  # fmt: skip
        async with ray_fleet(config, model, lambda name, state: said.append(f"{name}: {state}")) as fleet:
            keeping = asyncio.create_task(fleet.until_broken(lambda name, state: said.append(f"{name}: {state}")))
            try:
                yield World(cluster, fleet, said)
            finally:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)
        assert not engines(tmp_path), said
        assert not any("may still run" in line for line in said), said
    assert not engines(tmp_path)


def one_engine(world: World, name: str, place: Path) -> psutil.Process:
    port = world.roster()[name].url.rpartition(":")[2]
    return next(each for each in engines(place) if port in each.cmdline())


async def test_an_engine_a_follower_and_a_machine_are_lost_under_streams(world: World, tmp_path: Path) -> None:
    assert "127.0.0.2" not in world.hosts(), "the head's machine has no engine"
    async with world.streams():
        before = world.roster()["decode-0"].uid
        one_engine(world, "decode-0", tmp_path).kill()
        await world.until_replaced("decode-0", before)

        follower = world.fleet.follower.process
        assert follower.pid is not None
        os.killpg(follower.pid, signal.SIGKILL)
        await until(lambda: world.fleet.follower.process is not follower)

        before = world.roster()["decode-0"].uid
        world.node_of("decode-0").kill()
        await world.until_replaced("decode-0", before)
    assert len(engines(tmp_path)) == 2


async def test_an_actor_is_killed(world: World) -> None:
    async with world.streams():
        before = world.roster()["prefill-0"].uid
        owner = next(
            each for node in world.cluster.nodes for each in node.processes()
            if "ray::EngineOwner" in " ".join(each.cmdline()) and node is world.node_of("prefill-0")
        )  # fmt: skip
        owner.kill()
        await world.until_replaced("prefill-0", before)


async def test_a_node_is_stopped_and_continued(world: World, tmp_path: Path) -> None:
    async with world.streams():
        before, node = world.roster()["decode-0"].uid, world.node_of("decode-0")
        node.signal(signal.SIGSTOP)
        await world.until_replaced("decode-0", before)
        node.signal(signal.SIGCONT)
        await until(lambda: len(engines(tmp_path)) == 2)
        assert (await world.members()).keys() == {"prefill-0", "decode-0"}


async def test_the_head_is_away(world: World, tmp_path: Path) -> None:
    async with world.streams() as streams:
        before = {name: entry.uid for name, entry in world.roster().items()}
        world.cluster.head.kill()
        whole = streams.whole
        await asyncio.sleep(HEAD_AWAY_SECONDS)
        assert streams.whole > whole + STREAMS, "nothing that serves has noticed"
        assert {name: entry.uid for name, entry in world.roster().items()} == before
        await asyncio.to_thread(world.cluster.start_head_again)
        one_engine(world, "decode-0", tmp_path).kill()
        await world.until_replaced("decode-0", before["decode-0"])
        assert world.roster()["prefill-0"].uid == before["prefill-0"]
