"""The scheduling file in use, which can be changed while traffic flows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tercet.fleet import EngineFleet
from tercet.scheduling import Scheduling, files_of, load_scheduling

logger = logging.getLogger("tercet.router")


class SchedulingFile:
    """Gives ``fleet`` the profiles of a file; picks from then on go by them, those that are over do not change.

    ``path`` is the file in use, None if there is none, ``files`` are that file and those of the plugins in it.
    """

    def __init__(self, fleet: EngineFleet) -> None:
        self._fleet = fleet
        self._changing = asyncio.Lock()
        self.path: str | None = None
        self.files: Sequence[Path] = ()

    async def use(self, path: str) -> None:
        """Use the file at ``path``. Raises :class:`~tercet.protocol.BadRequest`, and then nothing changes."""
        async with self._changing:
            # It runs the user's modules, however long that takes.
            scheduling, files = await asyncio.to_thread(_load, path)
            self._fleet.scheduling = scheduling
            self.path, self.files = path, files
        logger.warning("scheduling: %s is in use, with the profiles %s", path, ", ".join(scheduling.profiles))

    def describe(self) -> dict[str, Any]:
        """What is in use, for people."""
        scheduling = self._fleet.scheduling
        return {
            "file": self.path,
            "profiles": {
                name: {
                    "filters": [type(plugin).__name__ for plugin in profile.filters],
                    "scorers": {type(item.scorer).__name__: item.weight for item in profile.scorers},
                    "picker": type(profile.picker).__name__,
                }
                for name, profile in scheduling.profiles.items()
            },
            "by_role": dict(scheduling.by_role),
            "deciders": list(scheduling.deciders),
        }


def _load(path: str) -> tuple[Scheduling, list[Path]]:
    file = Path(path).expanduser()
    return load_scheduling(file), files_of(file)
