"""The rescheduler of a fleet that several routers use: it sees all of their sequences, and they move them.

Engines tell what they run, and for whom; a proposal goes to the engine that runs the sequence, which passes it on to
the router that owns it. What was proposed and is seen no more at the source has left it, whatever became of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from tercet.aio import TaskSet, repeat
from tercet.decisions.migration import CountedMove, MovesUnderWay, Rescheduling, SequenceView, Wanted, policies_of
from tercet.fleet import EngineFleet
from tercet.fleet.loaded_fleet import counted_move, loaded_engines
from tercet.protocol import NoSpace, SequenceReport, TercetError
from tercet.settings import ReschedulerConfig

logger = logging.getLogger("tercet.rescheduler")
# What has come to its engine since may have been moved there just now.
SETTLED_SECONDS = 2.0


class ReportingEngine(Protocol):
    """What is asked of an engine here."""

    async def sequences(self) -> list[SequenceReport]:
        """What it generates."""
        ...

    async def propose_move(self, seq_id: str, destination: str, reason: str) -> None:
        """Have the owner of a sequence move it."""
        ...


Place = tuple[str, str]
"""An engine's name, and a sequence that it runs."""


class FleetRescheduler:
    """Proposes what policies want, within limits; ``engines`` are those of the fleet, by name.

    Raises :class:`~tercet.protocol.BadRequest` if the settings name an unknown policy.
    """

    def __init__(self, fleet: EngineFleet, engines: Mapping[str, ReportingEngine], config: ReschedulerConfig) -> None:
        self._fleet = fleet
        self._engines = engines
        self._settings = config.reschedule
        self._deadline = config.moves.deadline_s
        self.under_way = MovesUnderWay(config.moves)
        self._rescheduling = Rescheduling(policies_of(config.reschedule))
        self._leaving: dict[Place, asyncio.Future[None]] = {}
        self._tasks = TaskSet()

    async def run(self) -> None:
        """Look until cancelled."""
        try:
            await repeat(self.look, self._settings.interval_s)
        finally:
            await self._tasks.close()

    async def look(self) -> None:
        """Ask engines what they run, and propose what may be proposed now."""
        reports = await self._reports()
        self._note_left(reports)
        now = self._fleet.costs.clock()
        self._rescheduling.begins(now)
        members = {member.name: member for member in self._fleet.members}
        views = {
            name: [
                SequenceView(each.seq_id, each.tokens, members[name].share(each.tokens), each.running, each.age)
                for each in found
                if self._may_move(name, each)
            ]
            for name, found in reports.items()
            if name in members
        }
        tokens = {each.seq_id: each.tokens for found in views.values() for each in found}
        engines = loaded_engines(self._fleet, views, self.under_way.everywhere(), self._settings.stale_after_s)
        for wanted in self._rescheduling.wanted(engines):
            if wanted.seq_id in tokens and wanted.destination in members and wanted.source in self._engines:
                self._begin(wanted, tokens[wanted.seq_id], now)
                await asyncio.sleep(0)  # it counts for the limits

    def _may_move(self, engine: str, report: SequenceReport) -> bool:
        return (
            bool(report.router)
            and report.age >= SETTLED_SECONDS
            and (engine, report.seq_id) not in self._leaving
            and not self._rescheduling.leaves_alone(report.seq_id)
        )

    def _begin(self, wanted: Wanted, tokens: int, now: float) -> None:
        proposal = counted_move(self._fleet, wanted.source, wanted.destination, tokens)
        refusal = self.under_way.refusal(proposal)
        if refusal is not None:
            logger.debug("%s waits for its turn: %s", wanted.seq_id, refusal)
            return
        self._rescheduling.moved(wanted.seq_id, now)
        self._tasks.spawn(self._propose(wanted, proposal), f"proposal to move {wanted.seq_id}")

    async def _propose(self, wanted: Wanted, proposal: CountedMove) -> None:
        """Until the sequence has left, or the deadline is over, it counts for the limits."""
        place = wanted.source, wanted.seq_id
        left = self._leaving[place] = asyncio.get_running_loop().create_future()
        said = f"{wanted.seq_id} from {wanted.source} to {wanted.destination} ({wanted.reason})"
        try:
            with self.under_way.counted(proposal):
                async with asyncio.timeout(self._deadline):
                    await self._engines[wanted.source].propose_move(wanted.seq_id, wanted.destination, wanted.reason)
                    await left
            logger.info("%s: it has left", said)
        except TimeoutError:
            logger.warning("%s: it is still there after %g s", said, self._deadline)
        except NoSpace as error:  # another one was faster
            logger.debug("%s: %s", said, error.message)
        except TercetError as error:
            logger.info("%s: not proposed: %s", said, error.message)
        finally:
            del self._leaving[place]

    async def _reports(self) -> dict[str, list[SequenceReport]]:
        """What engines run; those that do not answer are left out. None waits for another one's answer for long."""
        names = [member.name for member in self._fleet.members if member.reachable and member.name in self._engines]
        asked = {name: asyncio.ensure_future(self._engines[name].sequences()) for name in names}
        if not asked:
            return {}
        try:
            done, _ = await asyncio.wait(asked.values(), timeout=self._settings.stale_after_s)
        finally:
            for task in asked.values():
                task.cancel()
        failures = {name: task.exception() for name, task in asked.items() if task in done}
        for name, failure in failures.items():
            if failure is not None:
                logger.debug("%s does not say what it runs: %s", name, failure)
        return {name: asked[name].result() for name, failure in failures.items() if failure is None}

    def _note_left(self, reports: Mapping[str, list[SequenceReport]]) -> None:
        for (engine, seq_id), left in self._leaving.items():
            if engine in reports and not left.done() and all(each.seq_id != seq_id for each in reports[engine]):
                left.set_result(None)
