"""The short form of `test_ray_fleet.py`: a real Ray head and one machine, simulated engines, one of them killed."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import aiohttp
import pytest

from tercet.cluster.model import resolve_tokenizer
from tercet.cluster.on_ray.ray_fleet import ray_fleet
from tercet.cluster.up_config import UpConfig
from tests.long_runs import in_full
from tests.unit.cluster.whole_streams import read_whole

from .ray_cluster import ray_cluster
from .test_ray_fleet import SIMULATED, World, engines, one_engine

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(600),
    in_full,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray"),
]


async def test_an_engine_is_lost_and_replaced_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERCET_TEST_RAY", str(tmp_path))
    said: list[str] = []
    model = await asyncio.to_thread(resolve_tokenizer, "smollm2")
    with ray_cluster(nodes=1) as cluster:
        config = UpConfig(on=f"ray:{cluster.address}", port=0, log_dir=str(tmp_path), fleet_name="short", **SIMULATED)
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
