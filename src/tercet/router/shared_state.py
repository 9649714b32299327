"""The shared state of a fleet in one process: it applies changes of other processes, and makes changes for all.

A change is validated, written, applied here, and then waited for: every process that follows the same file applies it
or reports why not. A process that starts later reads one state, which contains all changes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tercet.aio import TaskSet, run_in_thread
from tercet.aio.file_thread import BOUND_SECONDS, FileThread
from tercet.decisions.scheduling import Scheduling, load_scheduling
from tercet.decisions.scheduling.registry import user_file
from tercet.fleet.membership import Membership, Promise
from tercet.fleet.observed_roles import prefill_line
from tercet.programs import Program
from tercet.protocol import AdapterReport, BadRequest, EngineError, EngineUnreachable, TercetError
from tercet.router.adapter_changes import AdapterChanges
from tercet.router.fleet_state import FleetState, ProgramInUse, StateFile
from tercet.router.followers import EngineReport, FollowerReport, Followers
from tercet.router.metrics import Metrics
from tercet.router.named_files import load_anywhere
from tercet.router.planner_reports import PlannerReports
from tercet.router.recovery import POLL_INTERVAL_S
from tercet.router.request_traces import RequestTraces
from tercet.router.routing import Plan
from tercet.router.service import LoadArm, Service
from tercet.router.shared_traces import SharedTraces
from tercet.router.shutdown import Shutdown
from tercet.router.state_changes import ASKED, because, changes_with_reasons
from tercet.router.state_store import LOCK_SECONDS, SharedTurn, StateStore
from tercet.settings import EngineAddress, log_events

if TYPE_CHECKING:
    from tercet.router.role_keeper import RoleKeeper

logger = logging.getLogger("tercet.router")
T = TypeVar("T")
FOLLOW_SECONDS = 30.0
# A process without others polls for those that start. Each poll wakes two threads: an idle router does little else.
ALONE_POLL_INTERVAL_S = 0.5
REPLACED = "the model was replaced by another one while this request ran; send the request again"


@dataclass
class Loaded:
    """The loaded code of a state: programs by the number of their plan, a scheduling file by its number."""

    programs: dict[int, Mapping[str, Program]] = field(default_factory=dict[int, Mapping[str, Program]])
    scheduling: dict[int, Scheduling] = field(default_factory=dict[int, Scheduling])


LoadScheduling = Callable[[str, str | None], Scheduling]


def scheduling_anywhere(path: str, content: str | None = None) -> Scheduling:
    """Return the scheduling of a file that the operator's files or flags name, or of ``content`` with that name."""
    return load_scheduling(user_file(path, "scheduling") if content is None else Path(path), content)


async def load_scheduling_file(
    path: str, content: str | None = None, load: LoadScheduling = scheduling_anywhere
) -> Scheduling:
    """Load a scheduling file; raise :class:`~tercet.protocol.TercetError` if it cannot be used."""
    return await run_in_thread(load, path, content)  # it runs the user's modules, which may take long


def _unchanged(state: FleetState) -> FleetState:
    return state


