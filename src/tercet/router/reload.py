"""Development mode: programs and the scheduling file are loaded anew when their files change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Sequence
from pathlib import Path

from tercet.protocol import TercetError
from tercet.router.fleet_state import stamp_of
from tercet.router.routing import Plan
from tercet.router.shared_state import SharedState

logger = logging.getLogger("tercet.router")
EVERY_SECONDS = 0.3


class FileWatch:
    """Notices changes of files; asks the file system each time.

    A file that is gone is no change: editors replace files, and there is nothing to load.
    """

    def __init__(self) -> None:
        self._seen: dict[Path, object] = {}

    def changed(self, files: Iterable[Path]) -> list[Path]:
        """Those that changed since they were looked at last."""
        found: list[Path] = []
        for file in files:
            stamp = stamp_of(file)
            if stamp is not None and self._seen.setdefault(file, stamp) != stamp:
                self._seen[file] = stamp
                found.append(file)
        return found


def files_of(plan: Plan) -> list[Path]:
    """The files in a plan's ``file.py:function``, each once."""
    paths = (arm.program.rpartition(":")[0] for arm in plan.arms)
    return [Path(path).expanduser() for path in dict.fromkeys(paths) if path]


async def reload_on_change(shared: SharedState, every: float = EVERY_SECONDS) -> None:
    """Use the plan and the scheduling file that were asked for last anew, each time that a file of theirs changes.

    Until cancelled. What does not load is reported, and what runs goes on as it is.
    """
    service, fleet = shared.service, shared.service.fleet
    programs, plugins = FileWatch(), FileWatch()
    programs.changed(files_of(service.wanted))
    plugins.changed(fleet.scheduling.files)
    while True:
        await asyncio.sleep(every)
        if files := programs.changed(files_of(service.wanted)):
            # Other workers see the same change: the first one's is everybody's.
            await _use("programs", files, shared.use_program(service.wanted, shared.state.program.number))
        in_use = shared.state.scheduling
        if in_use is not None and (files := plugins.changed(fleet.scheduling.files)):
            await _use("scheduling", files, shared.use_scheduling(in_use.file))


async def _use(what: str, files: Sequence[Path], using: Awaitable[object]) -> None:
    names = ", ".join(map(str, files))
    try:
        await using
    except TercetError as error:
        logger.error("%s: %s changed and is not used: %s", what, names, error.message)
    else:
        logger.warning("%s: %s changed and is used now", what, names)
