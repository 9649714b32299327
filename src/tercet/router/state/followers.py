"""The router processes that follow one state: which are alive, the version that each has applied, and its load.

Each process has three files in one directory: one that it locks while it lives, its report, and its moves.
:class:`Followers` reads and writes them; :class:`ProcessReports` makes this process's report and takes all together.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tercet import logs
from tercet.aio.files import read_whole, write_whole
from tercet.decisions.migration import CountedMove
from tercet.fleet.policy_views import PrefillLine, prefill_line
from tercet.protocol import EngineError, TercetError
from tercet.protocol.wire import UNREADABLE
from tercet.router.serve.service import POLL_INTERVAL_S
from tercet.router.serve.shutdown import Shutdown

if TYPE_CHECKING:
    from tercet.router.state.shared_state import SharedState


logger = logging.getLogger("tercet.router")
T = TypeVar("T")

ALIVE, REPORT, MOVES = ".alive", ".json", ".moves"


class EngineReport(msgspec.Struct, frozen=True):
    """The state of an engine in one process, and the process's prefills there."""

    in_flight: int
    reachable: bool
    line: PrefillLine = PrefillLine()


class FollowerReport(msgspec.Struct, frozen=True):
    """The report of one process."""

    pid: int
    # Without it the process applies the newest version before it serves.
    serving: bool = False
    # The newest one that it has read, and why it cannot apply it, if so.
    version: int = 0
    failure: str = ""
    engines: dict[str, EngineReport] = {}
    # Requests in flight of a process that shuts down.
    requests_left: int = 0
    # By class, how many requests counted for its objectives, and how many met them.
    attained: dict[str, tuple[int, int]] = {}


# Three files for each process, in a folder next to the state:
#
#   NAME.alive   held with a lock as long as the process lives; the kernel releases it, also after SIGKILL
#   NAME.json    its report, written as a whole when it changes
#   NAME.moves   the moves that it has under way, which count for the limits of all
#
# Who finds an `.alive` file without a lock removes the three, so a process that was killed leaves nothing behind.
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
        self._written: FollowerReport | None = None
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

    def write(self, report: FollowerReport) -> None:
        """Write the report of this process for the others; files that were removed are written again.

        Raises ``OSError`` if a file cannot be written.
        """
        if self._alive is None:
            return
        # It was removed: without this file others take the process for a dead one, and do not wait for it.
        if not (self._directory / (self.name + ALIVE)).exists():
            before, self._alive, self._written = self._alive, self._enter(), None
            os.close(before)
        if report != self._written:
            write_whole(self._directory / (self.name + REPORT), msgspec.json.encode(report))
            self._written = report

    def others(self) -> list[FollowerReport]:
        """Return the reports of the other live processes; a process that has not reported yet is left out."""
        return self._of_others(REPORT, FollowerReport)

    def names_of_others(self) -> list[str]:
        return [] if self._is_stuck() else [name for name in self._living() if name != self.name]

    def is_alone(self) -> bool:
        """Return True if no other process has a file here; a file may be that of a process that has ended."""
        with suppress(OSError):
            return all(name.startswith(self.name) for name in os.listdir(self._directory) if name.endswith(ALIVE))
        return False

    def announce(self, moves: Sequence[CountedMove]) -> None:
        """Write the moves of this process for the others; moves that cannot be written do not count there.

        See :class:`~tercet.decisions.migration.policies.Announcements`.
        """
        if self._is_stuck():
            return
        try:
            write_whole(self._directory / (self.name + MOVES), msgspec.json.encode(moves))
        except OSError as error:
            logger.error("moves: cannot announce moves, so limits hold for each process separately: %s", error)

    def announced(self) -> Sequence[CountedMove]:
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
        found = (read_record(file, kind) for file in files)
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
    # Shared: two processes that look at the same time must not take each other for the owner.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def read_record(file: Path, kind: type[T]) -> T | None:
    """Return the record in a file; None if it cannot be read."""
    with suppress(OSError, *UNREADABLE):
        return msgspec.json.decode(read_whole(file), type=kind)
    return None


FOLLOW_SECONDS = 30.0


