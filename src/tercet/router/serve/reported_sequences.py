"""The sequences of a fleet with several routers: a rescheduler sees all sequences, and the routers move them.

Engines report their sequences and the router of each. A proposal goes to the engine that runs the sequence, which
passes it on to the router that owns it. A proposed move has ended when the source no longer reports the sequence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from tercet.decisions.migration import CountedMove, MovesUnderWay, SequenceView, Wanted
from tercet.fleet import EngineFleet
from tercet.fleet.policy_views import counted_move
from tercet.protocol import NoSpace, SequenceReport, TercetError
from tercet.router.serve.rescheduler import Views
from tercet.settings import MoveSettings

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
                if may_move(each.seq_id) and self._has_settled(name, each)
            ]
            for name, found in reports.items()
            if name in members
        }
        self._tokens = {each.seq_id: each.tokens for found in views.values() for each in found}
        return views

    def _has_settled(self, engine: str, report: SequenceReport) -> bool:
        return bool(report.router) and report.age >= SETTLED_SECONDS and (engine, report.seq_id) not in self._leaving

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
