"""The router processes that follow one state: which are alive, the version that each has applied, and its load.

Each process has three files in one directory: one that it locks while it lives, its report, and its moves.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tercet.aio.files import read_whole, write_whole
from tercet.decisions.migration import CountedMove
from tercet.protocol.wire import UNREADABLE

logger = logging.getLogger("tercet.router")
T = TypeVar("T")

ALIVE, REPORT, MOVES = ".alive", ".json", ".moves"


class EngineReport(msgspec.Struct, frozen=True):
    """The state of an engine in one process; ``waiting_s`` and ``busy_s`` concern the process's prefills there.

    See :class:`~tercet.fleet.policy_views.PrefillLine`.
    """

    in_flight: int
    reachable: bool
    waiting_s: float = 0.0
    busy_s: float = 0.0


class FollowerReport(msgspec.Struct, frozen=True):
    """The report of one process: the newest ``version`` that it has read, and the ``failure`` if it cannot apply it.

    A process that is not ``serving`` yet applies the newest version before it serves. ``requests_left`` counts the
    requests in flight of a process that shuts down. ``attained`` has, by class, how many requests counted for its
    objectives, and how many met them.
    """

    pid: int
    serving: bool = False
    version: int = 0
    failure: str = ""
    engines: dict[str, EngineReport] = {}
    requests_left: int = 0
    attained: dict[str, tuple[int, int]] = {}


class Followers:
    """The processes that follow the state at ``path``, this one included; the caller closes it.

    While ``is_stuck`` returns True for the file system of ``path``, the contents that were read last are used, and
    moves are not announced.
    """

    def __init__(self, path: Path, is_stuck: Callable[[], bool] = lambda: False) -> None:
        self._is_stuck = is_stuck
        self._known: dict[str, list[Any]] = {}
        self._directory = Path(f"{path}.followers")
        self.name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._told: FollowerReport | None = None
        self._alive: int | None = self._enter()

    def _enter(self) -> int:
        """Show that this process lives; return the descriptor that holds the lock."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        # The file gets its name when the lock is held, so others never take this process for a dead one.
        nameless = self._directory / f"{self.name}.new"
        alive = os.open(nameless, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(alive, fcntl.LOCK_EX)
            nameless.rename(self._directory / (self.name + ALIVE))
        except OSError:
            os.close(alive)
            raise
        return alive

    def tell(self, report: FollowerReport) -> None:
        """Write the report of this process for the others; files that were removed are written again.

        Raises ``OSError`` if a file cannot be written.
        """
        if self._alive is None:
            return
        if not (self._directory / (self.name + ALIVE)).exists():
            before, self._alive, self._told = self._alive, self._enter(), None
            os.close(before)
        if report != self._told:
            write_whole(self._directory / (self.name + REPORT), msgspec.json.encode(report))
            self._told = report

    def others(self) -> list[FollowerReport]:
        """Return the reports of the other live processes; a process that has not reported yet is left out."""
        return self._of_others(REPORT, FollowerReport)

    def names_of_others(self) -> list[str]:
        """Return the names of the other live processes."""
        return [] if self._is_stuck() else [name for name in self._living() if name != self.name]

    def is_alone(self) -> bool:
        """Return True if no other process has a file here; a file may be that of a process that has ended."""
        with suppress(OSError):
            return all(name.startswith(self.name) for name in os.listdir(self._directory) if name.endswith(ALIVE))
        return False

    def announce(self, moves: Sequence[CountedMove]) -> None:
        """Write the moves of this process for the others; moves that cannot be written do not count there.

        See :class:`~tercet.decisions.migration.limits.Announcements`.
        """
        if self._is_stuck():
            return
        try:
            write_whole(self._directory / (self.name + MOVES), msgspec.json.encode(moves))
        except OSError as error:
            logger.error("moves: cannot announce moves, so limits hold for each process separately: %s", error)

    def announced(self) -> Sequence[CountedMove]:
        """Return the moves of the other processes; see :class:`tercet.decisions.migration.limits.Announcements`."""
        return [move for moves in self._of_others(MOVES, list[CountedMove]) for move in moves]

    def close(self) -> None:
        """Stop following: remove this process's files."""
        if self._alive is not None:
            os.close(self._alive)
            self._alive = None
            if self._is_stuck():
                return
            with suppress(OSError):  # otherwise others remove them, since the lock is gone
                self._remove(self.name)

    def _of_others(self, suffix: str, kind: type[T]) -> list[T]:
        """Return the contents of the other live processes' files with this suffix."""
        if self._is_stuck():
            return self._known.get(suffix, [])
        files = (self._directory / (name + suffix) for name in self._living() if name != self.name)
        found = (_read(file, kind) for file in files)
        known = self._known[suffix] = [each for each in found if each is not None]
        return known

    def _living(self) -> Iterator[str]:
        for file in sorted(self._directory.glob(f"*{ALIVE}")):
            name = file.name.removesuffix(ALIVE)
            if _is_held(file):
                yield name
            else:
                self._remove(name)

    def _remove(self, name: str) -> None:
        for suffix in (REPORT, MOVES, ALIVE):
            (self._directory / (name + suffix)).unlink(missing_ok=True)


def _is_held(file: Path) -> bool:
    """True if the process that made the file lives."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _read(file: Path, kind: type[T]) -> T | None:
    with suppress(OSError, *UNREADABLE):
        return msgspec.json.decode(read_whole(file), type=kind)
    return None
