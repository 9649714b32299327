"""Automatic roles in a simulation: the router's code in virtual time, and the changes that it made."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from tercet.decisions.roles import RoleFlip
from tercet.router.serve.service import Service
from tercet.router.state.roles import INTERVAL_S, FleetRoles, seen_for_roles
from tercet.settings.role_settings import Objectives
from tercet_lab.sim import SimEngine


class VirtualFlip(msgspec.Struct, frozen=True):
    """A change of roles, ``at`` a time of the run in seconds: ``engines`` have the role ``role`` from then on."""

    at: float
    engines: tuple[str, ...]
    role: str
    reason: str


class VirtualRoles:
    """The automatic roles of a router for simulated engines, with the list of changes."""

    def __init__(self, service: Service[Any], engines: Mapping[str, SimEngine], objectives: Objectives) -> None:
        self._fleet = service.fleet
        self._engines = engines
        seen = seen_for_roles(service.fleet, objectives)
        service.observers.add(seen)
        self._roles = FleetRoles(service.fleet, objectives, self._flip, seen)

    @property
    def flips(self) -> list[VirtualFlip]:
        """Changes of roles, the oldest first."""
        return [VirtualFlip(each.at, each.flip.engines, each.flip.role, each.flip.reason) for each in self._roles.flips]

    async def run(self) -> None:
        """Check the roles at regular intervals, until cancelled or until it raises: a simulation shows its errors."""
        while True:
            await self._look()
            await asyncio.sleep(INTERVAL_S)

    async def _look(self) -> None:
        """Report the engines' loads, as real engines do: a simulated engine reports nothing during a run of steps."""
        for name, engine in self._engines.items():
            self._fleet.report(name, engine.load())
        await self._roles.look()

    async def _flip(self, flip: RoleFlip) -> bool:
        for name in flip.engines:
            self._fleet.member(name).role = flip.role
        return True
