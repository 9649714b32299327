"""The roles of a fleet that router processes share: one of them decides, and all can say what it decided and why."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from functools import partial
from pathlib import Path

import msgspec

from tercet.aio import repeat
from tercet.aio.file_thread import FileThread
from tercet.aio.whole_files import read_whole, write_whole
from tercet.decisions.roles import RoleFlip
from tercet.fleet.observed_roles import PrefillLine
from tercet.protocol import TercetError
from tercet.protocol.wire import UNREADABLE
from tercet.router.fleet_state import FleetState
from tercet.router.roles import INTERVAL_S, FleetRoles
from tercet.router.shared_state import SharedState
from tercet.settings.role_settings import Objectives

logger = logging.getLogger("tercet.router")


class FlipShown(msgspec.Struct, frozen=True):
    """A change of roles at the Unix time ``at``."""

    at: float
    engines: tuple[str, ...]
    role: str
    reason: str


class RoleDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What the deciding process says of its last look, at the Unix time ``at``; ``flips`` are the last ones.

    Pressures are None while they are not known; 1 is the limit.
    """

    pid: int
    at: float
    why: str
    prefill_pressure: float | None = None
    decode_pressure: float | None = None
    demand: dict[str, float] = {}
    flips: tuple[FlipShown, ...] = ()


class RoleKeeper:
    """Decides about roles in this process, while no other process that follows the state at ``path`` does.

    The process that decides holds a lock on a file next to the state; the kernel gives it back when that process dies.
    The next one begins with no history, so what it decides rests on its own looks.
    """

    def __init__(self, shared: SharedState, path: Path, objectives: Objectives) -> None:
        self._shared = shared
        self._said = Path(f"{path}.roles.json")
        self._lock = _FileLock(Path(f"{path}.roles.lock"))
        self._objectives = objectives
        self._files = FileThread()

    async def run(self) -> None:
        """Wait for the turn of this process, then decide, until cancelled."""
        try:
            await self._turn()
            roles = FleetRoles(self._shared.service.fleet, self._objectives, self._flip, self._lines)
            await repeat(partial(self._look, roles), INTERVAL_S)
        finally:
            self._files.close(self._lock.release)

    async def _turn(self) -> None:
        """Return once this process holds the lock."""
        while True:
            try:
                if await self._files.run(self._lock.take):
                    return
            except OSError as error:  # a file system that hangs, among others; it may recover
                logger.error("roles: %s: %s", self._lock.path, error.strerror or "its file system does not answer")
            await asyncio.sleep(INTERVAL_S)

    async def _look(self, roles: FleetRoles) -> None:
        """A change that is refused, and a file that cannot be written, stop no later look."""
        before = roles.engines_changed
        try:
            await roles.look()
            await self._files.run(self._say, roles)
        except (TercetError, OSError) as error:
            logger.error("roles: %s", error)
        found, metrics = roles.last, self._shared.service.metrics
        if found is not None and found.pressures is not None:
            metrics.pressures(*found.pressures)
        if found is not None and found.flip is not None and roles.engines_changed > before:
            metrics.flipped(found.flip.role, roles.engines_changed - before)

    def _lines(self) -> dict[str, PrefillLine]:
        """The prefills of all processes that share the fleet."""
        return {name: PrefillLine(each.waiting_s, each.busy_s) for name, each in self._shared.engines().items()}

    async def decision(self) -> RoleDecision | None:
        """What the process that decides said last; None before the first look."""
        return await self._files.run(read_decision, self._said)

    async def _flip(self, flip: RoleFlip) -> bool:
        """The change that an operator would make, of all engines at once; returns whether it was made."""
        made = False

        def change(state: FleetState) -> FleetState:
            nonlocal made
            after = state.with_flip(flip.engines, flip.role)
            made = after is not state
            return after

        await self._shared.change(change, f"roles: auto: {flip.reason}")
        return made

    def _say(self, roles: FleetRoles) -> None:
        found = roles.last
        if found is None:
            return
        pressures = found.pressures
        said = RoleDecision(
            pid=os.getpid(),
            at=time.time(),
            why=found.why,
            prefill_pressure=None if pressures is None else pressures.prefill,
            decode_pressure=None if pressures is None else pressures.decode,
            demand=msgspec.to_builtins(found.demand) if found.demand is not None else {},
            flips=tuple(
                FlipShown(each.time, each.flip.engines, each.flip.role, each.flip.reason) for each in roles.flips
            ),
        )
        write_whole(self._said, msgspec.json.encode(said))


class _FileLock:
    """The lock on a file. Its methods are called by one thread, also for callers that have stopped waiting."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: int | None = None

    def take(self) -> bool:
        """Whether this process holds it from now on, or did so before; False while another process has it."""
        if self._held is None:
            found = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException as error:
                os.close(found)
                if isinstance(error, BlockingIOError):
                    return False
                raise
            self._held = found
        return True

    def release(self) -> None:
        """Give it back, if it was taken."""
        if self._held is not None:
            os.close(self._held)
            self._held = None


def read_decision(path: Path) -> RoleDecision | None:
    """The decision in a file; None without one that can be read."""
    try:
        return msgspec.json.decode(read_whole(path), type=RoleDecision)
    except (OSError, *UNREADABLE):
        return None
