"""The interface of discoveries, and the members of a fleet, computed from the engines that discovery finds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec

from tercet.fleet.member_state import MemberState, member_changes
from tercet.fleet.membership import Membership
from tercet.protocol import EngineUnreachable, Role
from tercet.settings import EngineAddress

KNOWN_SECONDS = 60.0


class FoundEngine(msgspec.Struct, frozen=True):
    """An engine that was found. ``uid`` is that of its pod or of its start: a later engine may have the same name.

    ``serves`` is true if it is ready and not about to end. ``withheld`` is the reason why it gets no new requests, or
    empty.
    """

    address: EngineAddress
    uid: str
    serves: bool
    withheld: str = ""


class Discovery(Protocol):
    """A source of engines, for one reader at a time."""

    @property
    def source(self) -> str:
        """Description of the source of engines, for messages."""
        ...

    def changes(self) -> AsyncGenerator[Sequence[FoundEngine]]:
        """Yield the engines once they are known, and again at each change. The caller closes the generator."""
        ...


def with_found(
    members: Sequence[MemberState], found: Sequence[FoundEngine], reported: Mapping[str, Role] | None = None
) -> tuple[MemberState, ...]:
    """Return the members for the engines ``found``; members that were named in settings or joined themselves stay.

    An engine joins when it is ready. When it is no longer ready, or is about to end, it stays a member until discovery
    does not find it any more: it gets no new requests, and its sequences can be followed and moved. ``reported`` are
    the roles with which the engines were found before: a role that was changed since is kept until discovery reports
    another role.
    """
    named = [each for each in members if not each.uid or each.joined]
    names = {each.address.name for each in named}
    urls = {each.address.url.rstrip("/") for each in named}
    known = {each.address.name: each for each in members if each.uid and not each.joined}
    joined: dict[str, MemberState] = {}
    for engine in sorted(found, key=lambda each: (not each.serves, each.address.name)):
        address = engine.address
        if address.name in names or address.url in urls:
            continue
        before = known.get(address.name)
        if before is not None and before.uid != engine.uid:
            before = None
        if before is None and not engine.serves:
            continue
        joined[address.name] = _member(engine, before, reported or {})
        urls.add(address.url)
    # Existing members keep their places, so that an unchanged list compares equal.
    order = [*(name for name in known if name in joined), *sorted(joined.keys() - known.keys())]
    return (*named, *(joined[name] for name in order))


def _member(engine: FoundEngine, before: MemberState | None, reported: Mapping[str, Role]) -> MemberState:
    if before is None:
        return MemberState(engine.address, uid=engine.uid, withheld=engine.withheld)
    address = engine.address
    if reported.get(address.name) == address.role:
        address = msgspec.structs.replace(address, role=before.address.role)
    return msgspec.structs.replace(before, address=address, withheld=engine.withheld)


def roles_of(found: Sequence[FoundEngine]) -> dict[str, Role]:
    """Return the role that discovery reports for each engine, by name."""
    return {each.address.name: each.address.role for each in found}


async def follow_found(
    discovery: Discovery, membership: Membership, named: Sequence[EngineAddress], known: asyncio.Event
) -> None:
    """Keep a fleet's members equal to those ``named`` and those found, until cancelled; changes are logged.

    ``known`` is set once discovery has answered for the first time.
    """
    members: tuple[MemberState, ...] = tuple(MemberState(address) for address in named)
    reported: dict[str, Role] = {}
    async with aclosing(discovery.changes()) as changes:
        async for found in changes:
            after = with_found(members, found, reported)
            reported = roles_of(found)
            await membership.become(after)
            for event, fields, reason in member_changes(members, after):
                event.tell(**fields, reason=reason or f"reported by {discovery.source}")
            members = after
            known.set()


async def until_known(known: asyncio.Event, source: str, seconds: float = KNOWN_SECONDS) -> None:
    """Wait until a source's engines are known; raise :class:`~tercet.protocol.EngineUnreachable` after ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            await known.wait()
    except TimeoutError:
        raise EngineUnreachable(f"{source} are not known after {seconds:g} s") from None
