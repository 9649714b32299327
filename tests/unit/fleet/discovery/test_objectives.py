"""InferenceObjectives of a pool, as an endpoint picker follows them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager

import pytest

from tercet_gateway.objectives import PoolReference, follow_objectives
from tests.longest_wait import until

from .api_server import FAST, NAMESPACE, OBJECTIVES, ApiServer, api_server, objective

POOL = PoolReference("pool")


class Told:
    def __init__(self) -> None:
        self.all = list[Mapping[str, int]]()

    async def until(self, wanted: Callable[[Mapping[str, int]], bool]) -> None:
        await until(lambda: self.all and wanted(self.all[-1]))


@asynccontextmanager
async def following(server: ApiServer, pool: PoolReference = POOL) -> AsyncGenerator[Told]:
    told = Told()
    task = asyncio.create_task(follow_objectives(server.api, NAMESPACE, pool, told.all.append, FAST))
    try:
        yield told
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_objectives_of_the_pool_come_change_and_go() -> None:
    async with api_server() as server:
        server.put(objective("chat", 10), OBJECTIVES)
        server.put(objective("plain"), OBJECTIVES)
        server.put(objective("theirs", 5, pool="another"), OBJECTIVES)
        server.put(objective("full", 7, group="inference.networking.k8s.io", kind="InferencePool"), OBJECTIVES)
        server.put(objective("elsewhere", 6, group="inference.networking.x-k8s.io"), OBJECTIVES)
        server.put(objective("no-pool", 6, kind="Service"), OBJECTIVES)
        async with following(server) as told:
            await told.until(lambda found: found == {"chat": 10, "full": 7, "plain": 0})
            server.put(objective("batch", -1), OBJECTIVES)
            await told.until(lambda found: found == {"chat": 10, "full": 7, "plain": 0, "batch": -1})
            server.put(objective("chat", 2), OBJECTIVES)
            server.delete("plain", OBJECTIVES)
            await told.until(lambda found: found == {"chat": 2, "full": 7, "batch": -1})
            server.put(objective("batch", -1, deleting=True), OBJECTIVES)
            await told.until(lambda found: found == {"chat": 2, "full": 7})


@pytest.mark.parametrize(
    ("group", "names"),
    [("inference.networking.k8s.io", {"said", "unsaid"}), ("inference.networking.x-k8s.io", {"earlier"})],
)
async def test_a_pool_of_the_same_name_in_another_group_is_another_pool(group: str, names: set[str]) -> None:
    async with api_server() as server:
        server.put(objective("unsaid", 1), OBJECTIVES)
        server.put(objective("said", 1, group="inference.networking.k8s.io"), OBJECTIVES)
        server.put(objective("earlier", 1, group="inference.networking.x-k8s.io"), OBJECTIVES)
        server.put(objective("core", 1, group=""), OBJECTIVES)
        async with following(server, PoolReference("pool", group=group)) as told:
            await told.until(lambda found: set(found) == names)
            # One that is handed over to another pool does not hold here any more.
            moved, *rest = sorted(names)
            server.put(objective(moved, 1, group="example.com"), OBJECTIVES)
            await told.until(lambda found: set(found) == set(rest))


async def test_objectives_stay_while_the_server_does_not_answer_and_follow_after_410() -> None:
    async with api_server() as server:
        server.put(objective("chat", 10), OBJECTIVES)
        async with following(server) as told:
            await told.until(lambda found: found == {"chat": 10})
            server.refuse = 503, {}
            server.drop()
            server.put(objective("chat", 3), OBJECTIVES)
            server.elsewhere()
            server.compact()
            refused = len(server.queries) + 2
            await until(lambda: len(server.queries) >= refused)
            assert told.all[-1] == {"chat": 10}
            server.refuse = None
            await told.until(lambda found: found == {"chat": 3})


async def test_a_cluster_without_the_resource_is_asked_again() -> None:
    async with api_server() as server:
        server.refuse = 404, {}
        async with following(server) as told:
            await until(lambda: len(server.queries) >= 3)
            assert not told.all
            server.put(objective("chat", 1), OBJECTIVES)
            server.refuse = None
            await told.until(lambda found: found == {"chat": 1})
