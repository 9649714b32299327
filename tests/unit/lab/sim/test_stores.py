"""What a simulated engine keeps after requests whose names its clients chose."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tercet.cluster.ports import free_ports, url_of
from tercet.protocol.headers import INCARNATION_HEADER, PREFILLER_HEADER, REQUEST_ID_HEADER
from tercet.protocol.wire import API_PREFIX, LONGEST_SALT
from tercet_lab.sim.block_pool import PrefixTree
from tercet_lab.sim.sim_engine import SimEngine
from tercet_lab.sim.sim_server import ServerConfig, serving
from tests.unit.kept import Kept

from .models import profile_of
from .test_serving import HOST, QUICK

LONG = 4_000
BOUNDED_BY = {
    "PrefixTree._roots": "blocks: a root without blocks and holders is not kept; salts have LONGEST_SALT characters",
    "Run.children": "blocks",
    "Run.names": "blocks",
    "BlockPool._idle": "blocks",
    "Run.tokens": "blocks",
}
"""The stores that grow with requests, and what bounds each of them."""


class House:
    """One simulated engine with few blocks, and a client that sends names."""

    def __init__(self, engine: SimEngine, session: aiohttp.ClientSession, url: str) -> None:
        self.engine = engine
        self._session, self._url = session, url
        self._number = 0

    async def asks(self, requests: int, length: int) -> set[int]:
        """Send requests whose names have this length, each in another place; return the statuses."""
        statuses = set[int]()
        for _ in range(requests):
            self._number += 1
            named = f"{self._number}-".ljust(length, "n")
            path, body, headers = hostile(self._number, named)
            async with self._session.post(self._url + path, json=body, headers=headers) as answer:
                said = await answer.text()
                statuses.add(answer.status)
                assert len(said) < 2_000, "an error repeats a name"
        return statuses


def hostile(number: int, named: str) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Route, body and headers of a request with the client's name in one place."""
    words = " ".join(f"w{number}-{at}" for at in range(40))
    completion: dict[str, Any] = {"prompt": words, "max_tokens": 3}
    verb: dict[str, Any] = {"prompt": words, "seq_id": f"{number}"}
    prep_recv = f"{API_PREFIX}/prep_recv"
    kinds: tuple[tuple[str, dict[str, Any], dict[str, str]], ...] = (
        ("/v1/completions", {**completion, "cache_salt": named[:LONGEST_SALT]}, {}),
        ("/v1/completions", {**completion, "cache_salt": named + "n" * LONGEST_SALT}, {}),
        ("/v1/completions", {**completion, "model": named}, {}),
        ("/v1/completions", {**completion, "user": named, named: named}, {REQUEST_ID_HEADER: named}),
        ("/v1/completions", completion, {PREFILLER_HEADER: named}),
        (prep_recv, {**verb, "ttl": 0.001, "cache_salt": named[:LONGEST_SALT]}, {}),
        (prep_recv, {**verb, "cache_salt": named + "n" * LONGEST_SALT}, {}),
        (prep_recv, {**verb, "seq_id": named + "n" * 256}, {}),
        (prep_recv, {**verb, "adapter": named + "n" * 256}, {}),
        (prep_recv, verb, {INCARNATION_HEADER: named}),
        (f"{API_PREFIX}/abort", {"seq_id": named[:256]}, {}),
        (f"{API_PREFIX}/{named}", {}, {}),
    )
    return kinds[number % len(kinds)]


@asynccontextmanager
async def house() -> AsyncGenerator[House]:
    (port,) = free_ports(HOST, 1)
    config = ServerConfig(
        name="e", profile=profile_of(QUICK, 16), port=port, url=url_of(HOST, port), model="m", prefill_hosts="*:*"
    )
    async with serving(config) as engine, aiohttp.ClientSession() as session:
        yield House(engine, session, config.url)


@pytest.mark.processes
@pytest.mark.slow
async def test_each_store_of_an_engine_that_grows_is_in_the_table() -> None:
    async with house() as found:
        await found.asks(48, 20)
        before = Kept(found.engine)
        statuses = await found.asks(96, 20)
        unknown = Kept(found.engine).grown_since(before) - BOUNDED_BY.keys()
        assert statuses == {200, 400, 404, 409}
        assert not unknown, f"these grow with requests: write down in BOUNDED_BY what bounds their bytes: {unknown}"


@pytest.mark.processes
@pytest.mark.slow
async def test_an_engine_keeps_no_more_after_more_requests_with_long_names() -> None:
    async with house() as found:
        await found.asks(96, LONG)
        before = Kept(found.engine).bytes
        await found.asks(96, LONG)
        assert Kept(found.engine).bytes < before + 96 * LONG // 16


def test_a_tree_without_blocks_and_holders_is_not_kept() -> None:
    tree = PrefixTree(16)
    held = tree.root("held")
    for number in range(100):
        tree.root(f"{number}")
    assert tree.root("held") is held
    assert Kept(tree).lengths["PrefixTree._roots"] == 1
