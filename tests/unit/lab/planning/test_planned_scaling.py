"""`tercet planner --act scale`: a fleet of simulated engines behind a real router grows and shrinks with its load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tercet.cluster.local import local_fleet
from tercet.cluster.model import resolve_tokenizer
from tercet.cluster.running_fleet import RunningFleet
from tercet.cluster.scaling.control import control_socket
from tercet.cluster.scaling.scaler import Scaler
from tercet.cluster.up_config import UpConfig
from tercet.lab.planning.hands import ScaleHands
from tercet.lab.planning.live_planner import LivePlanner
from tercet.lab.planning.planner_metrics import PlannerMetrics
from tercet.settings.planner_config import PlannerConfig
from tercet.settings.planner_settings import PlannerSettings
from tercet.settings.role_settings import Objectives
from tercet.wire.client.ask_router import ask_router
from tests.unit.cluster.whole_streams import streams, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
BY_LOAD = """
from tercet.decisions.planning import FleetPlan, Observed, WantedPlan

def wanted(seen: Observed) -> WantedPlan:
    running = sum(not each.ended for each in seen.arrivals)
    return WantedPlan(FleetPlan(1, 2 if running > 2 else 1), f"{running} requests")
"""


@asynccontextmanager
async def scaled_fleet(tmp_path: Path) -> AsyncGenerator[tuple[RunningFleet, Path]]:
    config = UpConfig(
        port=0, simulate="llama-3.1-8b-h100-tp1", log_dir=str(tmp_path / "logs"),
        objectives=Objectives(ttft=1.0, tpot=0.025),
    )  # fmt: skip
    model = await asyncio.to_thread(resolve_tokenizer, "smollm2")
    async with local_fleet(config, model, lambda *_: None) as fleet:
        keeping = asyncio.create_task(fleet.until_broken(lambda *_: None))
        try:
            async with Scaler(fleet.hands, lambda *_: None) as scaler, control_socket(scaler) as socket:
                yield fleet, socket
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


async def test_engines_come_with_the_load_and_go_with_it_and_every_answer_is_whole(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BY_LOAD)
    async with scaled_fleet(tmp_path) as (fleet, socket):

        async def ask(method: str, path: str, body: Any = None) -> Any:
            return await ask_router(fleet.url, method, path, body)

        config = PlannerConfig(
            url=fleet.url, planner=f"{tmp_path / 'mine.py'}:wanted", act="scale",
            planning=PlannerSettings(interval_s=1.0, fewest=2, most=3),
        )  # fmt: skip
        planning = asyncio.create_task(LivePlanner(config, ask, ScaleHands(socket), PlannerMetrics()).run())
        try:
            async with streams(fleet.url, clients=6):
                await until(lambda: len(fleet.engines) == 3)
            async with streams(fleet.url, clients=1):
                await until(lambda: len(fleet.engines) == 2)
            reported = await ask("GET", "/planner")
        finally:
            planning.cancel()
            await asyncio.gather(planning, return_exceptions=True)
    assert {"1P1D", "1P2D"} == {each["wanted"] for each in reported["plans"]}
    assert any(each["steps"] == ["start one to decode"] for each in reported["plans"])
