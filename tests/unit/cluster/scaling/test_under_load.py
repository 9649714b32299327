"""A fleet of simulated engines behind a real router grows and shrinks under streams: every answer is whole."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import psutil
import pytest

from tercet.cluster import child_process
from tercet.cluster.local import local_fleet
from tercet.cluster.model import resolve_tokenizer
from tercet.cluster.running_fleet import RunningFleet
from tercet.cluster.scaling.decide import Counts, ScaleCall, ScaleRecord
from tercet.cluster.scaling.scaler import Scaler, control_socket, scale_fleet, scaling_of
from tercet.cluster.up_config import UpConfig
from tercet.protocol import BadRequest, Conflict
from tests.unit.cluster.whole_streams import SECONDS, streams, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600), pytest.mark.usefixtures("forked")]
LONG = pytest.mark.skipif(not os.environ.get("TERCET_LONG_TESTS"), reason="takes a minute; make test-long")


class World:
    def __init__(self, fleet: RunningFleet, socket: Path, said: list[str]) -> None:
        self.fleet, self.socket, self.said = fleet, socket, said

    async def scaled(self, prefill: int, decode: int) -> ScaleRecord:
        record = await scale_fleet(self.socket, ScaleCall(prefill=prefill, decode=decode))
        async with asyncio.timeout(SECONDS):
            while record.state == "under_way":
                await asyncio.sleep(0.05)
                record = await scaling_of(self.socket)
        return record

    async def members(self) -> dict[str, str]:
        async with aiohttp.ClientSession() as session, session.get(f"{self.fleet.url}/tercet/v1/engines") as response:
            found = await response.json()
        assert all(each["reachable"] and not each["draining"] for each in found)
        return {each["name"]: each["role"] for each in found}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncGenerator[World]:
    said: list[str] = []
    config = UpConfig(port=0, simulate="llama-3.1-8b-h100-tp1", log_dir=str(tmp_path / "logs"))
    model = await asyncio.to_thread(resolve_tokenizer, "smollm2")

    def say(name: str, state: str) -> None:
        said.append(f"{name}: {state}")

    async with local_fleet(config, model, say) as fleet:
        keeping = asyncio.create_task(fleet.until_broken(say))
        try:
            async with Scaler(fleet.provisioner, say) as scaler, control_socket(scaler) as socket:
                yield World(fleet, socket, said)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


def servers(fleet: RunningFleet) -> set[int]:
    ports = {engine.url.rpartition(":")[2] for engine in fleet.engines}
    found = (each.net_connections("tcp") for each in psutil.Process().children(recursive=True) if each.is_running())
    return {conn.laddr.port for all_of in found for conn in all_of if str(conn.laddr.port) in ports}


async def test_it_doubles_and_shrinks_under_streams(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async with streams(world.fleet.url, clients=6):
        grown = await world.scaled(2, 2)
        assert (grown.state, grown.present, grown.why) == ("done", Counts(2, 2), "")
        assert sorted(await world.members()) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
        with pytest.raises(BadRequest, match="at least one engine"):
            await scale_fleet(world.socket, ScaleCall(prefill=0))

        shrinking = asyncio.create_task(world.scaled(1, 1))
        await until(lambda: any("draining" in line for line in world.said))
        with pytest.raises(Conflict, match="is being scaled to prefill=1 decode=1"):
            await scale_fleet(world.socket, ScaleCall(prefill=2))
        assert (await shrinking).present == Counts(1, 1)
        assert len(await world.members()) == len(world.fleet.engines) == len(servers(world.fleet)) == 2

        nothing = await world.scaled(1, 1)
        assert (nothing.number, nothing.state) == (3, "done")
        await cannot_start(world, monkeypatch)


async def cannot_start(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that does not start leaves the fleet as it was, and the next one is another."""

    def broken(*_: object) -> object:
        raise OSError("no process")

    before = await world.members()  # the decode engine that had more sequences is still there
    with monkeypatch.context() as patched:
        patched.setattr(child_process.os, "pipe", broken)
        failed = await world.scaled(1, 2)
    assert (failed.state, failed.present) == ("failed", Counts(1, 1))
    assert "no process" in failed.why
    assert sorted(await world.members()) == sorted(before)
    assert (await world.scaled(1, 2)).present == Counts(1, 2)
    assert sorted(await world.members()) == sorted([*before, "decode-3"])


@LONG
async def test_it_is_four_times_as_large_and_small_again_under_streams(world: World) -> None:
    async with streams(world.fleet.url, clients=20):
        for _ in range(2):
            assert (await world.scaled(4, 4)).present == Counts(4, 4)
            assert (await world.scaled(2, 6)).present == Counts(2, 6)
            assert (await world.scaled(1, 1)).present == Counts(1, 1)
    assert len(await world.members()) == 2
