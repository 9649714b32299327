"""The reports of the processes that follow one state: this process's own report, and all reports taken together."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tercet.fleet.policy_views import prefill_line
from tercet.protocol import EngineError, TercetError
from tercet.router.serve.recovery import POLL_INTERVAL_S
from tercet.router.serve.shutdown import Shutdown
from tercet.router.state.followers import EngineReport, FollowerReport, Followers
from tercet.settings import log_events

if TYPE_CHECKING:
    from tercet.router.state.shared_state import SharedState

logger = logging.getLogger("tercet.router")
FOLLOW_SECONDS = 30.0


class ProcessReports:
    """The reports of all processes that follow ``shared``, which ``followers`` reads and writes.

    ``serving`` and ``failure`` are part of this process's report; see :class:`~.followers.FollowerReport`.
    """

    def __init__(self, shared: SharedState, followers: Followers, shutdown: Shutdown) -> None:
        self.serving = False
        self.failure = ""
        self._shared = shared
        self._followers = followers
        self._shutdown = shutdown
        shutdown.elsewhere = lambda: sum(report.requests_left for report in followers.others())
        self._unreported = False

    # ---- all processes ---------------------------------------------------------------------------------------

    def engines(self) -> dict[str, EngineReport]:
        """Return each engine's state over all processes; an engine that one of them cannot reach is unreachable."""
        found = self._own_engines()
        for report in self._followers.others():
            for name, other in report.engines.items():
                if name in found:
                    own = found[name]
                    reachable = own.reachable and (other.reachable or not report.serving)
                    waiting, busy = own.waiting_s + other.waiting_s, own.busy_s + other.busy_s
                    found[name] = EngineReport(own.in_flight + other.in_flight, reachable, waiting, busy)
        return found

    def attainment(self) -> dict[str, tuple[int, int]]:
        """Return, by class, the requests that ended in all processes, and how many of them met its objectives."""
        found = self._shared.service.attainments.counts()
        for report in self._followers.others():
            for name, (ended, met) in report.attained.items():
                if name in found:
                    found[name] = found[name][0] + ended, found[name][1] + met
        return found

    def processes(self) -> int:
        """Return the number of processes that follow the state, this one included."""
        return 1 + len(self._followers.others())

    async def behind(self, version: int) -> Sequence[str]:
        """Wait until all processes have applied a version, for a limited time; return a text for each that has not."""
        deadline = asyncio.get_running_loop().time() + FOLLOW_SECONDS
        while True:
            reports = [self.own(), *await self._shared.filed(self._followers.others)]
            late = [report for report in reports if report.serving and report.version < version]
            if not late or asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(POLL_INTERVAL_S / 4)
        said = [f"process {each.pid} has not applied the change within {FOLLOW_SECONDS:.0f} s" for each in late]
        said += [f"process {each.pid}: {each.failure}" for each in reports if each.failure and each not in late]
        if said:
            log_events.STATE_BEHIND.tell(version=version, reason="; ".join(said))
        return said

    # ---- this process ----------------------------------------------------------------------------------------

    def refusal(self) -> TercetError | None:
        """Return the error with which requests are refused now; None if they are served."""
        try:
            self._shutdown.require_serving()
            self._shared.service.fleet.health.require_answers()
        except TercetError as error:
            return error
        return None

    def own(self) -> FollowerReport:
        """Return this process's report."""
        left = self._shutdown.requests if self._shutdown.has_begun else 0
        attained, version = self._shared.service.attainments.counts(), self._shared.found.version
        return FollowerReport(os.getpid(), self.serving, version, self.failure, self._own_engines(), left, attained)

    def _own_engines(self) -> dict[str, EngineReport]:
        service = self._shared.service
        # Only a role keeper or a planner uses the waiting prefills of engines.
        planned = self._shared.role_keeper is not None or service.seen is not None
        return {
            each.name: EngineReport(
                each.in_flight, each.reachable, *(prefill_line(service.fleet, each.name) if planned else ())
            )
            for each in service.fleet.members
        }

    async def tell(self) -> None:
        """Write this process's report; a failed write is logged once and retried later."""
        try:
            self.written(await self._shared.filed(self.write, self.own()))
        except EngineError as error:
            self.written(error)

    def write(self, report: FollowerReport) -> OSError | None:
        """Write a report; return the error if that failed. Call it in the file thread."""
        try:
            self._followers.tell(report)
        except OSError as error:
            return error
        return None

    def written(self, error: Exception | None) -> None:
        """Log the first of several failed writes of this process's report; None is a successful write."""
        if error is not None and not self._unreported:
            logger.error("state: cannot write this process's report for the other processes: %s", error)
        self._unreported = error is not None
