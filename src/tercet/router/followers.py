"""The router processes that follow one state: which are alive, what each has applied, and what runs on it.

Each has its files in one directory: one that it locks while it lives, its report, and its moves.
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

from tercet.aio.whole_files import read_whole, write_whole
from tercet.decisions.migration import CountedMove
from tercet.protocol.wire import UNREADABLE

logger = logging.getLogger("tercet.router")
T = TypeVar("T")

ALIVE, REPORT, MOVES = ".alive", ".json", ".moves"


class EngineReport(msgspec.Struct, frozen=True):
    """An engine, as one process sees it: ``waiting_s`` and ``busy_s`` are its prefills there.

    See :class:`~tercet.fleet.observed_roles.PrefillLine`.
    """

    in_flight: int
    reachable: bool
    waiting_s: float = 0.0
    busy_s: float = 0.0


class FollowerReport(msgspec.Struct, frozen=True):
    """What one process says of itself: the ``version`` that it came to, and why it did not apply it, if so.

    One that is not ``serving`` yet will have caught up when it is. ``requests_left`` counts those under way in one that
    shuts down. ``attained`` has, by class, how many requests counted for its objectives, and how many met them.
    """

    pid: int
    serving: bool = False
    version: int = 0
    failure: str = ""
    engines: dict[str, EngineReport] = {}
    requests_left: int = 0
    attained: dict[str, tuple[int, int]] = {}


class Followers:
    """This process among the others that follow the state at ``path``. To be closed.

    While the file system of ``path`` ``is_stuck``, what was read last is what there is, and moves are not told.
    """

    def __init__(self, path: Path, is_stuck: Callable[[], bool] = lambda: False) -> None:
        self._is_stuck = is_stuck
        self._known: dict[str, list[Any]] = {}
        self._directory = Path(f"{path}.followers")
        self.name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._told: FollowerReport | None = None
        self._alive: int | None = self._enter()

    def _enter(self) -> int:
        """Show that this process lives; returns the descriptor that holds the lock."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        # It gets its name when the lock is held: who looks for the dead never takes it for one of them.
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
        """What others read of this process from now on; files that were removed are written again.

        Raises ``OSError`` where that cannot be written.
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
        """Reports of the others that live; one that has not said anything yet has none."""
        return self._of_others(REPORT, FollowerReport)

    def names_of_others(self) -> list[str]:
        """The others that live, by the names that they have here."""
        return [] if self._is_stuck() else [name for name in self._living() if name != self.name]

    def announce(self, moves: Sequence[CountedMove]) -> None:
        """See :class:`~tercet.decisions.migration.limits.Announcements`; others do not count what cannot be written."""
        if self._is_stuck():
            return
        try:
            write_whole(self._directory / (self.name + MOVES), msgspec.json.encode(moves))
        except OSError as error:
            logger.error("moves: the limits of several processes do not hold together: %s", error)

    def announced(self) -> Sequence[CountedMove]:
        """See :class:`tercet.decisions.migration.limits.Announcements`."""
        return [move for moves in self._of_others(MOVES, list[CountedMove]) for move in moves]

    def close(self) -> None:
        """This process follows no more."""
        if self._alive is not None:
            os.close(self._alive)
            self._alive = None
            if self._is_stuck():
                return
            with suppress(OSError):  # without the lock, others take them away
                self._remove(self.name)

    def _of_others(self, suffix: str, kind: type[T]) -> list[T]:
        """What each of the others that live has written into its file of that kind."""
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
    """Whether the process that made the file lives."""
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
