"""The records that the page draws, and how engines, programs and requests become records.

A :class:`Frame` has the changes since the previous frame; a ``whole`` frame has all data. Times are in seconds: Unix
times of a router, virtual times of a simulation. Lanes are a bounded sample of requests, with each verb and its times.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tercet.fleet import EngineFleet, Member, RunningSequence, Trace
from tercet.protocol.spans import TraceEvent

# States of an engine, as bits of a number.
DEAD, DRAINING, STOPPING, REFUSED, SILENT = 1, 2, 4, 8, 16


class Seat(NamedTuple):
    """An engine's place in the fleet map."""

    name: str
    role: str


class Unseen(msgspec.Struct, frozen=True):
    """Engines of one role that are not drawn: their number, the mean KV usage (thousandths), and sums."""

    role: str
    engines: int
    kv: int
    running: int
    waiting: int
    dead: int


class ProgramPoint(NamedTuple):
    """Counts of a program since the previous point: requests done and unfinished, tokens, medians, 90th percentiles.

    Times are milliseconds, None without a request.
    """

    done: int
    unfinished: int
    tokens: int
    ttft_p50: float | None
    ttft_p90: float | None
    tpot_p50: float | None
    tpot_p90: float | None


class FleetPoint(msgspec.Struct, frozen=True):
    """One point of the charts, ``seconds`` after the previous one; ``running`` and ``waiting`` are engines' sums.

    ``failed`` are requests that the router could not serve, ``refused`` those that it did not admit.
    """

    t: float
    seconds: float
    running: int
    waiting: int
    programs: dict[str, ProgramPoint]
    failed: int = 0
    refused: int = 0


class EngineTTFT(NamedTuple):
    """An engine, the number of requests that spent most of their TTFT there, and the sum of TTFTs in seconds."""

    engine: str
    requests: int
    seconds: float


class LaneStart(NamedTuple):
    """The start of a request that is drawn; ``lane`` is its number on the page, ``seq_id`` is empty for clients."""

    lane: int
    t: float
    program: str
    prompt: int
    seq_id: str


class LaneSpan(NamedTuple):
    """A verb, a move, a retry or a fallback of a drawn request, from ``begin`` to ``end``, with the trace's counts."""

    lane: int
    verb: str
    engine: str
    begin: float
    end: float
    to: str
    tokens: int
    cached: int
    bytes: int
    chunks: int
    said: str


class LaneEnd(NamedTuple):
    """The end of a drawn request; ``done`` is true if its client got the whole answer. Latencies are in ms."""

    lane: int
    t: float
    done: bool
    tokens: int
    ttft: float | None
    tpot: float | None


class MoveShown(msgspec.Struct, frozen=True, omit_defaults=True):
    """A move of a running sequence; a later record with the same number replaces it. Times are in seconds."""

    number: int
    t: float
    source: str
    to: str
    reason: str
    outcome: str
    tokens: int
    seconds: float = 0.0
    bytes: int = 0
    stages: int = 0
    pause: float | None = None
    seq_id: str = ""
    error: str = ""


class ShareShown(msgspec.Struct, frozen=True):
    """One program of a split."""

    name: str
    program: str
    weight: float


class About(msgspec.Struct, frozen=True, omit_defaults=True):
    """The service that is shown. Objectives are in milliseconds; ``returned`` is why programs were rolled back.

    ``since`` is when its process began, 0 if unknown.
    """

    model: str
    version: int
    shares: tuple[ShareShown, ...]
    rules: int = 0
    sticky: str = ""
    roles: str = "fixed"
    why: str = ""
    returned: str = ""
    ttft_objective: float | None = None
    tpot_objective: float | None = None
    process: int = 0
    workers: int = 1
    since: float = 0.0


