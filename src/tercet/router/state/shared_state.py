"""The shared state of a fleet in one process: it applies changes of other processes, and makes changes for all.

A change is validated, written, applied here, and then waited for: every process that follows the same file applies it
or reports why not. A process that starts later reads one state, which contains all changes. Changes of LoRA adapters
are made one at a time, first on all engines, then in the state. Each applied change is a log event with its reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from tercet import logs
from tercet.aio.files import BOUND_SECONDS, FileThread, write_whole
from tercet.aio.tasks import TaskSet
from tercet.decisions.planning import PlannerReport
from tercet.fleet.members import Change, member_changes
from tercet.fleet.membership import Membership, ServedModel
from tercet.protocol import AdapterReport, BadRequest, EngineError, EngineUnreachable, TercetError, UnknownAdapter
from tercet.router.observe.request_traces import RequestTraces, SharedTraces
from tercet.router.serve.plans import Plan, load_anywhere
from tercet.router.serve.service import POLL_INTERVAL_S, LoadArm, Service
from tercet.router.serve.shutdown import Shutdown
from tercet.router.state.fleet_adapters import load_everywhere, replace_everywhere, unload_everywhere
from tercet.router.state.fleet_state import AdapterState, FleetState, MadeChange, StateFile
from tercet.router.state.followers import FollowerReport, Followers, ProcessReports, read_record
from tercet.router.state.loaded_code import (
    LoadedCode,
    LoadScheduling,
    load_scheduling_file,
    number_at_start,
    scheduling_anywhere,
)
from tercet.router.state.state_store import LOCK_SECONDS, FileTurn, LeaseTurn, StateStore
from tercet.settings import EngineAddress

if TYPE_CHECKING:
    from tercet.router.batches.batch_routes import Batches
    from tercet.router.state.roles import RoleKeeper


class PlannerReports:
    """The report's file, next to the state at ``path``; ``files`` does the I/O."""

    def __init__(self, path: Path, files: FileThread) -> None:
        self._path = Path(f"{path}.planner")
        self._files = files

    async def store(self, report: PlannerReport) -> None:
        """Store the newest report; raise :class:`~tercet.protocol.EngineError` if it cannot be written."""
        try:
            await self._files.run(write_whole, self._path, msgspec.json.encode(report))
        except (OSError, TimeoutError) as error:
            raise EngineError(f"planner: {self._path} cannot be written: {error}") from error

    async def newest(self) -> PlannerReport | None:
        """Return the last report; None if no planner has reported or the file cannot be read."""
        with suppress(TimeoutError):
            return await self._files.run(lambda: read_record(self._path, PlannerReport))
        return None


# The changes whose reasons a state keeps: a process that was away for more logs the oldest without their reasons.
REMEMBERED = 32
# The reason of a change that a caller asks for without a reason.
ASKED = "requested"


def because(reason: str, before: FleetState, after: FleetState) -> FleetState:
    """Return ``after``, with its changes since ``before`` and their ``reason`` recorded if the two states differ."""
    if after is before:
        return after
    version, found = before.version + 1, changes(before, after)
    made = [MadeChange(version, each.event.name, each.fields, each.reason or reason) for each in found]
    return msgspec.structs.replace(after, changes=(*before.changes, *made)[-REMEMBERED:])


def changes_with_reasons(before: FleetState, after: FleetState, otherwise: str) -> Sequence[tuple[Change, str]]:
    """Return the changes since ``before`` in order, each with its reason, or ``otherwise`` if none was recorded.

    A setting that was changed and changed back occurs twice.
    """
    made = [each for each in after.changes if each.version > before.version]
    recorded = [(Change(_CHANGES[each.event], each.fields), each.reason) for each in made if each.event in _CHANGES]
    known = [change for change, _ in recorded]
    unrecorded = (each for each in changes(before, after) if each._replace(reason="") not in known)
    return [*recorded, *((each, each.reason or otherwise) for each in unrecorded)]


def changes(before: FleetState, after: FleetState) -> Iterator[Change]:
    """Yield each difference between two states once; an engine at another URL is another engine."""
    yield from member_changes(before.members, after.members)
    known, wanted = ({each.name: each for each in state.adapters} for state in (before, after))
    for name in known.keys() - wanted.keys():
        yield Change(logs.ADAPTER_UNLOADED, {"adapter": name})
    for name, adapter in wanted.items():
        if known.get(name) != adapter:
            yield Change(logs.ADAPTER_LOADED, {"adapter": name, "path": adapter.path})
    # Every plan since then, also one that was in use only for a moment: the state keeps the plan before the last.
    for used in (after.before, after.program):
        if used is not None and used.number > before.program.number:
            names = dict.fromkeys(arm.label for arm in used.plan.arms)
            yield Change(logs.PROGRAM_CHANGED, {"version": used.number, "program": ", ".join(names)})
    if after.scheduling is not None and after.scheduling != before.scheduling:
        yield Change(logs.SCHEDULING_CHANGED, {"file": after.scheduling.file})


