"""LoRA adapters of a whole fleet: loaded on every engine that takes any, or on none, and on those that come later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

from tercet.fleet import EngineFleet, Member
from tercet.fleet.membership import Membership
from tercet.protocol import (
    AdapterReport,
    BadRequest,
    Conflict,
    EngineUnreachable,
    TakesAdapters,
    TercetError,
    UnknownAdapter,
)
from tercet.settings import log_events

LOAD_SECONDS = 120.0
"""Timeout for loading an adapter on one engine."""
POLL_INTERVAL_S = 1.0
RETRY_DELAY_S = 30.0
"""Pause before an engine that could not load an adapter is asked again."""


async def load_everywhere(fleet: EngineFleet, membership: Membership, name: str, path: str) -> AdapterReport:
    """Have every engine that answers and takes adapters load one; what it is, which is the same on all of them.

    Raises what the first one refuses it with, :class:`~tercet.protocol.Conflict` if they do not find the same contents
    at ``path``, and :class:`~tercet.protocol.EngineUnreachable` if there is no such engine; then it is unloaded again
    where it was not before.
    """
    takers = _takers(fleet)
    new = [member for member in takers if name not in member.adapters]
    found = await asyncio.gather(*(_load(member, name, path) for member in takers), return_exceptions=True)
    loaded = [member for member, each in zip(takers, found, strict=True) if not isinstance(each, BaseException)]
    try:
        failed = _failure(takers, found, path)
        if failed is not None:
            undone = [member for member in new if member in loaded]
            await asyncio.gather(*(_unload(member, name) for member in undone), return_exceptions=True)
            raise failed
        return cast(AdapterReport, found[0])
    finally:
        await membership.ask(takers)


async def replace_everywhere(
    fleet: EngineFleet, membership: Membership, before: AdapterReport, path: str
) -> AdapterReport:  # fmt: skip
    """Have every engine that answers and takes adapters mean by a name what is at ``path``; what it is.

    Raises as :func:`load_everywhere` does, and :class:`~tercet.protocol.Conflict` while requests use what the name
    stood for ``before``, on any engine. Then those that have replaced it go back to that; one that cannot, since its
    files are not there any more, is left without.
    """
    takers = _takers(fleet)
    found = await asyncio.gather(*(_replace(member, before.name, path) for member in takers), return_exceptions=True)
    replaced = [member for member, each in zip(takers, found, strict=True) if not isinstance(each, BaseException)]
    try:
        failed = _failure(takers, found, path)
        if failed is not None:
            await asyncio.gather(*(_return(member, before) for member in replaced), return_exceptions=True)
            raise failed
        return cast(AdapterReport, found[0])
    finally:
        await membership.ask(takers)


async def unload_everywhere(fleet: EngineFleet, membership: Membership, name: str) -> Sequence[str]:
    """Have every engine that may have an adapter take no more requests for it; returns what to say of those that do.

    One whose files have changed under it does not report it, and has it all the same.
    """
    having = [member for member in fleet.members if name in member.adapters or _takes(member)]
    done = await asyncio.gather(*(_unload(member, name) for member in having), return_exceptions=True)
    await membership.ask(having)
    pairs = zip(having, done, strict=True)
    return [f"{member.name}: {error}" for member, error in pairs if isinstance(error, BaseException)]


class AdapterLoader:
    """Has engines that come, or come back, load what the fleet has declared and they lack.

    One that cannot is not picked for the adapter, which is logged once, and asked again every half minute.
    """

    def __init__(self, fleet: EngineFleet, membership: Membership) -> None:
        self._fleet = fleet
        self._membership = membership
        self._refused: dict[tuple[int, str], tuple[str, float]] = {}

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.gather(*(self._complete(member) for member in self._fleet.members))
            self._forget_those_that_left()
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _complete(self, member: Member) -> None:
        for declared in self._fleet.adapters.declared:
            if not member.reachable or declared.name in member.adapters or not self._is_due(member, declared.name):
                continue
            key = id(member), declared.name
            try:
                await _load(member, declared.name, declared.path)
                self._refused.pop(key, None)
                await self._membership.ask([member])
            except TercetError as error:
                self._note_refusal(member, declared.name, error.message)
            except Exception as error:  # such as that of a connection closed meanwhile
                self._note_refusal(member, declared.name, f"{type(error).__name__}: {error}")

    def _note_refusal(self, member: Member, name: str, reason: str) -> None:
        key = id(member), name
        if self._refused.get(key, ("", 0.0))[0] != reason:
            said: dict[str, Any] = {"engine": member.name, "adapter": name, "reason": reason}
            log_events.ADAPTER_MISSING.tell(**said)
        self._refused[key] = reason, time.monotonic()

    def _forget_those_that_left(self) -> None:
        here = {id(member) for member in self._fleet.members}
        self._refused = {key: refused for key, refused in self._refused.items() if key[0] in here}

    def _is_due(self, member: Member, name: str) -> bool:
        refused = self._refused.get((id(member), name))
        return refused is None or time.monotonic() - refused[1] > RETRY_DELAY_S


def _takers(fleet: EngineFleet) -> list[Member]:
    takers = [member for member in fleet.members if _takes(member)]
    if not takers:
        raise EngineUnreachable("adapter: no engine that answers takes adapters; start engines with --enable-lora")
    return takers


def _failure(
    takers: Sequence[Member], found: Sequence[AdapterReport | BaseException], path: str
) -> BaseException | None:  # fmt: skip
    """Why engines do not all have the same adapter now; None if they have."""
    failed = next((each for each in found if isinstance(each, BaseException)), None)
    digests = [each.digest for each in found if isinstance(each, AdapterReport)]
    if failed is None and len({*digests}) > 1:
        said = ", ".join(f"{member.name} {digest}" for member, digest in zip(takers, digests, strict=True))
        failed = Conflict(f"path: the files at {path} are not the same on all engines: {said}", "path")
    return failed


def _takes(member: Member) -> bool:
    return member.reachable and member.max_adapters > 0


async def _load(member: Member, name: str, path: str) -> AdapterReport:
    async with _in_time(member, name):
        return await _of(member).load_adapter(name, path)


async def _replace(member: Member, name: str, path: str) -> AdapterReport:
    async with _in_time(member, name):
        return await _of(member).replace_adapter(name, path)


async def _return(member: Member, before: AdapterReport) -> None:
    """Have an engine that has replaced an adapter mean what it was again; or nothing, if that cannot be had."""
    with suppress(TercetError):
        if (await _replace(member, before.name, before.path)).digest == before.digest:
            return
    await _unload(member, before.name)


@asynccontextmanager
async def _in_time(member: Member, name: str) -> AsyncGenerator[None]:
    try:
        async with asyncio.timeout(LOAD_SECONDS):
            yield
    except TimeoutError:
        raise EngineUnreachable(f"{member.name} has not loaded {name!r} within {LOAD_SECONDS:.0f} s") from None


async def _unload(member: Member, name: str) -> None:
    try:
        async with asyncio.timeout(LOAD_SECONDS):
            await _of(member).unload_adapter(name)
    except UnknownAdapter:  # it has gone by itself
        return
    except TimeoutError:
        raise EngineUnreachable(f"{member.name} does not answer") from None


def _of(member: Member) -> TakesAdapters:
    if not isinstance(member.engine, TakesAdapters):
        raise BadRequest(f"adapter: {member.name} is not an engine that takes adapters", "adapter")
    return member.engine