class SharedState:
    """The state at ``path``, applied to ``service`` and its fleet; ``state`` is the one in use. The caller closes it.

    With a ``store``, routers on several machines share the state there; ``path`` then only connects the processes of
    one machine. ``tells`` is true if this process logs changes: of several workers, only one does. ``traces`` are those
    of the requests that this process serves.
    """

    def __init__(
        self,
        path: Path,
        membership: Membership,
        service: Service[Metrics],
        shutdown: Shutdown | None = None,
        tells: bool = True,
        traces: RequestTraces | None = None,
        store: StateStore | None = None,
    ) -> None:
        self.service = service
        self.tells = tells
        self._file = StateFile(path, store)
        self._fleet = service.fleet
        self._membership = membership
        self._metrics = service.metrics
        self._files = FileThread()
        # A change may wait for other processes' changes, so a long wait does not mean that the file system hangs.
        self._changes = FileThread(LOCK_SECONDS + BOUND_SECONDS, LOCK_SECONDS + BOUND_SECONDS)
        self._followers = Followers(path, lambda: self._files.is_stuck)
        self.planner = PlannerReports(path, self._files)
        self.traces = SharedTraces(
            traces or RequestTraces(), self._followers.name, self._others, service.metrics.exemplars
        )
        self._shutdown = shutdown or Shutdown(timeout_s=0)
        self._shutdown.elsewhere = lambda: sum(report.requests_left for report in self._followers.others())
        service.moves.under_way.shared = self._followers
        self._turn = asyncio.Lock()
        self.adapters = AdapterChanges(self, self._fleet, membership)
        self._stamp: object = None
        self._serving = False
        self._silence = ""  # the error while the file system hangs; the state is read again once it answers
        self._failure = ""
        self.role_keeper: RoleKeeper | None = None  # set if roles follow the load
        self._applying = TaskSet()
        self._unreported = False
        self._found: FleetState  # the newest state that was read, also if it cannot be applied
        self.state: FleetState

    def turn(self, what: str) -> SharedTurn:
        """Return the lock for the task ``what``; one of the processes that share the state holds it."""
        return self._file.turn(what)

    def close(self) -> None:
        """Stop following the state."""
        self._applying.cancel()
        self._followers.close()
        self._files.close()
        self._changes.close()

    # ---- following -------------------------------------------------------------------------------------------

    async def start(self, first: FleetState) -> None:
        """Apply the stored state, or ``first``; raise :class:`~tercet.protocol.BadRequest` if it cannot be applied."""
        self.state = self._found = await self._filed(self._file.update, _unchanged, first, by=self._changes)
        named = tuple(each for each in self.state.members if not each.uid or each.joined)
        if (named, self.state.program.plan) != (first.members, first.program.plan):
            logger.warning("state: using the engines and programs of %s, not those of this command", self._file.name)
        self._stamp = await self._filed(self._file.stamp)
        await self._apply(self.state, Loaded(), from_scratch=True)

    async def until_ready(self, promised: Callable[[], Awaitable[Promise]] | None = None) -> Promise:
        """Return the promise to clients: that of the state, or that of the engines once they have loaded.

        ``promised`` waits for the engines' promise; None waits for all members.
        """
        if self.state.promise is None:
            promise = await (promised or self._membership.until_ready)()
            await self._update(lambda state: state.with_promise(promise))
            await self._catch_up(Loaded())
        else:
            self._membership.promise = self.state.promise
            await self._membership.look()
        if self.state.promise is None:
            raise BadRequest(f"state: {self._file.name} has no promise", "state")
        return self.state.promise

    async def replaced(self, promise: Promise) -> None:
        """Accept other weights from now on, here and in all processes that follow."""
        await self.change(lambda state: state.with_replaced(promise), "all engines serve other weights")

    async def serving(self) -> None:
        """Mark this process as serving: later changes wait for it, and it applies all earlier ones here."""
        self._serving = True
        await self._report()
        await self._catch_up(Loaded())
        self._metrics.workers.set(1)

    async def follow(self) -> None:
        """Apply changes of other processes, and report this process's state, until cancelled."""
        is_alone = False
        while True:
            await asyncio.sleep(ALONE_POLL_INTERVAL_S if is_alone else POLL_INTERVAL_S)
            try:
                stamp, unwritten, is_alone = await self._filed(self._look_and_tell, self._own_report())
            except EngineError as error:
                self._refuse_state(error.message)
                continue
            self._reported(unwritten)
            if self._silence or stamp != self._stamp:
                if self._failure == self._silence:
                    self._failure = ""
                self._silence = ""
                await self._catch_up(Loaded())

    async def _catch_up(self, loaded: Loaded) -> None:
        """Apply the newest state completely, even if the caller has left."""
        await asyncio.shield(self._applying.spawn(self._apply_newest(loaded), "state"))

    async def _apply_newest(self, loaded: Loaded) -> None:
        """Apply the newest state; if that fails, report the failure and keep the last good state in use."""
        async with self._turn:
            found = self._found
            try:
                self._stamp = await self._filed(self._file.stamp)
                state = await self._filed(self._file.read)
                if state is None or state is not state.following(found):  # write it again, since versions only grow
                    state = await self._update(_unchanged)
                if state.version > found.version:
                    found = state
                    await self._apply(state, loaded)
            except Exception as error:  # a user's module may raise anything
                self._found = found
                self._failure = error.message if isinstance(error, TercetError) else f"{type(error).__name__}: {error}"
                log_events.STATE_REFUSED.tell(version=self.state.version, reason=self._failure)
            self._metrics.fleet_state(self.state.version, bool(self._failure))
            await self._report()

    async def _update(self, change: Callable[[FleetState], FleetState]) -> FleetState:
        """Change the stored state; if it was lost or put back, continue from the newest state that was read."""
        known = self._found

        def following(state: FleetState) -> FleetState:
            return change(state.following(known))

        return await self._filed(self._file.update, following, known, by=self._changes)

    async def _filed(self, function: Callable[..., T], *args: object, by: FileThread | None = None) -> T:
        """Do file I/O in a thread; raise :class:`~tercet.protocol.EngineError` if it takes too long."""
        try:
            return await (by or self._files).run(function, *args)
        except TimeoutError as error:
            self._silence = f"state: {self._file.name} does not answer; its file system hangs"
            raise EngineError(self._silence) from error

    def _refuse_state(self, reason: str) -> None:
        """Log once that a state cannot be read; the last good state stays in use."""
        if self._failure != reason:
            self._failure = reason
            log_events.STATE_REFUSED.tell(version=self.state.version, reason=reason)
        self._metrics.fleet_state(self.state.version, True)

    async def _apply(self, state: FleetState, loaded: Loaded, from_scratch: bool = False) -> None:
        """Load all programs and files of a state, and then use them."""
        await self._load(state, loaded, from_scratch)
        is_first = from_scratch and not self._number_at_start(state)
        for used in (state.before, state.program):
            if used is not None and used.number in loaded.programs:
                self.service.use(used.number, used.plan, loaded.programs[used.number])
                if is_first:  # the command's own programs were never in use, so the router must not return to them
                    self.service.routing.forget()
                    is_first = False
        if state.scheduling is not None and state.scheduling.number in loaded.scheduling:
            self._fleet.scheduling = loaded.scheduling[state.scheduling.number]
        if not from_scratch and self.state.promise is not None and state.promise != self.state.promise:
            self.service.break_off(EngineUnreachable(REPLACED))
            self._membership.promise = state.promise
        await self._apply_members(state, from_scratch)
        self._fleet.adapters.declared = [AdapterReport(each.name, each.path, each.digest) for each in state.adapters]
        if not from_scratch and state.adapters != self.state.adapters:
            await self._membership.ask(self._fleet.members)
        if self.tells:
            for (event, fields, _), reason in changes_with_reasons(self.state, state, f"found in {self._file.name}"):
                event.tell(**fields, reason=reason)
        self.state, self._found, self._failure = state, state, ""
        self._metrics.fleet_state(state.version, False)
        await self._report()

    async def _load(self, state: FleetState, loaded: Loaded, from_scratch: bool) -> None:
        in_use = self._number_at_start(state) if from_scratch else self.state.program.number
        if state.before is not None and state.before.number > in_use:
            await self._load_one_before(state.before, loaded)
        if state.program.number > in_use and state.program.number not in loaded.programs:
            loaded.programs[state.program.number] = await self.service.load(state.program.plan)
        file = state.scheduling
        if (
            file is not None
            and (from_scratch or file != self.state.scheduling)
            and file.number not in loaded.scheduling
        ):
            loaded.scheduling[file.number] = await load_scheduling_file(file.file, file.content)

    def _number_at_start(self, state: FleetState) -> int:
        """Return the number of the service's first plan in the state; 0 if the state does not have it."""
        oldest = state.before or state.program
        same = oldest.number == self.service.routing.current.number and oldest.plan == self.service.wanted
        return oldest.number if same else 0

    async def _load_one_before(self, program: ProgramInUse, loaded: Loaded) -> None:
        """Load the programs to return to; a failure is only logged, and the requested programs are still used."""
        try:
            loaded.programs[program.number] = await self.service.load(program.plan)
        except BadRequest as error:
            log_events.PROGRAM_NOT_KEPT.tell(version=program.number, code=error.code, reason=error.message)

    async def _apply_members(self, state: FleetState, from_scratch: bool) -> None:
        for member in await self._membership.become(state.members):
            member.reachable = from_scratch
        away = [member for member in self._fleet.members if not member.reachable]
        if away and not from_scratch:
            await self._membership.look(members=away)

    # ---- changing --------------------------------------------------------------------------------------------

    async def use_program(
        self, plan: Plan, reason: str = ASKED, unless_after: int | None = None, load_arm: LoadArm = load_anywhere
    ) -> Sequence[str]:
        """Serve new requests by ``plan``, unless a plan with a higher number than ``unless_after`` is in use.

        This and the other changes are logged with their ``reason``, and return a text for each process that has not
        applied them. They raise :class:`~tercet.protocol.TercetError`, and then nothing changes. ``load_arm`` loads
        each program.
        """
        programs, loaded = await self.service.load(plan, load_arm), Loaded()

        def change(state: FleetState) -> FleetState:
            if unless_after is not None and state.program.number > unless_after:
                return state
            loaded.programs[state.program.number + 1] = programs
            return state.with_program(plan)

        return await self.change(change, reason, loaded)

    async def use_scheduling(
        self,
        file: str,
        reason: str = ASKED,
        unless_after: int | None = None,
        content: str | None = None,
        load: LoadScheduling = scheduling_anywhere,
    ) -> Sequence[str]:
        """Use a scheduling file, or ``content`` with that name; otherwise as :meth:`use_program`."""
        scheduling, loaded = await load_scheduling_file(file, content, load), Loaded()

        def change(state: FleetState) -> FleetState:
            if unless_after is not None and state.scheduling is not None and state.scheduling.number > unless_after:
                return state
            after = state.with_scheduling(file, content)
            if after.scheduling is not None:
                loaded.scheduling[after.scheduling.number] = scheduling
            return after

        return await self.change(change, reason, loaded)

    async def check(self, address: EngineAddress) -> None:
        """Raise :class:`~tercet.protocol.TercetError` for an engine that does not answer or does not fit."""
        await self._membership.check(address)

    async def add(self, address: EngineAddress, reason: str = ASKED) -> Sequence[str]:
        """Add an engine after it has answered and been checked."""
        self.state.with_member(address)
        await self.check(address)
        return await self.change(lambda state: state.with_member(address), reason)

    async def change(
        self, change: Callable[[FleetState], FleetState], reason: str = ASKED, loaded: Loaded | None = None
    ) -> Sequence[str]:
        """Change the newest state; ``loaded`` has programs and files that were loaded for the change already."""
        state = await self._update(lambda state: because(reason, state, change(state)))
        await self._catch_up(loaded or Loaded())
        return await self._behind(state.version)

    async def _behind(self, version: int) -> Sequence[str]:
        """Wait until all processes have applied a version, for a limited time; return a text for each that has not."""
        deadline = asyncio.get_running_loop().time() + FOLLOW_SECONDS
        while True:
            reports = [self._own_report(), *await self._filed(self._followers.others)]
            late = [report for report in reports if report.serving and report.version < version]
            if not late or asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(POLL_INTERVAL_S / 4)
        said = [f"process {each.pid} has not applied the change within {FOLLOW_SECONDS:.0f} s" for each in late]
        said += [f"process {each.pid}: {each.failure}" for each in reports if each.failure and each not in late]
        if said:
            log_events.STATE_BEHIND.tell(version=version, reason="; ".join(said))
        return said

    async def _others(self) -> Sequence[str]:
        return await self._filed(self._followers.names_of_others)

    # ---- reports ---------------------------------------------------------------------------------------------

    def refusal(self) -> TercetError | None:
        """Return the error with which requests are refused now; None if they are served."""
        try:
            self._shutdown.require_serving()
            self._fleet.health.require_answers()
        except TercetError as error:
            return error
        return None

    def engines(self) -> dict[str, EngineReport]:
        """Return each engine's state over all processes; an engine that one of them cannot reach is unreachable."""
        found = dict(self._own_report().engines)
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
        found = self.service.attainments.counts()
        for report in self._followers.others():
            for name, (ended, met) in report.attained.items():
                if name in found:
                    found[name] = found[name][0] + ended, found[name][1] + met
        return found

    def processes(self) -> int:
        """Return the number of processes that follow the state, this one included."""
        return 1 + len(self._followers.others())

    @property
    def _planned(self) -> bool:
        """True if a role keeper or a planner uses the waiting prefills of engines."""
        return self.role_keeper is not None or self.service.seen is not None

    def _own_report(self) -> FollowerReport:
        engines = {
            each.name: EngineReport(
                each.in_flight, each.reachable, *(prefill_line(self._fleet, each.name) if self._planned else ())
            )
            for each in self._fleet.members
        }
        left = self._shutdown.requests if self._shutdown.has_begun else 0
        attained = self.service.attainments.counts()
        return FollowerReport(os.getpid(), self._serving, self._found.version, self._failure, engines, left, attained)

    async def _report(self) -> None:
        """Write this process's report; a failed write is logged once and retried later."""
        try:
            self._reported(await self._filed(self._tell, self._own_report()))
        except EngineError as error:
            self._reported(error)

    def _reported(self, error: Exception | None) -> None:
        """Log the first of several failed writes of this process's report; None is a successful write."""
        if error is not None and not self._unreported:
            logger.error("state: cannot write this process's report for the other processes: %s", error)
        self._unreported = error is not None

    def _tell(self, report: FollowerReport) -> OSError | None:
        """Write a report; return the error if that failed. It runs in the file thread."""
        try:
            self._followers.tell(report)
        except OSError as error:
            return error
        return None

    def _look_and_tell(self, report: FollowerReport) -> tuple[object, OSError | None, bool]:
        """Return the stamp of the stored state, the result of :meth:`_tell`, and whether no other process follows.

        It is one call, because each wakes two threads.
        """
        stamp, unwritten = self._file.stamp(), self._tell(report)
        return stamp, unwritten, self._followers.is_alone()
