"""Development mode: programs and the scheduling file are reloaded when their files change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from pathlib import Path

from tercet.aio.files import stamp_of
from tercet.protocol import TercetError
from tercet.router.serve.routing import Plan
from tercet.router.state.shared_state import SharedState
from tercet.settings.log_events import RELOAD_REFUSED

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
    while True:
        # Other workers see the same change of a file; the state of before makes only the first worker's change count.
        before = shared.state
        await asyncio.sleep(every)
        if files := programs.changed(files_of(service.wanted)):
            used = shared.use_program(service.wanted, _reason(files), before.program.number)
            await _use(files, used, shared.tells)
        if before.scheduling is not None and (files := plugins.changed(fleet.scheduling.files)):
            in_use = before.scheduling
            await _use(
                files, shared.use_scheduling(in_use.file, _reason(files), in_use.number, in_use.content), shared.tells
            )


async def _use(files: Sequence[Path], using: Awaitable[object], tells: bool) -> None:
    try:
        await using
    except TercetError as error:
        if tells:
            RELOAD_REFUSED.tell(file=_names(files), code=error.code, reason=error.message)


def _reason(files: Sequence[Path]) -> str:
    return f"{_names(files)} has changed"


def _names(files: Sequence[Path]) -> str:
    return ", ".join(map(str, files))
