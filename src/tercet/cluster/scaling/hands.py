"""Interface to start and stop the engines of one kind of fleet: on this machine, or on Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tercet.cluster.scaling.router_admin import RouterAdmin
from tercet.protocol import Role


class Hands(Protocol):
    """Interface to the engines of one kind of fleet. At most one task at a time calls the methods for an engine."""

    @property
    def router(self) -> RouterAdmin:
        """The router of the fleet."""
        ...

    @property
    def engines(self) -> Sequence[str]:
        """Names of the present engines without those that are given up."""
        ...

    @property
    def used(self) -> Sequence[str]:
        """All names of present and past engines."""
        ...

    def require_room(self, count: int) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` if ``count`` more engines cannot be started."""
        ...

    async def start(self, name: str, role: Role) -> None:
        """Start an engine, and return when it serves and the router has added it; stop it if that fails."""
        ...

    async def set_role(self, name: str, role: Role) -> None:
        """Change the role of a member."""
        ...

    async def stop(self, name: str) -> None:
        """Remove an engine from the router, and stop it."""
        ...
