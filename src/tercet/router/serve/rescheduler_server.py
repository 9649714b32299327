"""Assembly of ``tercet rescheduler``: it follows the engines of a router, and proposes moves of their sequences."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec

from tercet.aio import TaskSet
from tercet.aio.descriptors import descriptors_watched
from tercet.fleet import EngineFleet
from tercet.fleet.discovery import discovery_of, follow_found, until_known
from tercet.fleet.member_state import MemberState
from tercet.fleet.membership import Membership
from tercet.protocol import EngineUnreachable, Role, TercetError
from tercet.protocol.wire import UNREADABLE
from tercet.router.serve.reported_sequences import ReportedSequences
from tercet.router.serve.rescheduler import Rescheduler
from tercet.settings import EngineAddress, ReschedulerConfig
from tercet.settings.key_files import KeyFile
from tercet.settings.log_lines import log_to_stderr
from tercet.wire.client import Admit, HttpEngine, engine_tls
from tercet.wire.client.ask_router import ask_router
from tercet.wire.streams import StreamListener

logger = logging.getLogger("tercet.rescheduler")
FOLLOW_SECONDS = 1.0


class ListedEngine(msgspec.Struct, frozen=True):
    """The fields of an engine in a router's list that are used here."""

    name: str
    url: str
    role: Role
    draining: bool = False

    def state(self) -> MemberState:
        """Return the engine as a member of the fleet."""
        return MemberState(EngineAddress(self.name, self.url, self.role), self.draining)


def serve_rescheduler(config: ReschedulerConfig) -> None:
    """Run the rescheduler until SIGINT or SIGTERM; raise :class:`~tercet.protocol.TercetError` if no router answers."""
    log_to_stderr(config.log_level, config.log_format)
    asyncio.run(_serve(config))


async def _serve(config: ReschedulerConfig) -> None:
    fleet = EngineFleet((), stuck_after_s=config.stuck_after_s)
    tls = engine_tls(config.engine_tls.ca, config.engine_tls.cert, config.engine_tls.key)
    engines: dict[str, HttpEngine] = {}

    @asynccontextmanager
    async def connect(name: str, url: str, admit: Admit) -> AsyncGenerator[HttpEngine]:
        report = partial(fleet.report, name)
        async with HttpEngine(name, url, listener, report, admit, secret=config.secret, tls=tls) as engine:
            engines[name] = engine
            try:
                yield engine
            finally:
                if engines.get(name) is engine:
                    del engines[name]

    source = ReportedSequences(fleet, engines, config.moves, config.reschedule.stale_after_s)
    rescheduler = Rescheduler(fleet, source, config.reschedule)
    background = TaskSet()
    async with (
        descriptors_watched(),
        StreamListener(config.stream_port) as listener,
        Membership(fleet, connect) as membership,
    ):
        try:
            whose = await _begin_to_follow(config, membership, background)
            policies = ", ".join(config.reschedule.policies)
            logger.info("rescheduling %d engines of %s by the policies %s", len(fleet.members), whose, policies)
            background.keep(membership.watch, "membership")
            await rescheduler.run()
        finally:
            await background.close()


async def _begin_to_follow(config: ReschedulerConfig, membership: Membership, background: TaskSet) -> str:
    """Start to follow the engines of the router, or those that discovery finds; return their source once known."""
    if not config.discovery.is_wanted:
        await _follow_once(config, membership)
        background.keep(partial(_follow, config, membership), "engines")
        return config.url
    discovery, known = discovery_of(config.discovery), asyncio.Event()
    background.keep(partial(follow_found, discovery, membership, (), known), "pods")
    await until_known(known, discovery.source)
    return discovery.source


async def _follow(config: ReschedulerConfig, membership: Membership) -> None:
    """Keep members, roles and drains equal to those of the router, until cancelled."""
    answers = True
    while True:
        await asyncio.sleep(FOLLOW_SECONDS)
        try:
            await _follow_once(config, membership)
            if not answers:
                logger.warning("%s answers again", config.url)
            answers = True
        except TercetError as error:
            if answers:
                logger.error("cannot list the router's engines; members stay unchanged: %s", error.message)
            answers = False


async def _listed(config: ReschedulerConfig) -> Sequence[ListedEngine]:
    key = config.admin_key
    if not key and config.admin_key_file is not None:
        key = KeyFile(config.admin_key_file, "admin-key-file").first()[0]
    answer: Any = await ask_router(config.url, "GET", "/engines", admin_key=key)
    try:
        return msgspec.convert(answer, list[ListedEngine])
    except UNREADABLE as error:
        raise EngineUnreachable(f"{config.url} is not a router: GET /engines: {error}", "url") from error


async def _follow_once(config: ReschedulerConfig, membership: Membership) -> None:
    """Update the members once; raise :class:`~tercet.protocol.TercetError`, which leaves them unchanged."""
    listed = [each.state() for each in await _listed(config)]
    await membership.look(members=await membership.become(listed))
