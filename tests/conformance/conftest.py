"""The picker under test: the one at ``--target``, or ``tercet epp`` over engines that exist in name only."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc.aio
import pytest
import pytest_asyncio

from .envoy_side import MODES, EnvoySide


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--target", help="HOST:PORT of an endpoint picker; one of our own without it")
    group.addoption("--endpoints", default="", help="the endpoints (HOST:PORT, ...) of its pool, at least two")
    group.addoption("--model", default="m", help="a model that they serve")


@dataclass(frozen=True)
class Target:
    """A picker, and its pool."""

    envoy: EnvoySide
    channel: grpc.aio.Channel
    endpoints: frozenset[str]
    model: str


@pytest_asyncio.fixture
async def target(request: pytest.FixtureRequest) -> AsyncGenerator[Target]:
    address, model = request.config.getoption("--target"), str(request.config.getoption("--model"))
    if address is not None:
        endpoints = frozenset(str(request.config.getoption("--endpoints")).split(","))
        assert len(endpoints) >= 2, "--endpoints: name at least two endpoints of the target's pool"
        async with grpc.aio.insecure_channel(str(address)) as channel:
            yield Target(EnvoySide(channel), channel, endpoints, model)
        return
    from ..unit.gateway.pickers import serving

    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving("both", "both", "both", "both"))
        ours = f"127.0.0.1:{served.server.port}"
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(ours))
        yield Target(EnvoySide(channel), channel, frozenset(served.addresses), model)


@pytest.fixture(params=MODES.values(), ids=list(MODES))
def mode(request: pytest.FixtureRequest) -> int:
    return request.param
