"""Calls to a fleet's router by the process that owns the fleet, with a separate key."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

from tercet.protocol import EngineNotReached, EngineUnreachable, Role, UnknownEngine
from tercet.wire.client.ask_router import ask_router

AWAY_SECONDS = 30.0
"""Longest wait in seconds for a router that does not listen: it has ended, and is restarted."""
POLL_INTERVAL_S = 0.2


class RouterAdmin:
    """Client of the router at ``url`` with ``key``, which waits while the router is restarted.

    Every method raises :class:`~tercet.protocol.TercetError`.
    """

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._key = key

    async def engines(self) -> list[dict[str, Any]]:
        """Return all engines, as the router lists them."""
        return await self._ask("GET", "/engines")

    async def engine(self, name: str) -> dict[str, Any]:
        """Return one engine; raise :class:`~tercet.protocol.UnknownEngine` if the router does not have it."""
        for each in await self.engines():
            if each["name"] == name:
                return each
        raise UnknownEngine(f"{name} is not in the fleet", "name")

    async def add(self, name: str, url: str, role: Role) -> None:
        """Add an engine that serves already."""
        await self._ask("POST", "/engines", {"name": name, "url": url, "role": role})

    async def drain(self, name: str) -> dict[str, Any]:
        """Drain an engine: it gets no new requests, and its sequences move. Return its state."""
        return await self._ask("POST", f"/engines/{quote(name, safe='')}/drain")

    async def set_role(self, name: str, role: Role) -> None:
        """Change the role of an engine."""
        await self._ask("PUT", f"/engines/{quote(name, safe='')}/role", {"role": role})

    async def remove(self, name: str) -> None:
        """Remove an engine from the router."""
        await self._ask("DELETE", f"/engines/{quote(name, safe='')}")

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        clock = asyncio.get_running_loop().time
        deadline = clock() + AWAY_SECONDS
        while True:
            try:
                # The router is on this machine, and its certificate is for its clients' names.
                return await ask_router(self._url, method, path, body, self._key, checks_certificate=False)
            except EngineUnreachable as error:
                # A call that may have reached the router is not repeated: it may have been carried out.
                if not isinstance(error, EngineNotReached) or clock() > deadline:
                    raise EngineUnreachable(f"the router does not answer: {error.message}") from error
            await asyncio.sleep(POLL_INTERVAL_S)
