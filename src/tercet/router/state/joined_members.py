"""Members that are not named in the settings: engines that join by themselves, or that discovery finds.

They become members of the shared state, and those that vanish without leaving are removed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

from tercet.fleet.discovery import Discovery, roles_of
from tercet.fleet.members import JOINED
from tercet.protocol import MemberRole, TercetError, UnknownEngine
from tercet.protocol.wire import JoinCall, Joined
from tercet.router.state.shared_state import SharedState
from tercet.settings import EngineAddress

logger = logging.getLogger("tercet.router")
POLL_INTERVAL_S = 1.0
GONE_AFTER_S = 60.0
LEAVING = "it is leaving"


async def join(state: SharedState, name: str, call: JoinCall) -> Joined:
    """Make an engine a member after it has answered; later calls keep it a member.

    Raises :class:`~tercet.protocol.TercetError` for an engine that does not fit this fleet.
    """
    address = EngineAddress(name, call.url.rstrip("/"), call.role)
    withheld = LEAVING if call.leaving else ""
    after = state.state.with_joined(address, call.uid, withheld)
    if after is not state.state:
        known = {each.address.name for each in state.state.members}
        if name not in known:
            await state.membership.check(address)
        # Applied again to the newest state, since another process may have changed it during the check.
        await state.change(
            lambda now: now.with_joined(address, call.uid, withheld), LEAVING if call.leaving else "it has joined"
        )
    return Joined(_in_flight(state, name))


async def leave(state: SharedState, name: str, uid: str) -> Joined:
    """Remove the start ``uid`` of an engine; its running sequences continue."""
    left = Joined(_in_flight(state, name))
    await state.change(lambda now: now.without_joined(name, uid), "it has left")
    return left


def _in_flight(state: SharedState, name: str) -> int:
    try:
        state.service.fleet.member(name)
    except UnknownEngine:
        return 0
    return state.reports.engines()[name].in_flight


class GoneEngines:
    """The time since which each engine does not answer, by a ``clock`` in seconds. No I/O."""

    def __init__(self, clock: Callable[[], float], after_s: float = GONE_AFTER_S) -> None:
        self._clock = clock
        self._after_s = after_s
        self._since: dict[tuple[str, str], float] = {}

    def look(self, away: set[tuple[str, str]]) -> set[tuple[str, str]]:
        """Return those of the engines ``away`` now (name and uid) that have been away for ``after_s`` seconds."""
        now = self._clock()
        self._since = {each: self._since.get(each, now) for each in away}
        return {each for each, since in self._since.items() if now - since >= self._after_s}


async def remove_gone(state: SharedState, gone: GoneEngines) -> None:
    """Remove engines that have joined and do not answer for :data:`GONE_AFTER_S` seconds, until cancelled."""
    while True:
        await asyncio.sleep(POLL_INTERVAL_S)
        reports = state.reports.engines()
        # Engines that an operator named stay members while they are away; only those that joined by themselves go.
        away = {
            (each.address.name, each.uid.removeprefix(JOINED))
            for each in state.state.members
            if each.joined and each.address.name in reports and not reports[each.address.name].reachable
        }
        for name, uid in gone.look(away):
            try:
                await state.change(
                    lambda now, name=name, uid=uid: now.without_joined(name, uid),
                    f"it has not answered for {GONE_AFTER_S:.0f} s, and joins again when it does",
                )
            except TercetError as error:  # the state file cannot be written, or is locked
                logger.error("%s stays a member: %s", name, error.message)


RETRY_DELAY_S = 1.0


async def follow_found(state: SharedState, discovery: Discovery) -> None:
    """Keep the state's members equal to the engines found and those that an operator named, until cancelled."""
    reported: dict[str, MemberRole] = {}
    logger.info("engines: following %s", discovery.source)
    async with aclosing(discovery.changes()) as changes:
        async for found in changes:
            while True:
                try:
                    await state.change(
                        lambda now, found=found, reported=reported: now.with_found(found, reported),
                        f"reported by {discovery.source}",
                    )
                    break
                except TercetError as error:  # the state file cannot be written, or is locked
                    logger.error("cannot store the engines found; members stay unchanged: %s", error.message)
                    await asyncio.sleep(RETRY_DELAY_S)
            # A role that discovery has not changed since stays as operators set it.
            reported = roles_of(found)