class Frame(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The changes until ``t``. ``engines`` is the whole list if it changed; then ``loads`` has all rows.

    A row of ``loads`` has an engine's place in the last list, its KV usage (thousandths), its running and waiting
    requests, the time of its last steps (microseconds), the sequences of this router there, the mean time to first
    token (milliseconds) of requests that spent most of it there, and its state: a sum of :data:`DEAD` and the other
    states. A time of 0 means unknown. ``ttfts`` are for other workers only.
    """

    t: float
    whole: bool = False
    about: About | None = None
    engines: Sequence[Seat] | None = None
    loads: Sequence[Sequence[int]] = ()
    unseen: Sequence[Unseen] = ()
    points: Sequence[FleetPoint] = ()
    lanes: Sequence[LaneStart] = ()
    spans: Sequence[LaneSpan] = ()
    ends: Sequence[LaneEnd] = ()
    moves: Sequence[MoveShown] = ()
    ttfts: Sequence[EngineTTFT] = ()


def for_clients(frame: Frame) -> Frame:
    """Return the frame without ids of requests and texts of errors, which belong to other clients."""
    return msgspec.structs.replace(
        frame,
        lanes=[start._replace(seq_id="") for start in frame.lanes],
        spans=[span._replace(said="") for span in frame.spans],
        moves=[msgspec.structs.replace(move, seq_id="", error="") for move in frame.moves],
    )


def encoded(frames: Iterable[Frame]) -> bytes:
    """Return frames as server-sent events."""
    return b"".join(b"data: " + msgspec.json.encode(frame) + b"\n\n" for frame in frames)


# Number of programs with a separate line; clients may name any built-in program.
MOST_PROGRAMS = 12
OTHER = "other"
# Largest number of times of one program between two frames that percentiles use: the first ones.
MOST_TIMES = 512


class ProgramCount:
    """Counts of one program since the last frame."""

    def __init__(self) -> None:
        self.done = self.unfinished = self.tokens = 0
        self.ttfts: list[float] = []
        self.tpots: list[float] = []

    def point(self) -> ProgramPoint:
        ttft, tpot = sorted(self.ttfts), sorted(self.tpots)
        return ProgramPoint(
            self.done, self.unfinished, self.tokens, percentile(ttft, 0.5), percentile(ttft, 0.9),
            percentile(tpot, 0.5), percentile(tpot, 0.9),
        )  # fmt: skip


class ProgramCounts:
    """Counts by program; ``running`` are the sequences at the start, whose earlier tokens are not counted."""

    def __init__(self, running: Iterable[RunningSequence]) -> None:
        self._tokens = {sequence: len(sequence.tokens) for sequence in running}
        self._counts: dict[str, ProgramCount] = {}
        self._names: set[str] = set()

    def ends(self, sequence: RunningSequence, trace: Trace) -> None:
        count = self._of(trace.program)
        count.tokens += len(sequence.tokens) - self._tokens.pop(sequence, 0)
        if not sequence.ended:
            count.unfinished += 1
            return
        count.done += 1
        for times, value in ((count.ttfts, trace.ttft), (count.tpots, trace.tpot)):
            if value is not None and len(times) < MOST_TIMES:
                times.append(value)

    def take(self, running: Iterable[RunningSequence]) -> dict[str, ProgramPoint]:
        """Count the new tokens of the ``running`` sequences; return all counts since the last call."""
        before, grown = self._tokens, dict[str, int]()
        for sequence in running:  # there may be thousands
            tokens, name = len(sequence.tokens), sequence.program
            grown[name] = grown.get(name, 0) + tokens - before.get(sequence, 0)
            before[sequence] = tokens
        for name, tokens in grown.items():
            self._of(name).tokens += tokens
        counts, self._counts = self._counts, {}
        return {name: counts[name].point() for name in sorted(counts)}

    def _of(self, name: str) -> ProgramCount:
        # Names may come from an operator's plans for weeks: those after the first ones are one line.
        if len(self._names) < MOST_PROGRAMS:
            self._names.add(name)
        name = name if name in self._names else OTHER
        found = self._counts.get(name)
        if found is None:
            found = self._counts[name] = ProgramCount()
        return found


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Return a percentile (nearest rank) of ascending seconds, in milliseconds; None without values."""
    return in_ms(ordered[min(len(ordered) - 1, int(share * len(ordered)))]) if ordered else None


# Number of requests that are followed at once; other requests are counted, but not drawn.
MOST_OPEN = 24
# Requests per second that begin to be followed; viewers cannot read a page at a higher rate.
MOST_PER_SECOND = 6.0
# Number of requests that are followed in addition because they move.
MOST_MOVING = 8
# Numbers of followed requests, of moves and of points of the charts that a new viewer gets: the newest ones.
LANES_KEPT, MOVES_KEPT, POINTS_KEPT = 48, 60, 600
# Largest number of spans of one request: a program may call more verbs than fit into a lane.
MOST_SPANS = 64
LONGEST_WORDS = 200


class Lane:
    """One followed request: ``read`` events of its ``trace`` were taken; ``began`` is by the sequences' clock."""

    def __init__(self, start: LaneStart, trace: Trace, began: float) -> None:
        self.start = start
        self.trace = trace
        self.began = began
        self.read = len(trace.events)
        self.spans = 0


class KeptRecords:
    """What a new viewer gets of earlier frames: points of the charts, moves, and the newest followed requests."""

    def __init__(self) -> None:
        self.points = deque[FleetPoint](maxlen=POINTS_KEPT)
        self.moves = OrderedDict[int, MoveShown]()
        self._lanes = OrderedDict[int, tuple[LaneStart, list[LaneSpan], list[LaneEnd]]]()

    def add(self, frame: Frame) -> None:
        """Add the new records of a frame; those of a request that is not kept any more are dropped."""
        self.points.extend(frame.points)
        self.moves.update((move.number, move) for move in frame.moves)
        self._lanes.update((start.lane, (start, [], [])) for start in frame.lanes)
        for span in frame.spans:
            if span.lane in self._lanes:
                self._lanes[span.lane][1].append(span)
        for end in frame.ends:
            if end.lane in self._lanes:
                self._lanes[end.lane][2].append(end)
        for kept, most in ((self.moves, MOVES_KEPT), (self._lanes, LANES_KEPT)):
            while len(kept) > most:
                kept.popitem(last=False)

    def with_whole(self, frame: Frame) -> Frame:
        """Return a whole frame with the kept points of the charts, and the other kept records after its own."""
        lanes = self._lanes.values()
        return msgspec.structs.replace(
            frame, points=[*self.points], lanes=[*frame.lanes, *(start for start, _, _ in lanes)],
            spans=[*frame.spans, *(span for _, spans, _ in lanes for span in spans)],
            ends=[*frame.ends, *(end for _, _, ends in lanes for end in ends)],
            moves=[*frame.moves, *self.moves.values()],
        )  # fmt: skip


class Lanes:
    """The followed requests. ``to_time`` converts times of ``clock``, which is that of sequences, to times of frames.

    New records are collected until :meth:`take` returns them.
    """

    def __init__(self, clock: Callable[[], float], to_time: Callable[[float], float]) -> None:
        self._clock = clock
        self._to_time = to_time
        self._open: dict[RunningSequence, Lane] = {}
        self._number = 0
        self._allowance, self._allowed_at = MOST_PER_SECOND, clock()
        self._started: list[LaneStart] = []
        self._spans: list[LaneSpan] = []
        self._ended: list[LaneEnd] = []

    def begins(self, sequence: RunningSequence, trace: Trace) -> None:
        """Follow a request if the limits allow one more."""
        if len(self._open) >= MOST_OPEN or not self._is_allowed() or trace.events:
            return
        self._follow(sequence, trace, sequence.began)

    def moves(self, sequence: RunningSequence) -> None:
        """Follow a request that begins to move, unless it is followed; from its start if this is its first move."""
        generation = sequence.generation
        if generation is None or sequence in self._open or len(self._open) >= MOST_OPEN + MOST_MOVING:
            return
        if not self._is_allowed():
            return
        trace, ttft = generation.engine.view.trace, sequence.ttft
        is_first = ttft is not None and not sequence.moves and not sequence.attempt
        started = next((event for event in trace.events if event.verb == "start_generate"), None)
        lane = self._follow(sequence, trace, sequence.began if is_first else self._clock())
        if is_first and started is not None and ttft is not None:
            self._note(lane, started)

    def _follow(self, sequence: RunningSequence, trace: Trace, since: float) -> Lane:
        self._number += 1
        request = sequence.request
        name = request.seq_id[:LONGEST_WORDS]
        start = LaneStart(self._number, self._at(since), sequence.program, request.num_tokens, name)
        lane = self._open[sequence] = Lane(start, trace, sequence.began)
        self._started.append(start)
        return lane

    def ends(self, sequence: RunningSequence, ttft: float | None, tpot: float | None) -> None:
        lane = self._open.pop(sequence, None)
        if lane is not None:
            self._read(lane)
            now, tokens = self._at(self._clock()), len(sequence.tokens)
            self._ended.append(LaneEnd(lane.start.lane, now, sequence.ended, tokens, in_ms(ttft), in_ms(tpot)))

    def take(self) -> tuple[list[LaneStart], list[LaneSpan], list[LaneEnd]]:
        """Return the records since the last call: starts, spans and ends."""
        for lane in self._open.values():
            self._read(lane)
        taken = self._started, self._spans, self._ended
        self._started, self._spans, self._ended = [], [], []
        return taken

    def _read(self, lane: Lane) -> None:
        events = lane.trace.events
        for event in events[lane.read :]:
            self._note(lane, event)
        lane.read = len(events)

    def _note(self, lane: Lane, event: TraceEvent) -> None:
        if lane.spans >= MOST_SPANS:
            return
        began = lane.began + event.at
        said = " ".join(word for word in (event.reason, event.outcome, event.code) if word)[:LONGEST_WORDS]
        span = LaneSpan(
            lane.start.lane, event.verb, event.engine, self._at(began), self._at(began + event.seconds), event.to,
            event.end - event.begin, event.cached, event.bytes, event.chunks, said,
        )  # fmt: skip
        lane.spans += 1
        self._spans.append(span)

    def _at(self, clock: float) -> float:
        return round(self._to_time(clock), 6)

    def _is_allowed(self) -> bool:
        """Take one token of a bucket of :data:`MOST_PER_SECOND` tokens, filled at this rate; True if there was one."""
        now = self._clock()
        grown = self._allowance + (now - self._allowed_at) * MOST_PER_SECOND
        self._allowance, self._allowed_at = min(MOST_PER_SECOND, grown), now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True


def in_ms(seconds: float | None) -> float | None:
    """Convert seconds to milliseconds, rounded to a hundredth; None stays None."""
    return None if seconds is None else round(seconds * 1e3, 2)


# Number of engines that are drawn one by one; the page shows the engines after them as sums by role.
MOST_ENGINES = 2000
# Time constant (seconds) of an engine's mean TTFT; after four of them without a request the mean is dropped.
TTFT_SECONDS = 30.0
FORGOTTEN_AFTER = 4 * TTFT_SECONDS
Rows = NDArray[np.int64]
KV, RUNNING, WAITING, STEP = range(4)
_SCALES = np.array([1000.0, 1.0, 1.0, 1e6])


# Returns a row per member: KV usage (0 to 1), running, waiting, step time (seconds); NaN without a report.
LoadTable = Callable[[Sequence[Member]], NDArray[np.float64]]


def reported_loads(fleet: EngineFleet) -> LoadTable:
    """Return the table of the reports that a router has received from its engines."""

    def table(members: Sequence[Member]) -> NDArray[np.float64]:
        loads, rows = fleet.knowledge.loads, fleet.knowledge.rows([member.name for member in members])
        return np.stack([loads.column(name, rows) for name in ("kv_usage", "running", "waiting", "step_time")], axis=1)

    return table


class FirstTokenTimes:
    """The mean TTFT by engine, of requests that spent most of it there; recent requests count more."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._found: dict[str, tuple[float, float, float]] = {}
        self._own: dict[str, EngineTTFT] = {}

    def add(self, engine: str, ttft: float) -> None:
        _, requests, seconds = self._own.get(engine, (engine, 0, 0.0))
        self._own[engine] = EngineTTFT(engine, requests + 1, seconds + ttft)
        self._count(engine, 1, ttft)

    def add_of_others(self, seen: EngineTTFT) -> None:
        self._count(*seen)

    def take(self) -> list[EngineTTFT]:
        """Return the TTFTs of this process that were added since the last call."""
        own, self._own = self._own, {}
        return [*own.values()]

    def _count(self, engine: str, requests: int, seconds: float) -> None:
        now = self._clock()
        total, count, at = self._found.get(engine, (0.0, 0.0, now))
        kept = math.exp((at - now) / TTFT_SECONDS)
        self._found[engine] = (total * kept + seconds, count * kept + requests, now)

    def in_ms(self, members: Sequence[Member]) -> list[int]:
        """Return the means in milliseconds, in the order of ``members``; 0 without a request, otherwise at least 1."""
        now = self._clock()
        for name in [name for name, (_, _, at) in self._found.items() if now - at > FORGOTTEN_AFTER]:
            del self._found[name]
        means = {name: int(total / count * 1e3) or 1 for name, (total, count, _) in self._found.items()}
        return [means.get(member.name, 0) for member in members]


class EngineRows:
    """The rows of all engines that are drawn, of the last frame."""

    def __init__(self, fleet: EngineFleet, loads: LoadTable, ttfts: FirstTokenTimes) -> None:
        self._fleet = fleet
        self._loads = loads
        self._ttfts = ttfts
        self.seats: list[Seat] = []
        self._rows: Rows = np.empty((0, 7), dtype=np.int64)
        self.unseen: list[Unseen] = []
        self.running = self.waiting = 0

    def look(self) -> tuple[list[Seat] | None, list[list[int]]]:
        """Return the engines if the list has changed, otherwise None, and the rows that have changed."""
        members = list(self._fleet.members)
        table = self._loads(members)
        rows = np.zeros((len(members), 7), dtype=np.int64)
        if members:
            rows[:, :4] = np.rint(np.nan_to_num(table) * _SCALES)
            rows[:, 4] = [member.in_flight for member in members]
            rows[:, 5] = self._ttfts.in_ms(members)
            rows[:, 6] = [
                0 if each.reachable and not (each.draining or each.stopping or each.refused) else _state(each)
                for each in members
            ]  # a short cut, since most engines are well and there may be thousands
            rows[:, 6] += np.isnan(table[:, KV]) * SILENT
        self.running, self.waiting = int(rows[:, RUNNING].sum()), int(rows[:, WAITING].sum())
        self.unseen = _unseen(members[MOST_ENGINES:], rows[MOST_ENGINES:])
        rows, members = rows[:MOST_ENGINES], members[:MOST_ENGINES]
        seated = [(member.name, member.role) for member in members]
        if seated != self.seats:  # a Seat equals a plain tuple, which is made faster
            self.seats, self._rows = [Seat(*each) for each in seated], rows
            return self.seats, self.all()
        changed = np.nonzero((rows != self._rows).any(axis=1))[0]
        self._rows = rows
        return None, _listed(changed, rows[changed])

    def all(self) -> list[list[int]]:
        return _listed(np.arange(len(self._rows)), self._rows)


def _state(member: Member) -> int:
    return (
        (not member.reachable) * DEAD + member.draining * DRAINING + member.stopping * STOPPING
        + bool(member.refused) * REFUSED
    )  # fmt: skip


def _listed(indexes: NDArray[np.int64], rows: Rows) -> list[list[int]]:
    return np.column_stack((indexes, rows)).tolist()


def _unseen(members: Sequence[Member], rows: Rows) -> list[Unseen]:
    found: list[Unseen] = []
    roles = np.array([member.role for member in members])
    for role in sorted(set(roles.tolist())):
        of_role = rows[roles == role]
        dead = int((of_role[:, 6] & DEAD != 0).sum())
        running, waiting = int(of_role[:, RUNNING].sum()), int(of_role[:, WAITING].sum())
        found.append(Unseen(role, len(of_role), int(of_role[:, KV].mean()), running, waiting, dead))
    return found
