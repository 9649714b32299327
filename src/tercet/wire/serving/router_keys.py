"""The keys of a router or a model router for clients and administrators, reloaded when their files change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from tercet.protocol import BadRequest
from tercet.protocol.access import BearerKeys, Callers, secrets_of
from tercet.settings import RouterSettings
from tercet.settings.admin_address import AdminAddress
from tercet.settings.key_files import KeyFile
from tercet.settings.router_config import RouterConfig
from tercet.settings.variables import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from tercet.wire.serving.admin_access import AdminAccess
from tercet.wire.serving.server_access import is_loopback

logger = logging.getLogger("tercet.router")
POLL_INTERVAL_S = 1.0


class KeySettings(Protocol):
    """The settings of keys, of a router or of a server before routers."""

    @property
    def admin_key(self) -> str: ...
    @property
    def api_key_file(self) -> str | None: ...
    @property
    def admin_key_file(self) -> str | None: ...
    @property
    def open_to_all(self) -> bool: ...


class RouterKeys:
    """The ``clients`` keys for vLLM's routes and the ``admins`` keys for admin routes.

    ``given`` are client keys that come from flags or the environment.
    """

    def __init__(self, config: KeySettings, given: Sequence[str]) -> None:
        self._given = {"api-key-file": tuple(given), "admin-key-file": (config.admin_key,)}
        paths = {"api-key-file": config.api_key_file, "admin-key-file": config.admin_key_file}
        self._files = {name: KeyFile(path, name) for name, path in paths.items() if path is not None}
        self._read = {name: file.first() for name, file in self._files.items()}
        self._failed: dict[str, str] = {}
        self._engines = Callers(secrets_of(config.secret if isinstance(config, RouterSettings) else ""))
        self._supervisor = config.supervisor_key if isinstance(config, RouterConfig) else ""
        self.clients, self.admins = (self._keys(name) for name in paths)
        if self.admins.shares_with(self.clients):
            raise BadRequest(
                "admin-key: is also a client key, so clients would be administrators; set another key", "admin-key"
            )

    def _keys(self, name: str) -> BearerKeys:
        return BearerKeys((*self._given[name], *self._read.get(name, ())), always=name in self._files)

    @property
    def access(self) -> AdminAccess:
        """The check of access to admin routes."""
        return AdminAccess(self.admins, self.clients, self._engines, self._supervisor)

    @property
    def first_of_clients(self) -> str:
        """One of the client keys, to be shown to other servers; empty without keys."""
        return next(iter((*self._given["api-key-file"], *self._read.get("api-key-file", ()))), "")

    def require_private(self, host: str, config: KeySettings) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` if other machines reach ``host`` and clients need no key."""
        if not self.clients and not config.open_to_all and not is_loopback(host):
            flag = "--api-key after --, " if isinstance(config, RouterSettings) else ""
            raise BadRequest(
                f"host: other machines reach {host or 'any address'}, and clients need no key; set {flag}"
                f"{API_KEY_VARIABLE} or --api-key-file, or allow this with --open-to-all",
                "host",
            )

    def require_private_admin(self, address: AdminAddress | None) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` if other machines reach the admin address without an admin key."""
        if address is not None and not address.path and not self.admins and not is_loopback(address.host):
            raise BadRequest(
                f"admin-listen: other machines reach {address}, and no admin key is set; set {ADMIN_KEY_VARIABLE} or "
                "--admin-key-file, or listen at 127.0.0.1",
                "admin-listen",
            )

    async def follow(self) -> None:
        """Reload the key files when they change, until cancelled."""
        while self._files:
            await asyncio.sleep(POLL_INTERVAL_S)
            await self.look()

    async def look(self) -> None:
        """Reload the key files; keep the keys of a file that cannot be read. An empty file refuses every caller."""
        for name, keys in (("api-key-file", self.clients), ("admin-key-file", self.admins)):
            file = self._files.get(name)
            if file is None:
                continue
            try:
                found = await asyncio.to_thread(file.read)  # a network file system may hang
            except BadRequest as error:
                self._tell(name, error.message + "; the present keys stay valid")
                continue
            self._tell(name, "" if found or any(self._given[name]) else f"{name}: has no key; refusing every caller")
            if found != self._read[name]:
                self._read[name] = found
                keys.replace((*self._given[name], *found))
                logger.info("%s: reloaded %d keys", name, len(found))

    def _tell(self, name: str, failure: str) -> None:
        if failure and self._failed.get(name) != failure:
            logger.error("%s", failure)
        self._failed[name] = failure
