"""The picker under test: that at ``--target``, or in Tercet's repository ``tercet epp`` over engines in name only."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from unittest.mock import patch

import grpc.aio
import pytest
import pytest_asyncio

from .envoy_side import BUFFERED, DUPLEX, MODES, EnvoySide
from .plain_router import plain_router

HOME = "tests.conformance"
"""What this package is called in Tercet's repository, where there is a picker to start."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance of endpoint pickers")
    group.addoption("--target", metavar="HOST:PORT", help="an endpoint picker's gRPC service")
    group.addoption("--endpoints", default="", metavar="HOST:PORT,...", help="all of its pool, at least two, none full")
    group.addoption("--model", default="m", help="a model that they serve")
    group.addoption("--tls", action="store_true", help="its service speaks TLS; any certificate is taken")
    group.addoption("--health", metavar="HOST:PORT", help="where its health is served without TLS, if not at --target")
    group.addoption(
        "--empty", metavar="HOST:PORT", help="a picker without a ready endpoint (or those tests are skipped)"
    )
    group.addoption("--saturated", metavar="HOST:PORT", help="a picker whose endpoints are full (or they are skipped)")
    group.addoption("--sheddable", metavar="NAME", help="an objective of --saturated whose requests may be dropped")
    group.addoption("--patience", type=float, default=10.0, metavar="SECONDS", help="how long an answer may take (10)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes a fifth of a second or more by itself")
    if config.getoption("--target") is not None:
        if len(frozenset(str(config.getoption("--endpoints")).split(","))) < 2:
            raise pytest.UsageError("--endpoints: name all endpoints of the target's pool, at least two")
    elif __package__ != HOME:
        raise pytest.UsageError("--target: name the endpoint picker, and --endpoints those of its pool")
    if config.getoption("--saturated") is not None and config.getoption("--sheddable") is None:
        raise pytest.UsageError("--sheddable: name the objective whose requests --saturated may drop")


@dataclass(frozen=True)
class Target:
    """A picker, and its pool."""

    envoy: EnvoySide
    channel: grpc.aio.Channel
    health: grpc.aio.Channel
    endpoints: frozenset[str]
    model: str


@dataclass(frozen=True)
class Saturated:
    """A picker whose endpoints are full, and what its requests that may be dropped name."""

    envoy: EnvoySide
    objective: str
    model: str


class Way:
    """Channels to pickers, closed when it ends."""

    def __init__(self, config: pytest.Config, stack: AsyncExitStack) -> None:
        self.config = config
        self._stack = stack

    async def to(self, address: str, tls: bool | None = None) -> grpc.aio.Channel:
        """A channel to an address; with TLS as ``--tls`` says, if not told."""
        if self.config.getoption("--tls", False) if tls is None else tls:
            host, _, port = address.rpartition(":")
            address = await self._stack.enter_async_context(plain_router(host.strip("[]"), int(port)))
        return await self._stack.enter_async_context(grpc.aio.insecure_channel(address))

    async def started(self, *, answers: bool = True, full: bool = False) -> tuple[str, frozenset[str]]:
        """Address and endpoints of a ``tercet epp`` of our own."""
        from msgspec import structs

        from ..unit.gateway.pickers import IDLE, serving

        # On a busy machine, a body in pieces of one byte arrives at less than the least rate.
        self._stack.enter_context(patch("tercet_gateway.exchange.SECONDS", 120.0))
        roles = ("both",) * 4
        served = await self._stack.enter_async_context(serving(*roles, objectives={"batch": "-1"}))
        for member in served.fleet.members:
            member.reachable = answers
            if full:
                served.fleet.report(member.name, structs.replace(IDLE, waiting=99))
        return f"127.0.0.1:{served.server.port}", frozenset(served.addresses)

    def told(self, option: str) -> str | None:
        found = self.config.getoption(option, None)
        return None if found is None else str(found)

    @property
    def model(self) -> str:
        return self.told("--model") or "m"

    def envoy(self, channel: grpc.aio.Channel) -> EnvoySide:
        return EnvoySide(channel, float(self.told("--patience") or 10.0))


@pytest_asyncio.fixture
async def way(request: pytest.FixtureRequest) -> AsyncGenerator[Way]:
    async with AsyncExitStack() as stack:
        yield Way(request.config, stack)


@pytest_asyncio.fixture
async def target(way: Way) -> Target:
    address, endpoints = way.told("--target"), frozenset((way.told("--endpoints") or "").split(","))
    if address is None:
        address, endpoints = await way.started()
    channel, health = await way.to(address), way.told("--health")
    return Target(
        way.envoy(channel),
        channel,
        channel if health is None else await way.to(health, tls=False),
        endpoints,
        way.model,
    )


@pytest_asyncio.fixture
async def empty(way: Way) -> EnvoySide:
    """A picker that has no endpoint to pick."""
    address = way.told("--empty")
    if address is None and way.told("--target") is not None:
        pytest.skip("--empty: no picker without endpoints is named")
    if address is None:
        address, _ = await way.started(answers=False)
    return way.envoy(await way.to(address))


@pytest_asyncio.fixture
async def saturated(way: Way) -> Saturated:
    address, objective = way.told("--saturated"), way.told("--sheddable")
    if address is None and way.told("--target") is not None:
        pytest.skip("--saturated: no picker with full endpoints is named")
    if address is None:
        address, _ = await way.started(full=True)
        objective = "batch"
    return Saturated(way.envoy(await way.to(address)), str(objective), way.model)


@pytest.fixture(params=MODES.values(), ids=list(MODES))
def mode(request: pytest.FixtureRequest) -> int:
    """How Envoy shows bodies."""
    return request.param


@pytest.fixture(params=[DUPLEX, BUFFERED], ids=["full-duplex", "buffered"])
def reading_mode(request: pytest.FixtureRequest) -> int:
    """Those in which a picker sees the whole body before it has to name endpoints."""
    return request.param
