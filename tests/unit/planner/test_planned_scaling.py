"""`tercet planner --act scale`: a fleet of simulated engines behind a real router grows and shrinks with its load."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tercet.cluster.local import local_fleet
from tercet.cluster.model import resolve_tokenizer
from tercet.cluster.running_fleet import RunningFleet
from tercet.cluster.scaling.scaler import Scaler, control_socket
from tercet.cluster.up_config import UpConfig
from tercet.settings.fleet_settings import Objectives
from tercet.wire.client.bounded_answers import ask_router
from tercet_lab.planner_settings import PlannerSettings
from tercet_planner.live_planner import Ask, LivePlanner, PlannerMetrics, ScaleProvisioner
from tercet_planner.planner_settings import PlannerConfig
from tests.unit.cluster.whole_streams import SECONDS, read_whole, streams, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600), pytest.mark.usefixtures("forked")]
BY_LOAD = """
from tercet.decisions.planning import FleetPlan, Observed, WantedPlan

def wanted(seen: Observed) -> WantedPlan:
    running = sum(not each.ended for each in seen.arrivals)
    return WantedPlan(FleetPlan(1, 2 if running > 2 else 1), f"{running} requests")
"""


LONG = pytest.mark.skipif(not os.environ.get("TERCET_LONG_TESTS"), reason="takes two minutes; make test-long")
SLOW = "smollm2-135m-cpu"
"""A prompt of 500 tokens takes it 0.7 s."""


@asynccontextmanager
async def scaled_fleet(
    tmp_path: Path, profile: str, objectives: Objectives
) -> AsyncGenerator[tuple[RunningFleet, Path]]:
    config = UpConfig(port=0, simulate=profile, log_dir=str(tmp_path / "logs"), objectives=objectives)
    model = await asyncio.to_thread(resolve_tokenizer, "smollm2")
    async with local_fleet(config, model, lambda *_: None) as fleet:
        keeping = asyncio.create_task(fleet.until_broken(lambda *_: None))
        try:
            async with Scaler(fleet.provisioner, lambda *_: None) as scaler, control_socket(scaler) as socket:
                yield fleet, socket
        finally:
            await ended(keeping)


@asynccontextmanager
async def planned(socket: Path, config: PlannerConfig) -> AsyncGenerator[Ask]:
    async def ask(method: str, path: str, body: Any = None) -> Any:
        return await ask_router(config.url, method, path, body)

    planning = asyncio.create_task(LivePlanner(config, ask, ScaleProvisioner(socket), PlannerMetrics()).run())
    try:
        yield ask
    finally:
        await ended(planning)


async def ended(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_engines_come_with_the_load_and_go_with_it_and_every_answer_is_whole(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BY_LOAD)
    async with scaled_fleet(tmp_path, "llama-3.1-8b-h100-tp1", Objectives(ttft=1.0, tpot=0.025)) as (fleet, socket):
        config = PlannerConfig(
            url=fleet.url, planner=f"{tmp_path / 'mine.py'}:wanted", act="scale",
            planning=PlannerSettings(interval_s=1.0, fewest=2, most=3),
        )  # fmt: skip
        async with planned(socket, config) as ask:
            async with streams(fleet.url, clients=6):
                await until(lambda: len(fleet.engines) == 3)
            async with streams(fleet.url, clients=1):
                await until(lambda: len(fleet.engines) == 2)
            reported = await ask("GET", "/planner", None)
    assert {"1P1D", "1P2D"} == {each["wanted"] for each in reported["plans"]}
    assert any(each["steps"] == ["start one to decode"] for each in reported["plans"])


@LONG
async def test_a_line_of_prefills_gets_engines_and_an_idle_fleet_gives_them_up(tmp_path: Path) -> None:
    async with scaled_fleet(tmp_path, SLOW, Objectives(ttft=2.0, tpot=0.2)) as (fleet, socket):
        config = PlannerConfig(
            url=fleet.url, act="scale", profile=SLOW,
            planning=PlannerSettings(interval_s=5.0, fewest=2, most=4, start_s=5),
        )  # fmt: skip
        async with planned(socket, config) as ask:
            async with new_prompts(fleet.url, clients=8):
                await until(lambda: len(fleet.engines) > 2)
                reasons = [each["reason"] for each in (await ask("GET", "/planner", None))["plans"]]
            await until(lambda: len(fleet.engines) == 2)
    assert any(each.startswith("guard:") or "would meet them for" in each for each in reasons)


@asynccontextmanager
async def new_prompts(url: str, clients: int) -> AsyncGenerator[None]:
    """Clients that ask for prompts that no engine has cached, until the end; every answer is whole."""
    numbers, over = itertools.count(), asyncio.Event()

    async def ask() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SECONDS)) as session:
            while not over.is_set():
                await read_whole(session, url, f"{next(numbers)}. " + "One two three four. " * 100, 20)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(ask())
        yield
        over.set()
