"""A run of faults without I/O: its schedule, planned from a seed, and its results: violated invariants and tables."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from tercet.aio.files import read_named
from tercet.protocol import BadRequest
from tercet.settings.declaration import complaint
from tercet_checks.chaos.adversary import TRICKS, PlayedTrick

if TYPE_CHECKING:  # a router's modules take a second
    from tercet.router.serve.moves import MoveRecord

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
    if wrong := [name for name in names if name not in KINDS]:
        raise BadRequest(f"--faults: {wrong[0]!r} is not a kind of fault; choose from {', '.join(KINDS)}", "faults")
    return tuple(kind for kind in KINDS if kind in names)


Piece = int | str
"""A part of an answer: a token, or the text of one event if clients do not receive tokens."""
Outcome = Literal["answered", "failed", "left", "pending"]


class ClientRecord(msgspec.Struct, kw_only=True):
    """The record of one request by its client. Times are in seconds from the run's begin.

    ``question`` identifies the right answer. ``received`` has the time and the content of each event. ``outcome`` is
    ``left`` if the client left before the end, and ``pending`` if the request has not ended. ``error`` is a code.
    """

    name: str
    question: int
    began: float
    program: str = ""
    received: list[tuple[float, tuple[Piece, ...]]] = []
    outcome: Outcome = "pending"
    ended: float | None = None
    error: str = ""
    message: str = ""

    @property
    def answer(self) -> tuple[Piece, ...]:
        """Content of all events, in order; text is joined to one piece."""
        pieces = tuple(piece for _, part in self.received for piece in part)
        return ("".join(map(str, pieces)),) if pieces and isinstance(pieces[0], str) else pieces

    @property
    def longest_gap(self) -> float:
        """Longest time, in seconds, between two events, or between the last event and the end."""
        times = [time for time, _ in self.received] + ([] if self.ended is None else [self.ended])
        return max((later - sooner for sooner, later in pairwise(times)), default=0.0)

    @property
    def ttft(self) -> float | None:
        """Seconds from the begin to the first event; None without an event."""
        return self.received[0][0] - self.began if self.received else None


class Leftover(msgspec.Struct, frozen=True):
    """``count`` resources of one kind (blocks, leases, processes, ...) that ``holder`` did not release."""

    holder: str
    what: str
    count: float


class Violation(msgspec.Struct, frozen=True):
    """The violation of an invariant: its ``rule``, the affected client or holder, and the details."""

    rule: str
    subject: str
    detail: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.subject}: {self.detail}"


def violations_of(
    records: Sequence[ClientRecord], calm: Mapping[int, tuple[Piece, ...]], left: Sequence[Leftover], patience: float
) -> list[Violation]:
    """Return all violations of a run.

    ``calm`` has the answers to all questions without faults. ``patience`` is the longest time, in seconds, that a
    client may wait for an event.
    """
    leftovers = (Violation("nothing is left behind", each.holder, f"{each.what}: {each.count:g}") for each in left)
    return [*unanswered(records), *stalled(records, patience), *wrong_answers(records, calm), *leftovers]


def unanswered(records: Sequence[ClientRecord]) -> Iterator[Violation]:
    """Yield the requests that failed or have not ended. At any time, at least one engine can answer."""
    for record in records:
        had = f"{len(record.received)} events" if record.received else "no event"
        if record.outcome == "pending":
            since = record.received[-1][0] if record.received else record.began
            detail = f"({record.program}) began at {record.began:.3f} s, received {had}, and waits since {since:.3f} s"
            yield Violation("every request ends", record.name, detail)
        elif record.outcome == "failed":
            detail = (
                f"({record.program}) received {had}, and failed at {record.ended or 0.0:.3f} s with {record.error}: "
                f"{record.message}"
            )
            yield Violation("every request is answered", record.name, detail)


def stalled(records: Sequence[ClientRecord], patience: float) -> Iterator[Violation]:
    """Yield the clients that waited longer than ``patience`` seconds for the first token, the next one or the end."""
    for record in records:
        wait = max(record.longest_gap, record.ttft if record.ttft is not None else (record.ended or 0.0) - record.began)
        if record.outcome != "pending" and wait > patience:
            detail = f"({record.program}) {record.outcome}, after {wait:.3f} s without an event"
            yield Violation(f"no client waits longer than {patience:g} s", record.name, detail)


def wrong_answers(records: Sequence[ClientRecord], calm: Mapping[int, tuple[Piece, ...]]) -> Iterator[Violation]:
    """Yield the answers that differ from those without faults. An incomplete answer may end early."""
    for record in records:
        if why := difference(record.answer, calm[record.question], record.outcome == "answered"):
            yield Violation("answers equal those without faults", record.name, f"({record.program}) {why}")


def difference(found: tuple[Piece, ...], expected: tuple[Piece, ...], whole: bool) -> str | None:
    """Return the difference between an answer and the expected one, or None. Not ``whole``: compare its begin only."""
    if found and isinstance(found[0], str):
        return _difference("".join(map(str, found)), "".join(map(str, expected)), whole, "character")
    return _difference(found, expected, whole, "token")


def _difference(found: Sequence[Piece], expected: Sequence[Piece], whole: bool, unit: str) -> str | None:
    if found == expected or (not whole and found == expected[: len(found)]):
        return None
    at = next((i for i, (one, other) in enumerate(zip(found, expected, strict=False)) if one != other), None)
    if at is None:
        few = "too few" if len(found) < len(expected) else "too many"
        return f"{few}: {len(found)} {unit}s instead of {len(expected)}"
    rest = found[at:]
    from_there = next((k for k in range(len(expected)) if expected[k : k + len(rest)] == rest), None)
    if from_there is not None:
        if from_there < at:
            return f"{unit} {from_there} is repeated at {at}"
        return f"{from_there - at} {unit}s are missing at {at}"
    return f"{unit} {at} is {found[at]!r} instead of {expected[at]!r}"


HEADINGS = ["fault", "process", "planned", "injected", "skipped", "requests hit", "of these failed", "longest gap"]
MOVE_HEADINGS = ["moves", "outcome", "number", "KV sent, MB", "recomputed", "pause, median", "longest"]
TRICK_HEADINGS = ["a hostile client's", "played", "answered with", "longest"]
MOST_SHOWN = 20
ORPHANS = "orphan generations"


class InjectedFault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault and its result.

    ``began`` and ``ended`` are seconds of the run, or None if the fault was not injected; ``why`` is the reason for
    that, or an error. ``hit`` are the requests that the engine generated when the fault began.
    """

    planned: PlannedFault
    began: float | None = None
    ended: float | None = None
    why: str = ""
    hit: tuple[str, ...] = ()


class ChaosResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run of an arena.

    ``calm`` has the answers without faults, by question. ``patience`` is the longest time, in seconds, that a client
    may wait for an event. ``complaints`` are the unhandled failures that the arena found. ``moves`` are the router's,
    ``tricks`` those of the hostile client; ``retries`` counts further attempts of sequences. ``memory`` is the largest
    growth of the router, in bytes; in a simulated fleet, it is the size of the clients' bodies only.
    """

    seed: int
    seconds: float
    wall_seconds: float
    faults: Sequence[InjectedFault]
    records: Sequence[ClientRecord]
    calm: Mapping[int, tuple[Piece, ...]]
    left: Sequence[Leftover]
    patience: float
    complaints: Sequence[str] = ()
    moves: Sequence[MoveRecord] = ()
    tricks: Sequence[PlayedTrick] = ()
    retries: int = 0
    memory: int = 0

    @property
    def orphans(self) -> int:
        """Number of sequences that engines still ran at the end, although the router did not have them."""
        return round(sum(each.count for each in self.left if each.what == ORPHANS))

    @property
    def violations(self) -> list[Violation]:
        found = violations_of(self.records, self.calm, self.left, self.patience)
        for trick in self.tricks:
            if trick.wrong:
                subject = f"trick {trick.planned.number} ({trick.planned.kind})"
                detail = f"at {trick.began:.3f} s: {trick.wrong}"
                found.append(Violation("a hostile client is cut off", subject, detail))
        # Without faults, only a request can have made an engine fail, and none may.
        if self.retries and not self.faults:
            detail = f"{self.retries} further attempts"
            found.append(Violation("no engine is blamed for what clients send", "the run", detail))
        return found + [Violation("no failure goes unhandled", "the run", text) for text in self.complaints]


def fault_rows(result: ChaosResult) -> list[list[str]]:
    """Return one row for each kind of fault and process, with counts and the results of the affected requests."""
    groups: defaultdict[tuple[str, str], list[InjectedFault]] = defaultdict(list)
    for fault in result.faults:
        groups[fault.planned.kind, fault.planned.process].append(fault)
    by_name = {record.name: record for record in result.records}
    rows: list[list[str]] = []
    for (kind, process), faults in sorted(groups.items(), key=lambda item: (KINDS.index(item[0][0]), item[0][1])):  # type: ignore[arg-type]
        injected = [fault for fault in faults if fault.began is not None]
        hit = {name for fault in injected for name in fault.hit if name in by_name}
        failed = sum(by_name[name].outcome in ("failed", "pending") for name in hit)
        gap = max((by_name[name].longest_gap for name in hit), default=0.0)
        counts = [len(faults), len(injected), len(faults) - len(injected), len(hit), failed]
        rows.append([kind, process, *map(str, counts), f"{gap:.2f} s"])
    return rows


def move_rows(result: ChaosResult) -> list[list[str]]:
    """Return one row for each reason and outcome of moves: their number, KV, recomputed tokens, and clients' pauses."""
    groups: defaultdict[tuple[str, str], list[MoveRecord]] = defaultdict(list)
    for move in result.moves:
        groups[move.reason, move.outcome].append(move)
    rows: list[list[str]] = []
    for (reason, outcome), moves in sorted(groups.items()):
        pauses = [move.pause for move in moves if move.pause is not None]
        waited = [f"{pause * 1000:.0f} ms" for pause in (statistics.median(pauses), max(pauses))] if pauses else []
        sent, recomputed = sum(move.bytes for move in moves) / 1e6, sum(move.recomputed for move in moves)
        rows.append([reason, outcome, str(len(moves)), f"{sent:.0f}", str(recomputed), *(waited or ["-", "-"])])
    return rows