_CHANGES = {
    each.name: each
    for each in (
        logs.ENGINE_ADDED, logs.ENGINE_REMOVED, logs.ENGINE_ROLE, logs.ENGINE_DRAINED, logs.ENGINE_UNDRAINED,
        logs.ADAPTER_LOADED, logs.ADAPTER_UNLOADED, logs.PROGRAM_CHANGED, logs.SCHEDULING_CHANGED,
    )
}  # fmt: skip


logger = logging.getLogger("tercet.router")
T = TypeVar("T")
# A process without others polls for those that start. Each poll wakes two threads: an idle router does little else.
ALONE_POLL_INTERVAL_S = 0.5
REPLACED = "the model was replaced by another one while this request ran; send the request again"


def _unchanged(state: FleetState) -> FleetState:
    return state


class SharedState:
    """The state at ``path``, applied to ``service`` and its fleet; ``state`` is the one in use. The caller closes it.

    With a ``store``, routers on several machines share the state there; ``path`` then only connects the processes of
    one machine. Of several workers, only one ``logs_changes``. ``traces`` are those of the requests that this process
    serves; ``reports`` are those of all processes that follow the state.
    """

    def __init__(
        self,
        path: Path,
        membership: Membership,
        service: Service,
        shutdown: Shutdown | None = None,
        logs_changes: bool = True,
        traces: RequestTraces | None = None,
        store: StateStore | None = None,
    ) -> None:
        self.service = service
        self.logs_changes = logs_changes
        self._file = StateFile(path, store)
        self._fleet = service.fleet
        self.membership = membership
        self._metrics = service.metrics
        self._files = FileThread()
        # A change may wait for other processes' changes, so a long wait does not mean that the file system hangs.
        self._changes = FileThread(LOCK_SECONDS + BOUND_SECONDS, LOCK_SECONDS + BOUND_SECONDS)
        self._followers = Followers(path, lambda: self._files.is_stuck)
        self.planner = PlannerReports(path, self._files)
        self.traces = SharedTraces(
            traces or RequestTraces(), self._followers.name, self._others, service.metrics.exemplars
        )
        self.reports = ProcessReports(self, self._followers, shutdown or Shutdown(timeout_s=0))
        service.moves.under_way.shared = self._followers
        self._turn = asyncio.Lock()
        self.adapters = AdapterChanges(self)
        self._stamp: object = None
        self._silence = ""  # the error while the file system hangs; the state is read again once it answers
        self.role_keeper: RoleKeeper | None = None  # set if roles follow the load
        self.batches: Batches | None = None  # set if this router runs batches
        self._applying = TaskSet()
        self.found: FleetState  # the newest state that was read, also if it cannot be applied
        self.state: FleetState

    def turn(self, what: str) -> FileTurn | LeaseTurn:
        """Return the lock for the task ``what``; one of the processes that share the state holds it."""
        return self._file.store.turn(what)

    def close(self) -> None:
        self._applying.cancel()
        self._followers.close()
        self._files.close()
        self._changes.close()

    # ---- following -------------------------------------------------------------------------------------------

    async def start(self, first: FleetState) -> None:
        """Apply the stored state, or ``first``; raise :class:`~tercet.protocol.BadRequest` if it cannot be applied."""
        self.state = self.found = await self.filed(self._file.update, _unchanged, first, by=self._changes)
        named = tuple(each for each in self.state.members if not each.uid or each.joined)
        if (named, self.state.program.plan) != (first.members, first.program.plan):
            logger.warning("state: using the engines and programs of %s, not those of this command", self._file.name)
        self._stamp = await self.filed(self._file.store.stamp)
        await self._apply(self.state, LoadedCode(), from_scratch=True)

    async def until_ready(self, answered: Callable[[], Awaitable[ServedModel]] | None = None) -> ServedModel:
        """Return what clients see of the model: that of the state, or that of the engines once they have loaded.

        ``answered`` waits for engines and returns their model; None waits for all members.
        """
        if self.state.served_model is None:
            model = await (answered or self.membership.until_ready)()
            await self._update(lambda state: state.with_served_model(model))
            await self._catch_up(LoadedCode())
        else:
            self.membership.served_model = self.state.served_model
            await self.membership.look()
        if self.state.served_model is None:
            raise BadRequest(f"state: {self._file.name} has no served model", "state")
        return self.state.served_model

    async def replaced(self, model: ServedModel) -> None:
        """Accept other weights from now on, here and in all processes that follow."""
        await self.change(lambda state: state.with_replaced(model), "all engines serve other weights")

    async def serving(self) -> None:
        """Mark this process as serving: later changes wait for it, and it applies all earlier ones here."""
        self.reports.serving = True
        await self.reports.publish()
        await self._catch_up(LoadedCode())
        self._metrics.workers.set(1)

    async def follow(self) -> None:
        """Apply changes of other processes, and report this process's state, until cancelled."""
        is_alone = False
        while True:
            await asyncio.sleep(ALONE_POLL_INTERVAL_S if is_alone else POLL_INTERVAL_S)
            try:
                stamp, is_alone = await self.filed(self._look_and_report, self.reports.own())
            except EngineError as error:
                # Log once that a state cannot be read; the last good state stays in use.
                if self.reports.failure != error.message:
                    self.reports.failure = error.message
                    logs.STATE_REFUSED.tell(version=self.state.version, reason=error.message)
                self._metrics.fleet_state(self.state.version, True)
                continue
            if self._silence or stamp != self._stamp:
                if self.reports.failure == self._silence:
                    self.reports.failure = ""
                self._silence = ""
                await self._catch_up(LoadedCode())

    async def _others(self) -> Sequence[str]:
        return await self.filed(self._followers.names_of_others)

    def _look_and_report(self, report: FollowerReport) -> tuple[object, bool]:
        """Write ``report``; return the stamp of the stored state, and whether no other process follows.

        It is one call, because each wakes two threads.
        """
        self.reports.write(report)
        return self._file.store.stamp(), self._followers.is_alone()

    async def _catch_up(self, loaded: LoadedCode) -> None:
        """Apply the newest state completely, even if the caller has left."""
        # Otherwise a client who leaves would leave half of the state applied here.
        await asyncio.shield(self._applying.spawn(self._apply_newest(loaded), "state"))

    async def _apply_newest(self, loaded: LoadedCode) -> None:
        """Apply the newest state; if that fails, report the failure and keep the last good state in use."""
        async with self._turn:
            found = self.found
            try:
                self._stamp = await self.filed(self._file.store.stamp)
                state = await self.filed(self._file.read, found)
                # The file was removed, or an older one was put in its place: what the fleet runs on is written again.
                if state is None or state is not state.following(found):  # write it again, since versions only grow
                    state = await self._update(_unchanged)
                if state.version > found.version:
                    found = state
                    await self._apply(state, loaded)
            except Exception as error:  # a user's module may raise anything
                self.found = found
                reason = error.message if isinstance(error, TercetError) else f"{type(error).__name__}: {error}"
                self.reports.failure = reason
                logs.STATE_REFUSED.tell(version=self.state.version, reason=reason)
            self._metrics.fleet_state(self.state.version, bool(self.reports.failure))
            await self.reports.publish()

    async def _update(self, change: Callable[[FleetState], FleetState]) -> FleetState:
        """Change the stored state; if it was lost or put back, continue from the newest state that was read."""
        known = self.found

        def following(state: FleetState) -> FleetState:
            return change(state.following(known))

        return await self.filed(self._file.update, following, known, by=self._changes)

    async def filed(self, function: Callable[..., T], *args: object, by: FileThread | None = None) -> T:
        """Do file I/O in a thread; raise :class:`~tercet.protocol.EngineError` if it takes too long."""
        try:
            return await (by or self._files).run(function, *args)
        except TimeoutError as error:
            self._silence = f"state: {self._file.name} does not answer; its file system hangs"
            raise EngineError(self._silence) from error

    async def _apply(self, state: FleetState, loaded: LoadedCode, from_scratch: bool = False) -> None:
        """Load all programs and files of a state, and then use them."""
        await loaded.load(self.service, state, None if from_scratch else self.state)
        is_first = from_scratch and not number_at_start(self.service, state)
        for used in (state.before, state.program):
            if used is not None and used.number in loaded.programs:
                self.service.use(used.number, used.plan, loaded.programs[used.number])
                if is_first:  # the command's own programs were never in use, so the router must not return to them
                    self.service.routing.forget()
                    is_first = False
        if state.scheduling is not None and state.scheduling.number in loaded.scheduling:
            self._fleet.scheduling = loaded.scheduling[state.scheduling.number]
        if not from_scratch and self.state.served_model is not None and state.served_model != self.state.served_model:
            self.service.break_off(EngineUnreachable(REPLACED))
            self.membership.served_model = state.served_model
        await self._apply_members(state, from_scratch)
        self._fleet.adapters.declared = [AdapterReport(each.name, each.path, each.digest) for each in state.adapters]
        if not from_scratch and state.adapters != self.state.adapters:
            await self.membership.ask(self._fleet.members)
        if self.logs_changes:
            for (event, fields, _), reason in changes_with_reasons(self.state, state, f"found in {self._file.name}"):
                event.tell(**fields, reason=reason)
        self.state, self.found, self.reports.failure = state, state, ""
        self._metrics.fleet_state(state.version, False)
        await self.reports.publish()

    async def _apply_members(self, state: FleetState, from_scratch: bool) -> None:
        # A member that joins later is not picked before it has answered the look below. At the start the members
        # count as reachable until the caller, who waits for them, has looked.
        for member in await self.membership.become(state.members):
            member.reachable = from_scratch
        away = [member for member in self._fleet.members if not member.reachable]
        if away and not from_scratch:
            await self.membership.look(members=away)

    # ---- changing --------------------------------------------------------------------------------------------

    async def use_program(
        self, plan: Plan, reason: str = ASKED, unless_after: int | None = None, load_arm: LoadArm = load_anywhere
    ) -> Sequence[str]:
        """Serve new requests by ``plan``, unless a plan with a higher number than ``unless_after`` is in use.

        This and the other changes are logged with their ``reason``, and return a text for each process that has not
        applied them. They raise :class:`~tercet.protocol.TercetError`, and then nothing changes. ``load_arm`` loads
        each program.
        """
        programs, loaded = await self.service.load(plan, load_arm), LoadedCode()

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
        scheduling, loaded = await load_scheduling_file(file, content, load), LoadedCode()

        def change(state: FleetState) -> FleetState:
            if unless_after is not None and state.scheduling is not None and state.scheduling.number > unless_after:
                return state
            after = state.with_scheduling(file, content)
            if after.scheduling is not None:
                loaded.scheduling[after.scheduling.number] = scheduling
            return after

        return await self.change(change, reason, loaded)

    async def add(self, address: EngineAddress, reason: str = ASKED) -> Sequence[str]:
        """Add an engine after it has answered and been checked."""
        self.state.with_member(address)
        await self.membership.check(address)
        return await self.change(lambda state: state.with_member(address), reason)

    async def change(
        self, change: Callable[[FleetState], FleetState], reason: str = ASKED, loaded: LoadedCode | None = None
    ) -> Sequence[str]:
        """Change the newest state; ``loaded`` has programs and files that were loaded for the change already."""
        # Written first, and then read and applied here as in every other process.
        state = await self._update(lambda state: because(reason, state, change(state)))
        await self._catch_up(loaded or LoadedCode())
        return await self.reports.behind(state.version)


