"""The faults of a fleet and their times, computed from a seed and the fleet's shape, or read from a file."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec

from tercet.aio.files import read_named
from tercet.protocol import BadRequest
from tercet.settings.declaration import complaint

FaultKind = Literal[
    "kill", "stop", "hang", "cut", "impostor", "full_kv", "drain", "restart", "move", "slow_disk", "clock"
]  # fmt: skip
"""- ``kill``: SIGKILL; a supervisor restarts the engine after the fault's seconds.
- ``stop``: SIGSTOP, and SIGCONT after the fault's seconds.
- ``hang``: SIGSTOP; after the fault's seconds a supervisor kills and restarts the engine.
- ``cut``: all packets between the engine and its router are dropped; connections survive, as with a lost route.
- ``impostor``: the engine is killed, and an engine with another model listens at its address until it restarts.
- ``full_kv``: reservations of another client pin all blocks that the engine lends.
- ``drain``: an operation, not a fault: the router drains the engine, and uses it again after the fault's seconds.
- ``restart``: an operation: SIGTERM; when the engine has ended, it is restarted, with a new incarnation.
- ``move``: an operation: all sequences that the engine generates during the fault's seconds are moved away.
- ``slow_disk``: a process writes and syncs continuously on the disk of the fleet's files.
- ``clock``: the engine's wall clock is wrong by up to an hour during the fault's seconds.
"""
ProcessKind = Literal["engine", "api", "core", "worker", "agent"]
"""The kind of process that a fault affects. ``engine`` is all processes of one engine."""
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
ON_PROCESSES: frozenset[FaultKind] = frozenset({"kill", "stop", "hang"})
CLOCK_STEP_SECONDS = 3600.0


class PlannedFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A fault of one ``engine``, or of its processes of one kind, from second ``at`` on, for ``seconds``.

    ``step`` is the error of a clock, in seconds.
    """

    at: float
    kind: FaultKind
    engine: str
    seconds: float
    process: ProcessKind = "engine"
    step: float = 0.0

    def __str__(self) -> str:
        where = self.engine if self.process == "engine" else f"{self.engine} {self.process}"
        return f"{self.at:9.3f} s  {self.kind:9} {where}, {self.seconds:.3f} s"


class FleetShape(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a fleet that can fail, and the limits of faults.

    A fault lasts from ``shortest`` to ``longest`` seconds, with equal probability on a logarithmic scale. A hang lasts
    ``hang_seconds``; at most a tenth of the engines, but at least one, may hang at the same time. For ``recovery``
    seconds after a fault, its engine gets no other fault. At any time, ``spare`` engines have no fault.
    """

    engines: tuple[str, ...]
    kinds: tuple[FaultKind, ...]
    processes: tuple[ProcessKind, ...]
    shortest: float
    longest: float
    hang_seconds: float
    recovery: float = 0.0
    spare: int = 1


class FaultSchedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All faults of a run of ``seconds``, in order."""

    seed: int
    seconds: float
    faults: tuple[PlannedFault, ...]

    def to_json(self) -> bytes:
        """Return the schedule in the format of :func:`load_schedule`, with one fault per line."""
        lines = ",\n  ".join(msgspec.json.encode(fault).decode() for fault in self.faults)
        return f'{{"seed": {self.seed}, "seconds": {self.seconds}, "faults": [\n  {lines}\n]}}\n'.encode()


def plan_faults(
    seed: int, shape: FleetShape, minutes: float, per_minute: float, kinds: Sequence[FaultKind] | None = None
) -> FaultSchedule:
    """Return faults at random times, ``per_minute`` on average while enough engines are without a fault.

    Equal seeds give equal faults. ``kinds`` are the kinds of faults (None: those of the shape). Raise
    :class:`~tercet.protocol.BadRequest` for a kind that the shape does not have, and for a fleet without spare engines.
    """
    chosen = tuple(kinds) if kinds is not None else shape.kinds
    for kind in chosen:
        if kind not in shape.kinds:
            raise BadRequest(
                f"faults: this fleet does not support {kind}; choose from {', '.join(shape.kinds)}", "faults"
            )
    if len(shape.engines) <= shape.spare:
        raise BadRequest(f"fleet: has {len(shape.engines)} engines, and needs at least {shape.spare + 1}", "fleet")
    if not chosen or not per_minute > 0 or not minutes > 0:
        raise BadRequest("faults: minutes and rate must be positive, with at least one kind", "faults")
    chance, seconds, now = random.Random(f"{seed} faults"), minutes * 60, 0.0
    free_at = dict.fromkeys(shape.engines, 0.0)
    hung: list[float] = []
    faults: list[PlannedFault] = []
    while (now := now + chance.expovariate(per_minute / 60)) < seconds:
        free = [engine for engine, at in free_at.items() if at <= now]
        hung = [until for until in hung if until > now]
        may_hang = len(hung) < max(1, len(shape.engines) // 10)
        kinds_now: list[FaultKind] = [kind for kind in chosen if kind != "hang" or may_hang]
        if len(free) > shape.spare and kinds_now:
            fault = _fault(chance, shape, round(now, 6), chance.choice(kinds_now), chance.choice(free))
            if fault.kind == "hang":
                hung.append(now + fault.seconds)
            free_at[fault.engine] = now + fault.seconds + shape.recovery
            faults.append(fault)
    return FaultSchedule(seed, seconds, tuple(faults))


def _fault(chance: random.Random, shape: FleetShape, at: float, kind: FaultKind, engine: str) -> PlannedFault:
    length = math.exp(chance.uniform(math.log(shape.shortest), math.log(shape.longest)))
    if kind == "hang":
        length = shape.hang_seconds
    process: ProcessKind = chance.choice(shape.processes) if kind in ON_PROCESSES else "engine"
    step = chance.uniform(-CLOCK_STEP_SECONDS, CLOCK_STEP_SECONDS) if kind == "clock" else 0.0
    return PlannedFault(at, kind, engine, round(length, 6), process, round(step, 3))


def load_schedule(path: Path) -> FaultSchedule:
    """Load a schedule from a file. Raise :class:`~tercet.protocol.BadRequest` that explains an error in the file."""
    try:
        data = read_named(path)
    except OSError as error:
        raise BadRequest(f"schedule: {path} cannot be read: {error.strerror}", "schedule") from error
    try:
        return msgspec.json.decode(data, type=FaultSchedule)
    except msgspec.ValidationError as error:
        raise complaint(f"schedule: {path}: $", FaultSchedule, None, error, "schedule") from error
    except msgspec.DecodeError as error:
        raise BadRequest(f"schedule: {path}: {error}", "schedule") from error


def parse_kinds(given: str) -> tuple[FaultKind, ...]:
    """Return the kinds of a text ``KIND[,KIND...]``. Raise :class:`~tercet.protocol.BadRequest` for an unknown one."""
    names = [name.strip().replace("-", "_") for name in given.split(",")]
    found: tuple[FaultKind, ...] = tuple(kind for kind in KINDS if kind in names)
    wrong = [name for name in names if name not in KINDS]
    if wrong:
        raise BadRequest(f"--faults: {wrong[0]!r} is not a kind of fault; choose from {', '.join(KINDS)}", "faults")
    return found
