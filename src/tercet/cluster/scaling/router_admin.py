"""What the process that owns a fleet asks of the fleet's router, by a separate key."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from tercet.protocol import EngineUnreachable, Role, UnknownEngine
from tercet.wire.client.ask_router import ask_router


class RouterAdmin:
    """The router at ``url``, asked with ``key``. Every method raises :class:`~tercet.protocol.TercetError`."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._key = key

    async def engines(self) -> list[dict[str, Any]]:
        """Every engine, as the router shows it."""
        return await self._ask("GET", "/engines")

    async def engine(self, name: str) -> dict[str, Any]:
        """One engine."""
        for each in await self.engines():
            if each["name"] == name:
                return each
        raise UnknownEngine(f"{name} is not in the fleet any more", "name")

    async def add(self, name: str, url: str, role: Role) -> None:
        """One more engine, which serves already."""
        await self._ask("POST", "/engines", {"name": name, "url": url, "role": role})

    async def drain(self, name: str) -> dict[str, Any]:
        """Nothing new begins there, and what runs moves."""
        return await self._ask("POST", f"/engines/{quote(name, safe='')}/drain")

    async def set_role(self, name: str, role: Role) -> None:
        """Give an engine another role."""
        await self._ask("PUT", f"/engines/{quote(name, safe='')}/role", {"role": role})

    async def remove(self, name: str) -> None:
        """Forget an engine."""
        await self._ask("DELETE", f"/engines/{quote(name, safe='')}")

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        try:
            # Of this machine: its certificate is for its clients.
            return await ask_router(self._url, method, path, body, self._key, checks_certificate=False)
        except EngineUnreachable as error:
            raise EngineUnreachable(f"the router does not answer: {error.message}") from error
