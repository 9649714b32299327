"""The loaded code of a fleet's state: its programs and its scheduling file.

In development mode it is loaded again when its files change.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tercet import logs
from tercet.aio.files import stamp_of
from tercet.aio.tasks import run_in_thread
from tercet.decisions.scheduling import Scheduling, load_scheduling
from tercet.decisions.scheduling.assembly import user_file
from tercet.logs import RELOAD_REFUSED
from tercet.programs import Program
from tercet.protocol import TercetError
from tercet.router.serve.plans import Plan
from tercet.router.serve.service import Service
from tercet.router.state.fleet_state import FleetState

if TYPE_CHECKING:
    from tercet.router.state.shared_state import SharedState

logger = logging.getLogger("tercet.router")
LoadScheduling = Callable[[str, str | None], Scheduling]


def scheduling_anywhere(path: str, content: str | None = None) -> Scheduling:
    """Return the scheduling of a file that the operator's files or flags name, or of ``content`` with that name."""
    return load_scheduling(user_file(path, "scheduling") if content is None else Path(path), content)


async def load_scheduling_file(
    path: str, content: str | None = None, load: LoadScheduling = scheduling_anywhere
) -> Scheduling:
    """Load a scheduling file; raise :class:`~tercet.protocol.TercetError` if it cannot be used."""
    return await run_in_thread(load, path, content)  # it runs the user's modules, which may take long


def number_at_start(service: Service, state: FleetState) -> int:
    """Return the number of the service's first plan in the state; 0 if the state does not have it."""
    oldest = state.before or state.program
    same = oldest.number == service.routing.current.number and oldest.plan == service.wanted
    return oldest.number if same else 0


def _labels(plan: Plan) -> str:
    return ", ".join(arm.label for arm in plan.arms)


@dataclass
class LoadedCode:
    """The loaded code of a state: programs by the number of their plan, a scheduling file by its number."""

    programs: dict[int, Mapping[str, Program]] = field(default_factory=dict[int, Mapping[str, Program]])
    scheduling: dict[int, Scheduling] = field(default_factory=dict[int, Scheduling])

    async def load(self, service: Service, state: FleetState, in_use: FleetState | None) -> None:
        """Load the code of ``state`` that is neither loaded nor ``in_use``; None: the service has only its first plan.

        Raises :class:`~tercet.protocol.TercetError` if a process that serves cannot load it. A process that starts
        serves without what it cannot load: by the programs before, else by those of its command; the log says which.
        """
        number = number_at_start(service, state) if in_use is None else in_use.program.number
        if state.before is not None and state.before.number > number:
            # Load the programs to return to; a failure is only logged, and the requested programs are still used.
            try:
                self.programs[state.before.number] = await service.load(state.before.plan)
            except TercetError as error:
                logs.PROGRAM_NOT_KEPT.tell(version=state.before.number, code=error.code, reason=error.message)
        if state.program.number > number and state.program.number not in self.programs:
            try:
                self.programs[state.program.number] = await service.load(state.program.plan)
            except TercetError as error:
                # A process that serves keeps what it has, and reports the error. One that starts has nothing yet, and
                # must serve something: a restart must not take a router down because a file has changed since.
                if in_use is not None:
                    raise
                before = state.before
                if before is not None and (
                    before.number in self.programs or before.number == number_at_start(service, state)
                ):
                    instead = f"the programs before it, of version {before.number} ({_labels(before.plan)}),"
                else:
                    instead = f"the program of this command ({_labels(service.wanted)})"
                reason = f"{error.message}; {instead} serves instead. Correct the file, or choose another program"
                logs.PROGRAM_NOT_KEPT.tell(version=state.program.number, code=error.code, reason=reason)
        file = state.scheduling
        if file is not None and (in_use is None or file != in_use.scheduling) and file.number not in self.scheduling:
            try:
                self.scheduling[file.number] = await load_scheduling_file(file.file, file.content)
            except TercetError as error:
                if in_use is not None:
                    raise
                logger.error(
                    "scheduling: %s of the state cannot be used, and that of this command is used: %s",
                    file.file, error.message,
                )  # fmt: skip


EVERY_SECONDS = 0.3


class FileWatch:
    """Detection of changed files, which asks the file system at each call.

    A file that is missing is not a change: editors replace files, and there is nothing to load.
    """

    def __init__(self) -> None:
        self._seen: dict[Path, object] = {}

    def changed(self, files: Iterable[Path]) -> list[Path]:
        """Return the ``files`` that changed since they were last checked; a file checked first has not changed."""
        found: list[Path] = []
        for file in files:
            stamp = stamp_of(file)
            if stamp is not None and self._seen.setdefault(file, stamp) != stamp:
                self._seen[file] = stamp
                found.append(file)
        return found


def files_of(plan: Plan) -> list[Path]:
    """Return the files that a plan's programs name by ``file.py:function``, each once."""
    paths = (arm.program.rpartition(":")[0] for arm in plan.arms if arm.source is None)
    return [Path(path).expanduser() for path in dict.fromkeys(paths) if path]


async def reload_on_change(shared: SharedState, every: float = EVERY_SECONDS) -> None:
    """Reload the current plan and scheduling file each time one of their files changes, until cancelled.

    A file that does not load is logged, and the version in use stays.
    """
    service, fleet = shared.service, shared.service.fleet
    programs, plugins = FileWatch(), FileWatch()
    programs.changed(files_of(service.wanted))
    plugins.changed(fleet.scheduling.files)

    async def use(files: Sequence[Path], using: Callable[..., Awaitable[object]]) -> None:
        names = ", ".join(map(str, files))
        try:
            await using(reason=f"{names} has changed")
        except TercetError as error:
            if shared.logs_changes:
                RELOAD_REFUSED.tell(file=names, code=error.code, reason=error.message)

    while True:
        # Other workers see the same change of a file; the state of before makes only the first worker's change count.
        before = shared.state
        await asyncio.sleep(every)
        if files := programs.changed(files_of(service.wanted)):
            await use(files, partial(shared.use_program, service.wanted, unless_after=before.program.number))
        if (in_use := before.scheduling) is not None and (files := plugins.changed(fleet.scheduling.files)):
            again = partial(shared.use_scheduling, in_use.file, unless_after=in_use.number, content=in_use.content)
            await use(files, again)
