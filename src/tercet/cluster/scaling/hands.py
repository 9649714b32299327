"""What starts and ends the engines of one kind of fleet: on this machine, or on Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tercet.cluster.scaling.router_admin import RouterAdmin
from tercet.protocol import Role


class Hands(Protocol):
    """Starts and ends the engines of one kind of fleet. Each method is called for one engine by one task."""

    @property
    def router(self) -> RouterAdmin:
        """The router of the fleet."""
        ...

    @property
    def engines(self) -> Sequence[str]:
        """Names of the engines that are there, and not given up."""
        ...

    @property
    def used(self) -> Sequence[str]:
        """All names that there ever were."""
        ...

    def require_room(self, count: int) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` if ``count`` more engines cannot be started."""
        ...

    async def start(self, name: str, role: Role) -> None:
        """Start an engine; returns when it serves and the router has it. Nothing is left of one that fails."""
        ...

    async def set_role(self, name: str, role: Role) -> None:
        """Give a member another role."""
        ...

    async def stop(self, name: str) -> None:
        """Take an engine from the router, and end it."""
        ...
