"""Lanes of the page: a bounded sample of requests, with each verb and its times."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from tercet.fleet import RunningSequence, Trace
from tercet.protocol.trace import TraceEvent
from tercet.router.page.records import LaneEnd, LaneSpan, LaneStart

MOST_OPEN = 24
"""Number of requests that are followed at once; other requests are counted, but not drawn."""
MOST_PER_SECOND = 6.0
"""Requests per second that begin to be followed; viewers cannot read a page at a higher rate."""
MOST_MOVING = 8
"""Number of requests that are followed in addition because they move."""
KEPT = 48
"""Number of followed requests that a new viewer gets: the newest ones."""
MOST_SPANS = 64
"""Largest number of spans of one request: a program may call more verbs than fit into a lane."""
LONGEST_WORDS = 200


class Lane:
    """One followed request: ``read`` events of its ``trace`` were taken; ``began`` is by the sequences' clock."""

    def __init__(self, start: LaneStart, trace: Trace, began: float) -> None:
        self.start = start
        self.trace = trace
        self.began = began
        self.read = len(trace.events)
        self.spans = 0


class KeptLane:
    """The records of one request that a new viewer gets."""

    def __init__(self, start: LaneStart) -> None:
        self.start = start
        self.spans: list[LaneSpan] = []
        self.end: LaneEnd | None = None


class Lanes:
    """The followed requests. ``to_time`` converts times of ``clock``, which is that of sequences, to times of frames.

    New records are collected until :meth:`take` returns them and adds them to the records that :meth:`kept` returns.
    """

    def __init__(self, clock: Callable[[], float], to_time: Callable[[float], float]) -> None:
        self._clock = clock
        self._to_time = to_time
        self._open: dict[RunningSequence, Lane] = {}
        self._number = 0
        self._allowance, self._allowed_at = MOST_PER_SECOND, clock()
        self._kept: OrderedDict[int, KeptLane] = OrderedDict()
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
        """Record the end of a request; a request that is not followed is ignored."""
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
        for start in taken[0]:
            self._kept[start.lane] = KeptLane(start)
        for span in taken[1]:
            if span.lane in self._kept:
                self._kept[span.lane].spans.append(span)
        for end in taken[2]:
            if end.lane in self._kept:
                self._kept[end.lane].end = end
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return taken

    def kept(self) -> tuple[list[LaneStart], list[LaneSpan], list[LaneEnd]]:
        """Return the records of the last requests that were taken, for a new viewer."""
        lanes = self._kept.values()
        return (
            [lane.start for lane in lanes],
            [span for lane in lanes for span in lane.spans],
            [lane.end for lane in lanes if lane.end is not None],
        )

    def _read(self, lane: Lane) -> None:
        """Take the new events of a lane's trace."""
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
