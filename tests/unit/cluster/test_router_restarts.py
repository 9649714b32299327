"""A fleet whose router is killed: the router is restarted, and finds all that was changed since the fleet's start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import psutil
import pytest

from tercet.cluster import running_fleet
from tercet.cluster.child_process import StartFailed
from tercet.cluster.local import local_fleet
from tercet.cluster.model import resolve_tokenizer
from tercet.cluster.running_fleet import RunningFleet
from tercet.cluster.scaling.decide import Counts, ScaleCall
from tercet.cluster.scaling.scaler import Scaler
from tercet.cluster.up_config import UpConfig
from tercet.protocol import EngineStatus
from tercet.settings.fleet_settings import SessionSettings
from tercet.wire.client import HttpEngine
from tercet.wire.client.bounded_answers import ask_router
from tests.longest_wait import LONGEST_WAIT_S
from tests.unit.cluster.test_local import children_of, config_of, gone, scripts, soon
from tests.unit.cluster.whole_streams import read_whole, until

__all__ = ["scripts", "soon"]
pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def kill_router(fleet: RunningFleet) -> None:
    """Kill the router alone, as the system does when memory is short: its guard sees the end."""
    port = urlsplit(fleet.url).port
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) != fleet.router.pid:
                continue
            if any(each.laddr.port == port and each.status == "LISTEN" for each in process.net_connections("tcp")):
                process.kill()
                return
    raise AssertionError("the router does not listen")


@asynccontextmanager
async def kept_fleet(
    config: UpConfig, said: list[str], model: str = "m"
) -> AsyncGenerator[tuple[RunningFleet, asyncio.Task[Any]]]:
    """A fleet whose processes are restarted, and the task that does so; ``said`` gets what it reports."""
    async with local_fleet(config, model, lambda *_: None) as fleet:
        keeping = asyncio.create_task(fleet.until_broken(lambda name, state: said.append(f"{name} {state}")))
        try:
            yield fleet, keeping
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


# ---- scripts in the place of engines and router ---------------------------------------------------------------------


async def test_a_dead_router_is_restarted_where_it_was_and_the_engines_continue(
    tmp_path: Path, scripts: dict[str, str], soon: None
) -> None:
    said: list[str] = []
    async with kept_fleet(config_of(tmp_path), said) as (fleet, keeping):
        engines, first, before = [each.process for each in fleet.engines], fleet.router, fleet.router.log.read_text()
        os.kill(first.pid or 0, signal.SIGKILL)
        await until(lambda: any("router ready" in line for line in said))
        assert said[0] == (
            "router was killed by SIGKILL; restart 1 of 5 in 0.01 s; the engines continue to run; "
            f"log: {fleet.log_dir / 'router.log'}"
        )
        assert fleet.router is not first
        assert fleet.router.log == first.log
        assert first.log.read_text().startswith(before), "the log goes on"
        assert fleet.router.log_begin == len(before)
        assert [each.process for each in fleet.engines] == engines
        assert all(each.returncode is None for each in engines)
        assert not keeping.done()
    assert gone(children_of(tmp_path / "logs"))


async def test_a_router_that_stands_still_is_killed_and_restarted(
    tmp_path: Path, scripts: dict[str, str], soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_fleet, "LOOK_SECONDS", 1.0)
    monkeypatch.setattr(running_fleet, "MOST_SILENT", 3)
    said: list[str] = []
    async with kept_fleet(config_of(tmp_path), said) as (fleet, _):
        engines, first = [each.process for each in fleet.engines], fleet.router
        os.killpg(first.pid or 0, signal.SIGSTOP)
        await until(lambda: any("router ready" in line for line in said))
        assert said[0].startswith("router did not answer for 3 s and was killed; restart 1 of 5 in 0.01 s; the engines")
        assert fleet.router is not first
        assert first.returncode is not None
        assert [each.process for each in fleet.engines] == engines
    assert gone(children_of(tmp_path / "logs"))


async def test_a_slow_router_is_left_alone(
    tmp_path: Path, scripts: dict[str, str], soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_fleet, "LOOK_SECONDS", 1.0)
    monkeypatch.setattr(running_fleet, "MOST_SILENT", 3)
    said: list[str] = []
    async with kept_fleet(config_of(tmp_path), said) as (fleet, _):
        first = fleet.router
        for _ in range(3):  # 1.5 s without an answer each time
            os.killpg(first.pid or 0, signal.SIGSTOP)
            await asyncio.sleep(1.5)
            os.killpg(first.pid or 0, signal.SIGCONT)
            await asyncio.sleep(1.5)
        assert (fleet.router, said) == (first, [])
    assert gone(children_of(tmp_path / "logs"))


async def test_a_router_that_dies_again_and_again_ends_the_fleet_with_its_last_reason(
    tmp_path: Path, scripts: dict[str, str], soon: None
) -> None:
    said: list[str] = []
    async with kept_fleet(config_of(tmp_path, engine_restarts=2), said) as (fleet, keeping):
        fleet.router._argv = [*fleet.router._argv[:-1], "dies"]  # type: ignore[index]
        os.kill(fleet.router.pid or 0, signal.SIGKILL)
        with pytest.raises(StartFailed) as raised:
            await asyncio.wait_for(keeping, LONGEST_WAIT_S)
    first, *rest = raised.value.message.splitlines()
    assert first == "router ended with exit code 3; it has been restarted 2 times in a row"
    assert "the model is not there" in rest
    assert sum("child" in line for line in rest) == 1, "the output of earlier starts is not its reason"
    assert [line.split(";")[0] for line in said if "restart" in line] == [
        "router was killed by SIGKILL", "router ended with exit code 3",
    ]  # fmt: skip
    assert gone(children_of(tmp_path / "logs"))


@pytest.mark.parametrize("after", [0.0, 0.1, 0.3])
async def test_stopped_while_the_router_is_restarted_it_leaves_nothing(
    tmp_path: Path, scripts: dict[str, str], soon: None, after: float
) -> None:
    said: list[str] = []
    async with kept_fleet(config_of(tmp_path), said) as (fleet, _):
        os.kill(fleet.router.pid or 0, signal.SIGKILL)
        await until(lambda: bool(said))
        await asyncio.sleep(after)
    everything = [int(line.split()[1]) for log in fleet.log_dir.glob("*.log") for line in log.read_text().splitlines()
                  if line.startswith("child")]  # fmt: skip
    assert gone(everything)


async def test_an_engine_that_is_given_up_while_the_router_is_away_is_removed_later(
    tmp_path: Path, scripts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    async with kept_fleet(config_of(tmp_path, engine_restarts=1), said) as (fleet, _):
        fleet.engines[1].restarts.limit = 0
        os.kill(fleet.router.pid or 0, signal.SIGKILL)
        os.kill(fleet.engines[1].process.pid or 0, signal.SIGKILL)
        await until(lambda: "deleted /tercet/v1/engines/decode-0" in fleet.router.log.read_text())
        assert not any("cannot remove" in line for line in said)


# ---- simulated engines behind a real router -------------------------------------------------------------------------


@asynccontextmanager
async def simulated(tmp_path: Path, said: list[str], **fields: Any) -> AsyncGenerator[RunningFleet]:
    config = UpConfig(port=0, simulate="llama-3.1-8b-h100-tp1", log_dir=str(tmp_path / "logs"), **fields)
    model = await asyncio.to_thread(resolve_tokenizer, "smollm2")
    async with kept_fleet(config, said, model) as (fleet, _):
        yield fleet


async def status_of(url: str) -> EngineStatus:
    async with HttpEngine("e", url) as engine:
        return await engine.status()


async def turn(client: aiohttp.ClientSession, url: str) -> None:
    """The turn of a session."""
    body = {"model": "smollm2", "prompt": "one two", "max_tokens": 20}
    async with client.post(f"{url}/v1/completions", json=body, headers={"x-session-id": "s"}) as response:
        assert response.status == 200, await response.text()


async def until_sessions(client: aiohttp.ClientSession, url: str, number: int) -> None:
    """Wait until the router remembers so many sessions."""
    async with asyncio.timeout(LONGEST_WAIT_S):
        while True:
            async with client.get(f"{url}/metrics") as response:
                if f"\ntercet_sessions {number}.0\n" in await response.text():
                    return
            await asyncio.sleep(0.05)


async def until_restarted(said: list[str]) -> None:
    await until(lambda: any(line.startswith("router ready in") for line in said))


@pytest.mark.usefixtures("forked")
async def test_killed_under_streams_it_comes_back_with_all_changes_and_the_engines_with_their_blocks(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    sessions = msgspec.convert({"sessions": "on"}, SessionSettings)
    async with (
        simulated(tmp_path, said, prefill=1, decode=2, sessions=sessions) as fleet,
        aiohttp.ClientSession() as session,
    ):
        url = fleet.url
        async with Scaler(fleet.provisioner, lambda *_: None) as scaler:
            await scaler.scale(ScaleCall(decode=3))
            await until(lambda: len(fleet.engines) == 4 and all(each.is_kept for each in fleet.engines))
        await ask_router(url, "PUT", "/program", {"program": "balanced", "args": {"balance_ratio": "0.2"}})
        await ask_router(url, "POST", "/engines/decode-1/drain")
        await ask_router(url, "PUT", "/engines/decode-0/role", {"role": "both"})
        program, engines = await ask_router(url, "GET", "/program"), await ask_router(url, "GET", "/engines")
        await turn(session, url)
        at_rest = {each.name: await status_of(each.url) for each in fleet.engines}

        begun = [asyncio.Event() for _ in range(6)]
        streams = [
            asyncio.create_task(read_whole(session, url, f"{number} one two", 8000, event))
            for number, event in enumerate(begun)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        assert sum([(await status_of(each.url)).running for each in fleet.engines])
        await until(lambda: any(fleet.log_dir.glob("router-state.json.sessions*")))
        kill_router(fleet)
        assert all(await asyncio.gather(*streams, return_exceptions=True)), "streams end with their router"
        await until_restarted(said)

        after = await ask_router(url, "GET", "/engines")
        kept = ("name", "url", "role", "draining")
        assert [[each[key] for key in kept] for each in after] == [[each[key] for key in kept] for each in engines]
        assert await ask_router(url, "GET", "/program") == program
        await until_sessions(session, url, 1)
        await turn(session, url)
        for engine in fleet.engines:
            async with asyncio.timeout(LONGEST_WAIT_S):
                while (now := await status_of(engine.url)).running or now.leases or now.sends:
                    await asyncio.sleep(0.05)
            assert now.free_blocks == at_rest[engine.name].free_blocks


@pytest.mark.usefixtures("forked")
async def test_scaling_waits_for_a_router_that_is_restarted(tmp_path: Path) -> None:
    said: list[str] = []
    async with simulated(tmp_path, said) as fleet, Scaler(fleet.provisioner, lambda *_: None) as scaler:
        kill_router(fleet)
        await until(lambda: bool(said))
        record = await scaler.scale(ScaleCall(decode=2))
        kill_router(fleet)  # and once more, while the new engine starts
        async with asyncio.timeout(LONGEST_WAIT_S):
            while (record := await scaler.record()).state == "under_way":
                await asyncio.sleep(0.05)
        assert (record.state, record.present, record.why) == ("done", Counts(1, 2), "")
        names = [each["name"] for each in await ask_router(fleet.url, "GET", "/engines")]
        assert names == ["prefill-0", "decode-0", "decode-1"]
