"""The scheduling file in use, which can be changed while traffic flows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tercet.aio import run_in_thread
from tercet.fleet import EngineFleet
from tercet.scheduling import Scheduling, files_of, load_scheduling
from tercet.scheduling.registry import user_file

logger = logging.getLogger("tercet.router")


@dataclass(frozen=True)
class LoadedScheduling:
    """What a scheduling file says, that file, and those of the plugins in it."""

    scheduling: Scheduling
    files: Sequence[Path]


class SchedulingFile:
    """Gives ``fleet`` the profiles of a file; picks from then on go by them, those that are over do not change.

    ``path`` is the file in use, None if there is none, ``files`` are that file and those of the plugins in it.
    """

    def __init__(self, fleet: EngineFleet) -> None:
        self._fleet = fleet
        self.path: str | None = None
        self.files: Sequence[Path] = ()

    def use(self, path: str, loaded: LoadedScheduling) -> None:
        """Use a file as it was loaded."""
        self._fleet.scheduling = loaded.scheduling
        self.path, self.files = path, loaded.files
        logger.warning("scheduling: %s is in use, with the profiles %s", path, ", ".join(loaded.scheduling.profiles))

    def describe(self) -> dict[str, Any]:
        """What is in use, for people."""
        scheduling = self._fleet.scheduling
        return {
            "file": self.path,
            "profiles": {
                name: {
                    "filters": [type(plugin).__name__ for plugin in profile.filters],
                    "scorers": {type(scorer).__name__: weight for scorer, weight in profile.scorers},
                    "picker": type(profile.picker).__name__,
                }
                for name, profile in scheduling.profiles.items()
            },
            "by_role": dict(scheduling.by_role),
            "deciders": list(scheduling.deciders),
        }


async def load_scheduling_file(path: str) -> LoadedScheduling:
    """Raises :class:`~tercet.protocol.BadRequest` for what cannot be used."""
    return await run_in_thread(_load, path)  # it runs the user's modules, however long that takes


def _load(path: str) -> LoadedScheduling:
    file = user_file(path, "scheduling")
    return LoadedScheduling(load_scheduling(file), files_of(file))