class AdapterChanges:
    """Loading, replacing and unloading of adapters for all processes that follow ``shared``.

    Each method returns a text for each process that has not applied the change.
    """

    def __init__(self, shared: SharedState) -> None:
        self._shared, self._fleet, self._membership = shared, shared.service.fleet, shared.membership
        self._turn = asyncio.Lock()

    async def load(self, name: str, path: str, reason: str = ASKED) -> Sequence[str]:
        """Serve a LoRA adapter after every engine that answers and takes adapters has loaded it."""
        async with self._turn:
            return await self._load(name, path, reason)

    async def _load(self, name: str, path: str, reason: str) -> Sequence[str]:
        self._shared.state.with_adapter(AdapterState(name, path))
        report = await load_everywhere(self._fleet, self._membership, name, path)
        adapter = AdapterState(name, path, report.digest)
        return await self._shared.change(lambda state: state.with_adapter(adapter), reason)

    async def replace(self, name: str, path: str, reason: str = ASKED) -> Sequence[str]:
        """Replace an adapter by the files at ``path``; a new name is loaded.

        Raises :class:`~tercet.protocol.Conflict` while requests use the adapter.
        """
        async with self._turn:
            before = self._fleet.adapters.get(name)
            if before is None:
                return await self._load(name, path, reason)
            report = await replace_everywhere(self._fleet, self._membership, before, path)
            adapter = AdapterState(name, path, report.digest)
            return await self._shared.change(lambda state: state.without_adapter(name).with_adapter(adapter), reason)

    async def unload(self, name: str, reason: str = ASKED) -> Sequence[str]:
        """Stop accepting requests for a LoRA adapter; running sequences that use it continue."""
        async with self._turn:
            if name not in self._fleet.adapters:
                raise UnknownAdapter(f"name: this fleet has no adapter {name!r}", "name")
            behind = await self._shared.change(lambda state: state.without_adapter(name), reason)
            return [*behind, *await unload_everywhere(self._fleet, self._membership, name)]
