"""Engines that come and go while the front door serves: their connections, and who may join."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from typing import Self

import msgspec

from tercet.fleet import EngineFleet, Member
from tercet.protocol import BadRequest, Conflict, Engine, EngineStatus, EngineUnreachable, Role, TercetError
from tercet.router.connections import Connect
from tercet.settings import EngineAddress

logger = logging.getLogger("tercet.router")
ASK_AGAIN_SECONDS = 0.5
READY_SECONDS = 600.0


class Membership:
    """Adds engines to ``fleet`` and takes them away; opens and closes their connections by ``connect(name, url)``.

    Use as an async context manager; its end closes every connection.
    """

    def __init__(self, fleet: EngineFleet, connect: Connect) -> None:
        self._fleet = fleet
        self._connect = connect
        self._open: dict[int, tuple[Member, AsyncExitStack]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._models: set[str] = set()
        self._max_model_len = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for member, _ in list(self._open.values()):
            self._close(member)
        if self._closing:
            await asyncio.wait(self._closing)

    async def start(self, addresses: tuple[EngineAddress, ...]) -> None:
        """Make these the first members; they may still be loading, so ask :meth:`until_ready` next."""
        for address in addresses:
            async with AsyncExitStack() as stack:
                engine = await stack.enter_async_context(self._connect(address.name, address.url))
                self._enter(address, engine, stack.pop_all())

    async def until_ready(self, seconds: float = READY_SECONDS) -> int:
        """Wait for every member's first status; returns the context length in tokens that all of them have.

        Raises :class:`~tercet.protocol.EngineUnreachable` for one that does not answer within ``seconds``.
        """
        members = list(self._fleet.members)
        return self._promise(await asyncio.gather(*(_first_status(member.engine, seconds) for member in members)))

    async def until_some_ready(self, seconds: float = READY_SECONDS) -> int:
        """As :meth:`until_ready` for a fleet that was served before: members that do not answer now are asked later.

        Raises :class:`~tercet.protocol.EngineUnreachable` if none answers within ``seconds``.
        """
        members = list(self._fleet.members)
        asked = [asyncio.ensure_future(_first_status(member.engine, seconds)) for member in members]
        try:
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(asked, timeout=ASK_AGAIN_SECONDS)
        finally:
            for task in asked:
                task.cancel()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        statuses = [answer for answer in answers if isinstance(answer, EngineStatus)]
        if not statuses:
            raise EngineUnreachable(f"no engine of this fleet answered within {seconds:.0f} s")
        for member, answer in zip(members, answers, strict=True):
            member.reachable = isinstance(answer, EngineStatus)
        return self._promise(statuses)

    def _promise(self, statuses: Sequence[EngineStatus]) -> int:
        self._models = {status.model for status in statuses}
        self._max_model_len = min(status.max_model_len for status in statuses)
        return self._max_model_len

    async def add(self, address: EngineAddress) -> Member:
        """A new member, once it has answered and turned out to fit.

        Raises :class:`~tercet.protocol.Conflict` if its name or URL is taken,
        :class:`~tercet.protocol.EngineUnreachable` if it does not answer, and :class:`~tercet.protocol.BadRequest` if
        it serves another model or a shorter context than the front door has promised its clients.
        """
        self._require_new(address)
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(self._connect(address.name, address.url))
            self._require_fitting(address, await _status_of(address, engine))
            self._require_new(address)  # others may have come while it was asked
            return self._enter(address, engine, stack.pop_all())

    def remove(self, name: str) -> Member:
        """Forget an engine at once; its connection is closed when the last sequence on it has ended.

        Raises :class:`~tercet.protocol.UnknownEngine`.
        """
        member = self._fleet.remove(name)
        if member.in_flight:
            member.when_idle = lambda: self._close(member)
        else:
            self._close(member)
        logger.warning("engines: %s removed, %d sequences on it go on", name, member.in_flight)
        return member

    def drain(self, name: str, draining: bool = True) -> Member:
        """No new picks of an engine, or picks again. Raises :class:`~tercet.protocol.UnknownEngine`."""
        member = self._fleet.drain(name, draining)
        logger.warning("engines: %s is %s", name, "drained" if draining else "picked again")
        return member

    def set_role(self, name: str, role: Role) -> Member:
        """Give an engine another role. Raises :class:`~tercet.protocol.UnknownEngine`."""
        member = self._fleet.set_role(name, role)
        logger.warning("engines: %s has the role %s", name, role)
        return member

    async def watch(self) -> None:
        """Ask engines that did not answer whether they do again, until cancelled."""
        while True:
            await asyncio.sleep(ASK_AGAIN_SECONDS)
            for member in list(self._fleet.members):
                if not member.reachable:
                    with suppress(TercetError):
                        await member.engine.status()
                        member.reachable = True

    def _enter(self, address: EngineAddress, engine: Engine, stack: AsyncExitStack) -> Member:
        member = Member(address.name, address.url, address.role, engine, labels=address.labels)
        self._fleet.add(member)
        self._open[id(member)] = member, stack
        return member

    def _require_new(self, address: EngineAddress) -> None:
        for member in self._fleet.members:
            if member.name == address.name:
                raise Conflict(f"name: an engine called {address.name!r} is in this fleet already", "name")
            if member.url.rstrip("/") == address.url.rstrip("/"):
                raise Conflict(f"url: {address.url} is in this fleet already, as {member.name}", "url")

    def _require_fitting(self, address: EngineAddress, status: EngineStatus) -> None:
        if status.model not in self._models:
            ours = ", ".join(sorted(self._models))
            raise BadRequest(f"url: {address.url} serves the model {status.model}, and this fleet serves {ours}", "url")
        if status.max_model_len < self._max_model_len:
            raise BadRequest(
                f"url: {address.url} has max_model_len {status.max_model_len}, and this front door has promised its "
                f"clients {self._max_model_len}",
                "url",
            )

    def _close(self, member: Member) -> None:
        found = self._open.pop(id(member), None)
        if found is None:
            return  # at the front door's end all are closed, those with sequences on them too
        task = asyncio.ensure_future(found[1].aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _status_of(address: EngineAddress, engine: Engine) -> EngineStatus:
    try:
        return await engine.status()
    except EngineUnreachable:
        raise
    except (TercetError, msgspec.MsgspecError) as error:
        raise BadRequest(f"url: {address.url} does not answer as a Tercet engine: {error}", "url") from error


async def _first_status(engine: Engine, seconds: float) -> EngineStatus:
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            return await engine.status()
        except EngineUnreachable:
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(ASK_AGAIN_SECONDS)
