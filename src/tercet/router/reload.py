"""Development mode: a program is loaded anew when its file changes."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from tercet.protocol import TercetError
from tercet.router.plan import Plan
from tercet.router.service import Service

logger = logging.getLogger("tercet.router")
LOOK_SECONDS = 0.3
Stamp = tuple[int, int]


class FileWatch:
    """Notices changes of the files that the programs of a plan come from; asks the file system each time.

    A file that is gone is no change: editors replace files, and there is nothing to load.
    """

    def __init__(self) -> None:
        self._seen: dict[Path, Stamp] = {}

    def changed(self, plan: Plan) -> list[Path]:
        """Files of ``plan`` that changed since they were looked at last."""
        found: list[Path] = []
        for file in files_of(plan):
            stamp = _stamp(file)
            if stamp is not None and self._seen.setdefault(file, stamp) != stamp:
                self._seen[file] = stamp
                found.append(file)
        return found


def files_of(plan: Plan) -> list[Path]:
    """The files in a plan's ``file.py:function``, each once."""
    paths = (arm.program.rpartition(":")[0] for arm in plan.arms)
    return [Path(path).expanduser() for path in dict.fromkeys(paths) if path]


async def reload_on_change(service: Service, every: float = LOOK_SECONDS) -> None:
    """Use the plan that was asked for last anew, each time that a file of it changes; until cancelled.

    A file that does not load is reported, and what runs goes on as it is.
    """
    watch = FileWatch()
    watch.changed(service.wanted)
    while True:
        await asyncio.sleep(every)
        files = watch.changed(service.wanted)
        if not files:
            continue
        names = ", ".join(map(str, files))
        try:
            version = await service.use(service.wanted)
        except TercetError as error:
            logger.error("programs: %s changed and is not used: %s", names, error.message)
        else:
            logger.warning("programs: %s changed and is used now, as version %d", names, version.number)


def _stamp(file: Path) -> Stamp | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
