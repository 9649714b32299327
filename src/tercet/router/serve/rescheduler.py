"""The rescheduler, which polls the fleet at intervals and begins the moves that policies propose, within limits.

Sequences come from one of two sources: :class:`OwnSequences` are those of this router process, which moves them;
:class:`ReportedSequences` are those that engines report, for a fleet with several routers. There a proposal goes to the
engine that runs the sequence, which passes it on to the router that owns it, and a proposed move has ended when the
source no longer reports the sequence. :func:`serve_rescheduler` is ``tercet rescheduler``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

import msgspec

from tercet.aio import TaskSet, repeat
from tercet.aio.descriptors import descriptors_watched
from tercet.decisions.migration import (
    CountedMove,
    MovesUnderWay,
    Policy,
    Rescheduling,
    SequenceView,
    Wanted,
    drain,
    failover,
    policies_of,
)
from tercet.fleet import EngineFleet, RunningSequence, RunningSequences
from tercet.fleet.discovery import discovery_of, follow_found, until_known
from tercet.fleet.member_state import MemberState
from tercet.fleet.membership import Membership
from tercet.fleet.policy_views import counted_move, is_stale, loaded_engines
from tercet.logs import log_to_stderr
from tercet.protocol import EngineUnreachable, NoSpace, Role, SequenceReport, TercetError
from tercet.protocol.wire import UNREADABLE
from tercet.router.serve.moves import Moves
from tercet.settings import EngineAddress, MoveSettings, ReschedulerConfig, RescheduleSettings
from tercet.settings.process_settings import KeyFile
from tercet.wire.client import Admit, HttpEngine, engine_tls
from tercet.wire.client.ask_router import ask_router
from tercet.wire.streams import StreamListener

Views = Mapping[str, Sequence[SequenceView]]
"""The sequences that may be moved, by engine."""


class SequenceSource(Protocol):
    """The sequences that a rescheduler may move, and the way to move them."""

    @property
    def policies(self) -> Sequence[Policy]:
        """Policies that always apply, with any settings."""
        ...

    @property
    def under_way(self) -> MovesUnderWay:
        """The moves that have begun and not ended."""
        ...

    async def views(self, may_move: Callable[[str], bool], now: float) -> Views:
        """Return the sequences that may be moved and whose id ``may_move`` accepts; ``now`` is in seconds."""
        ...

    def refusal(self, wanted: Wanted) -> str | None:
        """Return the reason why a move may not begin now; None if it may."""
        ...

    def move(self, wanted: Wanted) -> Coroutine[Any, Any, object]:
        """Make a move, which counts for the limits from its first step on."""
        ...

    def held_back(self, moves: int) -> None:
        """Take the number of proposed moves that limits do not allow yet."""
        ...


class Rescheduler:
    """The mover of sequences of ``source``, by decisions of :class:`~tercet.decisions.migration.Rescheduling`.

    The constructor raises :class:`~tercet.protocol.BadRequest` if the settings name an unknown policy.
    """

    def __init__(self, fleet: EngineFleet, source: SequenceSource, settings: RescheduleSettings) -> None:
        self._fleet = fleet
        self._source = source
        self._settings = settings
        self._rescheduling = Rescheduling((*source.policies, *policies_of(settings)))
        self._tasks = TaskSet()

    async def run(self) -> None:
        """Make a round (:meth:`look`) at each interval, until cancelled."""
        try:
            await repeat(self.look, self._settings.interval_s, "rescheduler")
        finally:
            await self._tasks.close()

    async def look(self) -> None:
        """Begin the moves that may begin now; a move that exceeds a limit is proposed again in the next round."""
        now, held_back = self._fleet.costs.clock(), 0
        self._rescheduling.begins(now)
        views: Views = {}
        if self._has_work:
            views = await self._source.views(lambda seq_id: not self._rescheduling.leaves_alone(seq_id), now)
        movable = {each.seq_id for found in views.values() for each in found}
        members = {member.name for member in self._fleet.members}
        for wanted in self._wanted(views) if movable else ():
            if wanted.seq_id not in movable or wanted.destination not in members - {wanted.source}:
                continue
            if self._source.refusal(wanted) is not None:
                held_back += 1
                continue
            self._rescheduling.moved(wanted.seq_id, now)
            self._tasks.spawn(self._source.move(wanted), f"move of {wanted.seq_id}")
            await asyncio.sleep(0)  # so that the move begins and counts for the limits
        self._source.held_back(held_back)

    @property
    def _has_work(self) -> bool:
        """True if policies may propose moves; policies that always apply only empty engines."""
        stale_after_s = self._settings.stale_after_s
        return bool(self._settings.policies) or any(
            member.leaving or is_stale(self._fleet, member, stale_after_s) for member in self._fleet.members
        )

    def _wanted(self, views: Views) -> Iterable[Wanted]:
        under_way: list[CountedMove] = self._source.under_way.everywhere()
        return self._rescheduling.wanted(loaded_engines(self._fleet, views, under_way, self._settings.stale_after_s))


class OwnSequences:
    """The sequences of this process, which ``moves`` executes.

    Engines that are leaving, or have made no progress for ``stale_after_s``, are emptied with any settings.
    """

    policies = (drain, failover)

    def __init__(self, fleet: EngineFleet, sequences: RunningSequences, moves: Moves) -> None:
        self._fleet = fleet
        self._sequences = sequences
        self._moves = moves
        self._movable: dict[str, RunningSequence] = {}

    @property
    def under_way(self) -> MovesUnderWay:
        """The moves of this process that have begun and not ended."""
        return self._moves.under_way

    async def views(self, may_move: Callable[[str], bool], now: float) -> Views:
        """Return the sequences that engines generate and that are not being moved; see :class:`SequenceSource`."""
        members = {member.name: member for member in self._fleet.members}
        on: dict[str, list[SequenceView]] = {name: [] for name in members}
        self._movable = {}
        for sequence in self._sequences:
            seq_id, member = sequence.request.seq_id, members.get(sequence.engine)
            if not sequence.is_generated or member is None or self._moves.is_moving(sequence) or not may_move(seq_id):
                continue
            self._movable[seq_id] = sequence
            tokens = sequence.known_tokens
            view = SequenceView(seq_id, tokens, member.share(tokens), sequence.answered, now - sequence.began)
            on[member.name].append(view)
        return on

    def refusal(self, wanted: Wanted) -> str | None:
        """Return the limit that a move would exceed now, or None; see :class:`SequenceSource`."""
        return self._moves.refusal(self._movable[wanted.seq_id], wanted.destination)

    def move(self, wanted: Wanted) -> Coroutine[Any, Any, object]:
        """Move a sequence of this process; see :class:`SequenceSource`."""
        return self._moves.follow(self._movable[wanted.seq_id], wanted.destination, wanted.reason)

    def held_back(self, moves: int) -> None:
        """Set the metric of moves that limits do not allow yet."""
        self._moves.metrics.held_back(moves)


logger = logging.getLogger("tercet.rescheduler")
# Younger sequences of an engine are left alone: they may have been moved there a moment ago.
SETTLED_SECONDS = 2.0


class ReportingEngine(Protocol):
    """The calls of an engine that are used here."""

    async def sequences(self) -> list[SequenceReport]:
        """Return the sequences that the engine generates."""
        ...

    async def propose_move(self, seq_id: str, destination: str, reason: str) -> None:
        """Propose a move to the router that owns the sequence."""
        ...


Place = tuple[str, str]
"""An engine's name, and a sequence that it runs."""


