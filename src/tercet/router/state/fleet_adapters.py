"""LoRA adapters of a whole fleet, loaded on all engines that take adapters or on none, and on engines that join."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from tercet import logs
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

LOAD_SECONDS = 120.0
"""Timeout for loading an adapter on one engine."""
POLL_INTERVAL_S = 1.0
RETRY_DELAY_S = 30.0
"""Seconds before an engine that could not load an adapter is asked again."""


async def load_everywhere(fleet: EngineFleet, membership: Membership, name: str, path: str) -> AdapterReport:
    """Load an adapter on every engine that answers and takes adapters; return its report, which is the same on all.

    Raises the first engine's refusal, :class:`~tercet.protocol.Conflict` if engines find different contents at
    ``path``, and :class:`~tercet.protocol.EngineUnreachable` if there is no such engine. After a failure the adapter is
    unloaded from the engines that did not have it before.
    """
    had = {member.name for member in fleet.members if name in member.adapters}

    async def undo(member: Member) -> None:
        if member.name not in had:  # requests may use it on an engine that had it before
            await _unload(member, name)

    return await _everywhere(fleet, membership, path, partial(_load, name=name, path=path), undo)


async def replace_everywhere(
    fleet: EngineFleet, membership: Membership, before: AdapterReport, path: str
) -> AdapterReport:  # fmt: skip
    """Replace the adapter ``before`` on every engine that takes adapters by the files at ``path``; return its report.

    Raises the errors of :func:`load_everywhere`, and :class:`~tercet.protocol.Conflict` while requests use ``before``
    on any engine. After a failure, engines that replaced it load ``before`` again; an engine that cannot, because the
    files are gone, is left without the adapter.
    """

    async def undo(member: Member) -> None:
        with suppress(TercetError):
            if (await _load(member, before.name, before.path, replaces=True)).digest == before.digest:
                return
        await _unload(member, before.name)

    change = partial(_load, name=before.name, path=path, replaces=True)
    return await _everywhere(fleet, membership, path, change, undo)


async def _everywhere(
    fleet: EngineFleet, membership: Membership, path: str, change: Callable[[Member], Awaitable[AdapterReport]],
    undo: Callable[[Member], Awaitable[None]],
) -> AdapterReport:  # fmt: skip
    """Make a change on all engines that take adapters, or on none; return the report, which is the same on all."""
    takers = [member for member in fleet.members if _takes(member)]
    if not takers:
        raise EngineUnreachable("adapter: no engine that answers takes adapters; start engines with --enable-lora")
    found = await asyncio.gather(*map(change, takers), return_exceptions=True)
    changed = [(member, each) for member, each in zip(takers, found, strict=True) if isinstance(each, AdapterReport)]
    try:
        failed = next((each for each in found if isinstance(each, BaseException)), None)
        if failed is None and len({each.digest for _, each in changed}) > 1:
            said = ", ".join(f"{member.name} {each.digest}" for member, each in changed)
            failed = Conflict(f"path: the files at {path} are not the same on all engines: {said}", "path")
        if failed is not None:
            await asyncio.gather(*(undo(member) for member, _ in changed), return_exceptions=True)
            raise failed
        return changed[0][1]
    finally:
        await membership.ask(takers)


async def unload_everywhere(fleet: EngineFleet, membership: Membership, name: str) -> Sequence[str]:
    """Unload an adapter from every engine that may have it; return a text for each engine that failed to.

    An engine whose files have changed does not report the adapter, but still has it.
    """
    having = [member for member in fleet.members if name in member.adapters or _takes(member)]
    done = await asyncio.gather(*(_unload(member, name) for member in having), return_exceptions=True)
    await membership.ask(having)
    pairs = zip(having, done, strict=True)
    return [f"{member.name}: {error}" for member, error in pairs if isinstance(error, BaseException)]


class AdapterLoader:
    """A background task that loads declared adapters on engines that join or come back without them.

    An engine that cannot load an adapter is not picked for it. The reason is logged once, and the engine is asked again
    every 30 s.
    """

    def __init__(self, fleet: EngineFleet, membership: Membership) -> None:
        self._fleet = fleet
        self._membership = membership
        self._refused: dict[tuple[int, str], tuple[str, float]] = {}

    async def run(self) -> None:
        """Check all engines every second, until cancelled."""
        while True:
            await asyncio.gather(*(self._complete(member) for member in self._fleet.members))
            here = {id(member) for member in self._fleet.members}
            self._refused = {key: refused for key, refused in self._refused.items() if key[0] in here}
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _complete(self, member: Member) -> None:
        for declared in self._fleet.adapters.declared:
            # By identity and not by name: an engine that was removed and added again is asked at once.
            key = id(member), declared.name
            refused = self._refused.get(key)
            is_due = refused is None or time.monotonic() - refused[1] > RETRY_DELAY_S
            if not member.reachable or declared.name in member.adapters or not is_due:
                continue
            try:
                await _load(member, declared.name, declared.path)
                self._refused.pop(key, None)
                await self._membership.ask([member])
            except Exception as error:  # for example of a connection that was closed in the meantime
                reason = error.message if isinstance(error, TercetError) else f"{type(error).__name__}: {error}"
                if refused is None or refused[0] != reason:
                    logs.ADAPTER_MISSING.tell(engine=member.name, adapter=declared.name, reason=reason)
                self._refused[key] = reason, time.monotonic()


def _takes(member: Member) -> bool:
    return member.reachable and member.max_adapters > 0


async def _load(member: Member, name: str, path: str, replaces: bool = False) -> AdapterReport:
    engine = _of(member)
    try:
        async with asyncio.timeout(LOAD_SECONDS):
            return await (engine.replace_adapter if replaces else engine.load_adapter)(name, path)
    except TimeoutError:
        raise EngineUnreachable(f"{member.name} has not loaded {name!r} within {LOAD_SECONDS:.0f} s") from None


async def _unload(member: Member, name: str) -> None:
    try:
        async with asyncio.timeout(LOAD_SECONDS):
            await _of(member).unload_adapter(name)
    except UnknownAdapter:  # the engine no longer has it
        return
    except TimeoutError:
        raise EngineUnreachable(f"{member.name} does not answer") from None


def _of(member: Member) -> TakesAdapters:
    if not isinstance(member.engine, TakesAdapters):
        raise BadRequest(f"adapter: the engine {member.name} cannot load adapters", "adapter")
    return member.engine