def trick_rows(result: ChaosResult) -> list[list[str]]:
    """Return one row for each kind of trick: their number, the statuses of answers, and the longest duration."""
    rows: list[list[str]] = []
    for kind in TRICKS:
        played = [trick for trick in result.tricks if trick.planned.kind == kind]
        counts = Counter(status for trick in played for status in trick.statuses)
        said = ", ".join(f"{count} {status or 'closed'}" for status, count in sorted(counts.items()))
        if played:
            longest = max(trick.ended - trick.began for trick in played)
            rows.append([kind, str(len(played)), said or "-", f"{longest:.2f} s"])
    return rows


def figures(result: ChaosResult) -> list[str]:
    """Return the lines below the tables."""
    outcomes = Counter(record.outcome for record in result.records)
    errors = Counter(record.error for record in result.records if record.outcome == "failed")
    gaps = max(((record.longest_gap, record.name) for record in result.records), default=(0.0, "none"))
    ttfts = max(((record.ttft or 0.0, record.name) for record in result.records), default=(0.0, "none"))
    injected = sum(fault.began is not None for fault in result.faults)
    tokens = sum(len(part) for record in result.records for _, part in record.received)
    per_minute = injected / result.seconds * 60 if result.seconds else 0.0
    codes = ", ".join(f"{count} {code}" for code, count in errors.most_common())
    failed = f" ({codes})" if codes else ""
    return [
        f"{result.seconds:.0f} s of load in {result.wall_seconds:.0f} s; {injected} faults ({per_minute:.0f} a minute)",
        f"{len(result.records)} requests, {tokens} pieces: {outcomes['answered']} answered, {outcomes['left']} left by "
        f"their clients, {outcomes['failed']} failed{failed}, {outcomes['pending']} without an end",
        f"longest gap in a stream {gaps[0]:.2f} s ({gaps[1]})",
        f"longest wait for a first token {ttfts[0]:.2f} s ({ttfts[1]})",
        f"{sum(move.outcome == 'moved' for move in result.moves)} of {len(result.moves)} moves succeeded, "
        f"{result.orphans} {ORPHANS}, {result.retries} retries of sequences",
        f"the router's memory grew by at most {result.memory / 2**20:.0f} MiB",
    ]


def violation_lines(violations: Sequence[Violation], seed: int, replay: str) -> list[str]:
    """Return the violations by rule, the first ones of each rule in full, and the command that repeats the run."""
    if not violations:
        return ["no violations"]
    lines = [f"{len(violations)} violations with seed {seed}; again: {replay}"]
    for rule, count in Counter(violation.rule for violation in violations).most_common():
        of_rule = [violation for violation in violations if violation.rule == rule]
        lines.append(f"  {rule}: {count}")
        lines += [f"    {each.subject}: {each.detail}" for each in of_rule[:MOST_SHOWN]]
        if count > MOST_SHOWN:
            lines.append(f"    and {count - MOST_SHOWN} more")
    return lines