class ProcessReports:
    """The reports of all processes that follow ``shared``, which ``followers`` reads and writes.

    ``serving`` and ``failure`` are part of this process's report; see :class:`~.followers.FollowerReport`.
    """

    def __init__(self, shared: SharedState, followers: Followers, shutdown: Shutdown) -> None:
        self.serving = False
        self.failure = ""
        self._shared = shared
        self._followers = followers
        self._shutdown = shutdown
        shutdown.elsewhere = lambda: sum(report.requests_left for report in followers.others())
        self._unreported = False

    # ---- all processes ---------------------------------------------------------------------------------------

    def engines(self) -> dict[str, EngineReport]:
        """Return each engine's state over all processes; an engine that one of them cannot reach is unreachable."""
        found = self._own_engines()
        for report in self._followers.others():
            for name, other in report.engines.items():
                if name in found:
                    own = found[name]
                    # A process that does not serve yet has not looked at its engines.
                    reachable = own.reachable and (other.reachable or not report.serving)
                    a, b = own.line, other.line
                    line = PrefillLine(a.waiting_s + b.waiting_s, a.busy_s + b.busy_s, a.background + b.background)
                    found[name] = EngineReport(own.in_flight + other.in_flight, reachable, line)
        return found

    def lines(self) -> dict[str, PrefillLine]:
        """Return the prefills of all processes, by engine."""
        return {name: each.line for name, each in self.engines().items()}

    def attainment(self) -> dict[str, tuple[int, int]]:
        """Return, by class, the requests that ended in all processes, and how many of them met its objectives."""
        found = self._shared.service.attainments.counts()
        for report in self._followers.others():
            for name, (ended, met) in report.attained.items():
                if name in found:
                    found[name] = found[name][0] + ended, found[name][1] + met
        return found

    def processes(self) -> int:
        """Return the number of processes that follow the state, this one included."""
        return 1 + len(self._followers.others())

    async def behind(self, version: int) -> Sequence[str]:
        """Wait until all processes have applied a version, for a limited time; return a text for each that has not."""
        deadline = asyncio.get_running_loop().time() + FOLLOW_SECONDS
        while True:
            reports = [self.own(), *await self._shared.filed(self._followers.others)]
            late = [report for report in reports if report.serving and report.version < version]
            if not late or asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(POLL_INTERVAL_S / 4)
        said = [f"process {each.pid} has not applied the change within {FOLLOW_SECONDS:.0f} s" for each in late]
        said += [f"process {each.pid}: {each.failure}" for each in reports if each.failure and each not in late]
        if said:
            logs.STATE_BEHIND.tell(version=version, reason="; ".join(said))
        return said

    # ---- this process ----------------------------------------------------------------------------------------

    def refusal(self) -> TercetError | None:
        """Return the error with which requests are refused now; None if they are served."""
        try:
            self._shutdown.require_serving()
            self._shared.service.fleet.health.require_answers()
        except TercetError as error:
            return error
        return None

    def own(self) -> FollowerReport:
        left = self._shutdown.requests if self._shutdown.has_begun else 0
        attained, version = self._shared.service.attainments.counts(), self._shared.found.version
        return FollowerReport(os.getpid(), self.serving, version, self.failure, self._own_engines(), left, attained)

    def _own_engines(self) -> dict[str, EngineReport]:
        service, fleet = self._shared.service, self._shared.service.fleet
        # Only a role keeper or a planner uses the waiting prefills of engines.
        planned = self._shared.role_keeper is not None or service.seen is not None
        line_of: Callable[[Any], PrefillLine] = partial(prefill_line, fleet) if planned else lambda _: PrefillLine()
        return {each.name: EngineReport(each.in_flight, each.reachable, line_of(each)) for each in fleet.members}

    async def publish(self) -> None:
        """Write this process's report; the first of several failed writes is logged, and each is retried later."""
        try:
            await self._shared.filed(self.write, self.own())
        except EngineError as error:
            self._not_written(error)

    def write(self, report: FollowerReport) -> None:
        """Write a report, as :meth:`publish`. Call it in the file thread."""
        try:
            self._followers.write(report)
        except OSError as error:
            self._not_written(error)
        else:
            self._unreported = False

    def _not_written(self, error: Exception) -> None:
        if not self._unreported:
            logger.error("state: cannot write this process's report for the other processes: %s", error)
        self._unreported = True
