"""Pickers over engines that exist in name only, which report what a test says."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence, Sized
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from tercet.fleet import EngineFleet, Member
from tercet.protocol import EngineLoad, Role
from tercet.settings import EngineAddress
from tercet_gateway.endpoint_picker import EndpointPicker, PickerMetrics, address_of
from tercet_gateway.gateway_settings import PickerConfig
from tercet_gateway.openai_call import ByCharacters
from tercet_gateway.server import PickerServer, picking, scheduling_of
from tests.longest_wait import until
from tests.unit.fakes import FakeEngine

IDLE = EngineLoad(waiting=0, running=0, kv_usage=0.0, tokens=0)


def addresses(roles: Sequence[Role]) -> tuple[EngineAddress, ...]:
    return tuple(EngineAddress(f"e{n}", f"http://10.0.0.{n + 1}:8000", role) for n, role in enumerate(roles))


def config_for(roles: Sequence[Role], **fields: Any) -> PickerConfig:
    told: dict[str, Any] = {"engines": addresses(roles), "port": 0, "metrics_port": 0, **fields}
    return PickerConfig(**told)


def fleet_for(config: PickerConfig, clock: Any = None, seed: int = 1) -> EngineFleet:
    members = [Member(a.name, a.url, a.role, FakeEngine(a.name), labels=a.labels) for a in config.engines]
    for member in members:
        member.model = "m"
    timed = {} if clock is None else {"clock": clock}
    return EngineFleet(members, scheduling=scheduling_of(config), seed=seed, **timed)


class House:
    """One picker without a server; ``now`` is its clock."""

    def __init__(self, *roles: Role, fleet: EngineFleet | None = None, **fields: Any) -> None:
        self.now = 100.0
        self.config = config_for(roles, **fields)
        self.fleet = fleet or fleet_for(self.config, lambda: self.now)
        self.metrics = PickerMetrics(self.fleet.serves)
        self.picker = EndpointPicker(self.fleet, ByCharacters(), self.metrics, self.config, lambda: self.now)

    def report(self, name: str, **load: Any) -> None:
        self.fleet.report(name, structs.replace(IDLE, **load))

    async def next_comes_in(self, order: Sized, waiting: int) -> None:
        """Time passes, e0 reports what waits there, and one more is picked for."""
        done = len(order)
        self.now += 1
        self.report("e0", waiting=waiting)
        await until(lambda: len(order) > done)


@dataclass
class Served:
    server: PickerServer
    fleet: EngineFleet
    addresses: list[str]


@asynccontextmanager
async def serving(*roles: Role, **fields: Any) -> AsyncGenerator[Served]:
    """A picker that serves on a free port."""
    config = config_for(roles, **fields)
    fleet = fleet_for(config)
    async with picking(fleet, config) as server:
        yield Served(server, fleet, [address_of(address.url) for address in config.engines])