class ReportedSequences:
    """The sequences that ``engines`` (by name) report; a move is a proposal to the router that runs the sequence.

    It implements :class:`~tercet.router.serve.rescheduler.SequenceSource`. Routers empty drained engines themselves. An
    engine that does not answer within ``stale_after_s`` seconds is left out.
    """

    policies = ()

    def __init__(
        self, fleet: EngineFleet, engines: Mapping[str, ReportingEngine], moves: MoveSettings, stale_after_s: float
    ) -> None:
        self._fleet = fleet
        self._engines = engines
        self._deadline = moves.deadline_s
        self._stale_after_s = stale_after_s
        self.under_way = MovesUnderWay(moves)
        self._tokens: dict[str, int] = {}
        self._leaving: dict[Place, asyncio.Future[None]] = {}

    async def views(self, may_move: Callable[[str], bool], now: float) -> Views:
        """Ask engines for their sequences; ``now`` is not used, since engines report the age of sequences."""
        reports = await self._reports()
        self._note_left(reports)
        members = {member.name: member for member in self._fleet.members}
        views = {
            name: [
                SequenceView(each.seq_id, each.tokens, members[name].share(each.tokens), each.running, each.age)
                for each in found
                if may_move(each.seq_id) and each.router and each.age >= SETTLED_SECONDS
                if (name, each.seq_id) not in self._leaving
            ]
            for name, found in reports.items()
            if name in members
        }
        self._tokens = {each.seq_id: each.tokens for found in views.values() for each in found}
        return views

    def refusal(self, wanted: Wanted) -> str | None:
        """Return why a move may not begin now, or None; see :class:`~.rescheduler.SequenceSource`."""
        if wanted.source not in self._engines:
            return f"{wanted.source} has left the fleet"
        return self.under_way.refusal(self._counted(wanted))

    def move(self, wanted: Wanted) -> Coroutine[Any, Any, object]:
        """Propose a move to its router; see :class:`~.rescheduler.SequenceSource`."""
        return self._propose(wanted, self._counted(wanted))

    def held_back(self, moves: int) -> None:
        """Log proposed moves that limits do not allow yet."""
        if moves:
            logger.debug("limits hold back %d proposed moves", moves)

    def _counted(self, wanted: Wanted) -> CountedMove:
        return counted_move(self._fleet, wanted.source, wanted.destination, self._tokens[wanted.seq_id])

    async def _propose(self, wanted: Wanted, proposal: CountedMove) -> None:
        """Propose a move, and count it for the limits until the sequence has left or the deadline has passed."""
        place = wanted.source, wanted.seq_id
        left = self._leaving[place] = asyncio.get_running_loop().create_future()
        said = f"{wanted.seq_id} from {wanted.source} to {wanted.destination} ({wanted.reason})"
        try:
            with self.under_way.counted(proposal):
                async with asyncio.timeout(self._deadline):
                    await self._engines[wanted.source].propose_move(wanted.seq_id, wanted.destination, wanted.reason)
                    await left
            logger.info("%s: the sequence has left its engine", said)
        except TimeoutError:
            logger.warning("%s: the sequence has not left its engine after %g s", said, self._deadline)
        except NoSpace as error:  # another move was faster
            logger.debug("%s: %s", said, error.message)
        except TercetError as error:
            logger.info("%s: not proposed: %s", said, error.message)
        finally:
            del self._leaving[place]

    async def _reports(self) -> dict[str, list[SequenceReport]]:
        """Return the sequences by engine, of engines that answer within ``stale_after_s``; polls run in parallel."""
        names = [member.name for member in self._fleet.members if member.reachable and member.name in self._engines]
        asked = {name: asyncio.ensure_future(self._engines[name].sequences()) for name in names}
        if not asked:
            return {}
        try:
            done, _ = await asyncio.wait(asked.values(), timeout=self._stale_after_s)
        finally:
            for task in asked.values():
                task.cancel()
        failures = {name: task.exception() for name, task in asked.items() if task in done}
        for name, failure in failures.items():
            if failure is not None:
                logger.debug("%s does not report its sequences: %s", name, failure)
        return {name: asked[name].result() for name, failure in failures.items() if failure is None}

    def _note_left(self, reports: Mapping[str, list[SequenceReport]]) -> None:
        for (engine, seq_id), left in self._leaving.items():
            if engine in reports and not left.done() and all(each.seq_id != seq_id for each in reports[engine]):
                left.set_result(None)


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
