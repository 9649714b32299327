"""The live page: a watch makes frames of a service, joins those of other workers, and one producer serves all viewers.

Also the last fifteen minutes of a router: a point every five seconds, kept also while no page is open. These points end
at whole multiples of five seconds, so that those of several workers belong together.

A watch exists only while a page is open, so it costs nothing otherwise. Each worker sends its frames to the other
workers that show a page, over the sockets that also serve traces. Lanes and moves get numbers that no other worker
uses. Of the engines' data only TTFT is joined, since each worker has the engines' reports itself.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from tercet.aio.tasks import TaskSet
from tercet.fleet import RunningSequence, Trace
from tercet.protocol import NoSpace, ShuttingDown, UnknownSequence
from tercet.protocol.wire import UNREADABLE
from tercet.router.observe.metrics import Metrics
from tercet.router.observe.request_traces import SharedTraces
from tercet.router.page.records import (
    LONGEST_WORDS,
    MOVES_KEPT,
    RUNNING,
    WAITING,
    About,
    EngineRows,
    EngineTTFT,
    FirstTokenTimes,
    FleetPoint,
    Frame,
    KeptRecords,
    Lanes,
    LoadTable,
    MoveShown,
    ProgramCounts,
    ProgramPoint,
    ShareShown,
    encoded,
    for_clients,
    in_ms,
)
from tercet.router.serve.moves import MoveRecord
from tercet.router.serve.service import Outcome, Service

# Offset between the numbers of two workers' lanes and moves.
APART = 10_000_000
NAMES_INTERVAL_S = 2.0
# Largest number of other workers' frames that wait for this worker's next frame; beyond it the oldest is dropped.
MOST_WAITING = 20
_frames = msgspec.json.Decoder(Frame)


class OtherWorkers:
    """The other workers' frames, followed from :meth:`begin` to :meth:`end`.

    ``names`` returns the names of live workers, and ``frames_of`` streams the frames of one worker as JSON.
    """

    def __init__(
        self, names: Callable[[], Awaitable[Sequence[str]]], frames_of: Callable[[str], AsyncGenerator[bytes]]
    ) -> None:
        self._names = names
        self._frames_of = frames_of
        self._numbers = itertools.count(1)
        self._tasks = TaskSet()
        self._known: dict[str, asyncio.Task[None]] = {}
        self._waiting: deque[Frame] = deque()
        self._kept = KeptRecords()
        self._ttfts: list[EngineTTFT] = []

    def __len__(self) -> int:
        return len(self._known)

    def begin(self) -> None:
        self._tasks.keep(self._find, "page-workers")

    def end(self) -> None:
        """Stop following the other workers, and drop their frames."""
        self._tasks.cancel()
        self._kept = KeptRecords()
        for kept in (self._known, self._waiting, self._ttfts):
            kept.clear()

    async def _find(self) -> None:
        while True:
            for name in await self._names():
                if name not in self._known:
                    self._known[name] = self._tasks.spawn(self._read(name, next(self._numbers) * APART), name)
            await asyncio.sleep(NAMES_INTERVAL_S)

    async def _read(self, name: str, offset: int) -> None:
        try:
            with suppress(OSError, ValueError, TimeoutError, *UNREADABLE):
                async with aclosing(self._frames_of(name)) as lines:
                    async for line in lines:
                        self.take(numbered(_frames.decode(line), offset))
        finally:
            if self._known.get(name) is asyncio.current_task():
                del self._known[name]

    # ---- joining ---------------------------------------------------------------------------------------------

    def take(self, frame: Frame) -> None:
        """Take a numbered frame of another worker; a whole frame loses its points, the past of the charts."""
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft()
        self._waiting.append(replace(frame, points=()) if frame.whole else frame)
        self._ttfts += frame.ttfts

    def ttfts(self) -> list[EngineTTFT]:
        """Return the TTFTs that others have seen since the last call, for this worker's next frame."""
        found, self._ttfts = self._ttfts, []
        return found

    def join(self, own: Frame) -> Frame:
        """Return this worker's frame, joined with the others' frames since the last call."""
        others = tuple(self._waiting)
        self._waiting.clear()
        points = [each for frame in others for each in frame.points]
        joined = replace(
            own,
            points=[
                replace(
                    point,
                    programs=added(point, points),
                    failed=point.failed + sum(each.failed for each in points),
                    refused=point.refused + sum(each.refused for each in points),
                )
                for point in own.points
            ],
            lanes=[*own.lanes, *(each for frame in others for each in frame.lanes)],
            spans=[*own.spans, *(each for frame in others for each in frame.spans)],
            ends=[*own.ends, *(each for frame in others for each in frame.ends)],
            moves=[*own.moves, *(each for frame in others for each in frame.moves)],
        )
        self._kept.points.extend(joined.points)
        for frame in others:
            self._kept.add(replace(frame, points=()))
        return joined

    def join_whole(self, own: Frame) -> Frame:
        """Return this worker's whole frame, joined with all records of others that are kept."""
        return self._kept.with_whole(own)


def numbered(frame: Frame, offset: int) -> Frame:
    """Return a frame with ``offset`` added to its lanes' and moves' numbers, without data that every worker has."""
    return Frame(
        t=frame.t, whole=frame.whole, points=frame.points,
        lanes=[each._replace(lane=each.lane + offset) for each in frame.lanes],
        spans=[each._replace(lane=each.lane + offset) for each in frame.spans],
        ends=[each._replace(lane=each.lane + offset) for each in frame.ends],
        moves=[replace(each, number=each.number + offset) for each in frame.moves], ttfts=frame.ttfts,
    )  # fmt: skip


def added(own: FleetPoint, others: Sequence[FleetPoint]) -> dict[str, ProgramPoint]:
    """Return the counts of programs in all workers; times are means of percentiles, weighted by requests."""
    found: dict[str, list[ProgramPoint]] = {}
    for point in (own, *others):
        for name, programs in point.programs.items():
            found.setdefault(name, []).append(programs)
    return {name: each[0] if len(each) == 1 else _sum(each) for name, each in found.items()}


def _sum(points: Sequence[ProgramPoint]) -> ProgramPoint:
    def mean(times: Sequence[float | None]) -> float | None:
        known = [(time, point.done) for time, point in zip(times, points, strict=True) if time is not None]
        weight = sum(done for _, done in known)
        return round(sum(time * done for time, done in known) / weight, 2) if weight else None

    return ProgramPoint(
        sum(point.done for point in points), sum(point.unfinished for point in points),
        sum(point.tokens for point in points), mean([point.ttft_p50 for point in points]),
        mean([point.ttft_p90 for point in points]), mean([point.tpot_p50 for point in points]),
        mean([point.tpot_p90 for point in points]),
    )  # fmt: skip


# Seconds between two frames, also for fleets of more than ``LARGE`` engines, and that number of engines.
INTERVAL_S, LARGE_INTERVAL_S, LARGE = 0.5, 1.0, 200
# Most pages that watch a process, and the number among them that clients cannot take.
MOST_VIEWERS, FOR_ADMINS = 32, 4
# Largest number of frames that wait for a slow viewer; beyond it the viewer gets one whole frame when it reads.
MOST_PENDING = 6


# Who gets a frame: administrators, clients, and another worker of this router that shows a page.
View = Literal["admin", "client", "worker"]
_ENCODERS: Mapping[View, Callable[[Frame], bytes]] = {
    "admin": lambda frame: encoded([frame]),
    "client": lambda frame: encoded([for_clients(frame)]),
    "worker": lambda frame: msgspec.json.encode(frame) + b"\n",
}


class EncodedFrame:
    """A frame, encoded at most once for each view."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._encoded: dict[View, bytes] = {}

    def seen_as(self, view: View) -> bytes:
        if view not in self._encoded:
            self._encoded[view] = _ENCODERS[view](self._frame)
        return self._encoded[view]


# The reason of a refusal that was none: the client left while it waited.
NOT_REFUSED = "client_left"


def refusals_of(metrics: Metrics) -> int:
    """Return the number of requests that this process has refused so far."""
    return sum(
        round(sample.value)
        for metric in metrics.refused.collect()
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.labels.get("reason") != NOT_REFUSED
    )


class Viewer:
    """One open page, or another worker, with the frames that it has not read yet: at most :data:`MOST_PENDING`."""

    def __init__(self, view: View) -> None:
        self.view: View = view
        self.is_behind = True
        self.has_left = False
        self._pending: deque[EncodedFrame] = deque()
        self._woken = asyncio.Event()

    def give(self, frame: EncodedFrame) -> None:
        """Add a frame; a viewer that is behind keeps none, since it needs a whole frame."""
        # So a slow page costs bounded memory: once it reads again it gets the whole state, not what it has missed.
        if len(self._pending) >= MOST_PENDING:
            self._pending.clear()
            self.is_behind = True
        if not self.is_behind:
            self._pending.append(frame)
        self._woken.set()

    def leave(self) -> None:
        self.has_left = True
        self._woken.set()

    async def next(self, whole: Callable[[], EncodedFrame]) -> bytes | None:
        """Wait for frames and return their bytes; None at the end. The producer wakes it at every frame."""
        while not self.has_left:
            await self._woken.wait()
            self._woken.clear()
            if self.has_left:
                break
            if self.is_behind:
                self.is_behind = False
                self._pending.clear()
                return whole().seen_as(self.view)
            if self._pending:
                found = b"".join(frame.seen_as(self.view) for frame in self._pending)
                self._pending.clear()
                return found
        return None


class Viewers:
    """All viewers of this process. ``watch`` starts an observation, ``engines`` returns the number of engines.

    ``is_over`` is called at each frame; when it returns True, every stream ends. ``others`` are the router's other
    workers, None if there are none.
    """

    def __init__(
        self, watch: Callable[[], FleetWatch], engines: Callable[[], int], is_over: Callable[[], bool] = lambda: False,
        others: OtherWorkers | None = None,
    ) -> None:  # fmt: skip
        self._others = others
        self._follows = False
        self._new_watch = watch
        self._engines = engines
        self._is_over = is_over
        self._viewers: set[Viewer] = set()
        self._tasks = TaskSet()
        self._is_producing = False
        self._whole: EncodedFrame | None = None
        self._watch: FleetWatch | None = None

    def __len__(self) -> int:
        return len(self._viewers)

    def enter(self, view: View) -> Viewer:
        """Add a viewer, until :meth:`leave` or the end of its stream.

        Raises :class:`~tercet.protocol.NoSpace`, :class:`~tercet.protocol.ShuttingDown`.
        """
        if self._is_over():
            raise ShuttingDown("this router is shutting down, so its page is closed")
        most = MOST_VIEWERS if view == "admin" else MOST_VIEWERS - FOR_ADMINS
        if view != "worker" and sum(each.view != "worker" for each in self._viewers) >= most:
            kept = "" if view == "admin" else f", and {FOR_ADMINS} more places are for administrators"
            raise NoSpace(f"{most} pages watch this router process already{kept}; close one of them")
        viewer = Viewer(view)
        self._viewers.add(viewer)
        if self._others is not None and not self._follows and view != "worker":
            self._follows = True
            self._others.begin()
        if not self._is_producing:
            self._is_producing = True
            self._tasks.spawn(self._produce(), "page")
        return viewer

    def leave(self, viewer: Viewer) -> None:
        viewer.leave()
        self._viewers.discard(viewer)

    async def stream(self, viewer: Viewer) -> AsyncGenerator[bytes]:
        try:
            # Another worker joins the frames itself, so it gets those of this process alone.
            while (found := await viewer.next(self._own if viewer.view == "worker" else self._current)) is not None:
                yield found
        finally:
            self.leave(viewer)

    async def close(self) -> None:
        for viewer in self._viewers:
            viewer.leave()
        await self._tasks.close()

    def _current(self) -> EncodedFrame:
        """Return the whole state at the last frame, for a viewer that a frame has woken."""
        if self._whole is None:
            assert self._watch is not None
            whole = self._watch.whole()
            self._whole = EncodedFrame(self._others.join_whole(whole) if self._others and self._follows else whole)
        return self._whole

    def _own(self) -> EncodedFrame:
        assert self._watch is not None
        return EncodedFrame(self._watch.whole())

    def _follow_no_more(self) -> None:
        """Stop following other workers, unless a page is open."""
        if self._others is not None and self._follows and all(each.view == "worker" for each in self._viewers):
            self._follows = False
            self._others.end()

    async def _produce(self) -> None:
        """Produce frames while there are viewers; the service is not observed at other times."""
        try:
            watch = self._watch = self._new_watch()
            while self._viewers and not self._is_over():
                if self._others:
                    watch.heard(self._others.ttfts())
                own = watch.frame()
                # Other workers get what this one saw; each joins the TTFTs of all, since a router has one page.
                mine = EncodedFrame(replace(own, ttfts=watch.ttfts.take()))
                joined = EncodedFrame(self._others.join(own) if self._others and self._follows else own)
                self._whole = None
                for viewer in self._viewers:
                    viewer.give(mine if viewer.view == "worker" else joined)
                self._follow_no_more()
                await asyncio.sleep(LARGE_INTERVAL_S if self._engines() > LARGE else INTERVAL_S)
        finally:
            self._is_producing = False  # set first, so that the next viewer starts another producer
            if self._watch is not None:
                self._watch.close()
            self._follow_no_more()
            for viewer in self._viewers:
                viewer.leave()


# ---- the points of the charts ------------------------------------------------------------------------------------


class PointCounts:
    """The counts of one process since its last point of the charts; ``now`` is in seconds of the charts' clock."""

    def __init__(self, service: Service, now: float) -> None:
        self._service = service
        self._programs = ProgramCounts(service.sequences)
        self._failed, self._refused, self.last = 0, refusals_of(service.metrics), now

    def ends(self, sequence: RunningSequence, trace: Trace, outcome: Outcome) -> None:
        self._programs.ends(sequence, trace)
        self._failed += outcome == "failed"

    def take(self, now: float, running: int, waiting: int) -> FleetPoint:
        """Return the point from the last one until ``now``; ``running`` and ``waiting`` are engines' sums."""
        refused, programs = refusals_of(self._service.metrics), self._programs.take(self._service.sequences)
        point = FleetPoint(
            round(now, 3), round(now - self.last, 3), running, waiting, programs, self._failed, refused - self._refused
        )
        self._failed, self._refused, self.last = 0, refused, now
        return point


# Seconds between two points of the history, and how many of them are kept.
SECONDS, KEPT = 5.0, 180
# Seconds by which a timer may be early, as uvloop's are: the next point is then not that of the same time.
EARLY_S = 0.01
POINTS = msgspec.json.Decoder(list[FleetPoint])


class History:
    """The points of this process. ``unix_time`` returns the time now; :meth:`begin` starts a timer of the event loop.

    A point costs one pass over the running sequences; a request costs its share of the counts.
    """

    def __init__(self, service: Service, loads: LoadTable, unix_time: Callable[[], float]) -> None:
        self._service = service
        self._loads = loads
        self._time = unix_time
        self._counts = PointCounts(service, unix_time())
        self._points: deque[FleetPoint] = deque(maxlen=KEPT)

    def begin(self) -> None:
        """Take points until the event loop ends."""
        self._service.observers.append(self)
        self._wait()

    def _wait(self) -> None:
        now = self._time() + EARLY_S
        asyncio.get_running_loop().call_later(SECONDS - now % SECONDS + EARLY_S, self._tick)

    def _tick(self) -> None:
        try:
            self.take()
        finally:
            self._wait()

    def begins(self, sequence: RunningSequence, trace: Trace) -> None:
        """Nothing: a request counts when it ends, and its tokens when they are there."""

    def ends(self, sequence: RunningSequence, trace: Trace, outcome: Outcome) -> None:
        self._counts.ends(sequence, trace, outcome)

    def take(self) -> None:
        """Add the point of the time since the last one."""
        table = self._loads(list(self._service.fleet.members))
        running, waiting = map(int, np.rint(np.nan_to_num(table[:, (RUNNING, WAITING)])).sum(axis=0))
        self._points.append(self._counts.take(self._time(), running, waiting))

    def points(self) -> list[FleetPoint]:
        return list(self._points)


# Points of the rates that commands show: of the last ten seconds.
RECENT = 2


class RecentRates(msgspec.Struct, frozen=True):
    """What a router did in the last ``seconds``: rates per second, and the median TTFT in seconds, None if unknown."""

    seconds: float
    requests: float
    tokens: float
    failures: float
    refusals: float
    ttft_p50: float | None


def rates_of(points: Sequence[FleetPoint]) -> RecentRates | None:
    """Return the rates of the last points; None without one."""
    last = points[-RECENT:]
    seconds = sum(point.seconds for point in last)
    if not seconds:
        return None
    programs = [program for point in last for program in point.programs.values()]
    times = [(program.ttft_p50, program.done) for program in programs if program.ttft_p50 is not None and program.done]
    requests = sum(done for _, done in times)
    ttft = sum(time * done for time, done in times) / requests / 1e3 if requests else None
    rates = (
        sum(program.done for program in programs), sum(program.tokens for program in programs),
        sum(point.failed for point in last), sum(point.refused for point in last),
    )  # fmt: skip
    done, tokens, failed, refused = (round(count / seconds, 3) for count in rates)
    return RecentRates(round(seconds, 3), done, tokens, failed, refused, None if ttft is None else round(ttft, 5))


async def recent_rates(traces: SharedTraces) -> RecentRates | None:
    """Return the rates of this router's processes together; None if this one keeps no history."""
    if traces.history is None:
        return None
    return rates_of(joined([traces.history(), *await traces.histories(POINTS)]))


def joined(workers: Sequence[Sequence[FleetPoint]]) -> list[FleetPoint]:
    """Return the points of several workers as those of one router, the oldest first.

    Engines report to every worker, so their load is not summed. A worker has one point for each time; a late one
    may fall into the next time, and counts there.
    """
    slots: dict[int, list[FleetPoint]] = {}
    for points in workers:
        for point in points:
            slots.setdefault(round(point.t / SECONDS), []).append(point)
    return [
        FleetPoint(
            max(point.t for point in found), max(point.seconds for point in found),
            max(point.running for point in found), max(point.waiting for point in found),
            added(found[0], found[1:]), sum(point.failed for point in found), sum(point.refused for point in found),
        )
        for _, found in sorted(slots.items())
    ][-KEPT:]  # fmt: skip


# ---- the observation of a fleet ------------------------------------------------------------------------------------

MOVES_PER_FRAME = 100


class FleetWatch:
    """Frames of a service's fleet; the caller closes it, and until then the service reports sequences to it.

    ``loads`` has the engines' reports, which its maker starts; ``epoch`` (seconds) is added to times of the fleet's
    clock to get times of frames. ``about`` returns the description of the service.
    """

    def __init__(self, service: Service, loads: LoadTable, about: Callable[[], About], epoch: float = 0.0) -> None:
        self._service = service
        self._clock = service.fleet.costs.clock
        self._epoch = epoch
        self._about_now = about
        self._about: About | None = None
        self.ttfts = FirstTokenTimes(self._clock)
        self._rows = EngineRows(service.fleet, loads, self.ttfts)
        self._lanes = Lanes(self._clock, self._time)
        self._counts = PointCounts(service, self._time(self._clock()))
        self._kept = KeptRecords()
        self._move_begins: dict[int, float] = {}
        self._changed_moves: dict[int, MoveShown] = {}
        for move in list(service.moves.since(0))[-MOVES_KEPT:]:
            self._move_begins[move.number] = move.at - epoch
            self._kept.moves[move.number] = self._shown(move)
        service.observers.append(self)
        service.moves.observer = self.moved

    def close(self) -> None:
        if self in self._service.observers:
            self._service.observers.remove(self)
        if self._service.moves.observer == self.moved:
            self._service.moves.observer = None

    # ---- notices of the service ------------------------------------------------------------------------------

    def begins(self, sequence: RunningSequence, trace: Trace) -> None:
        self._lanes.begins(sequence, trace)

    def ends(self, sequence: RunningSequence, trace: Trace, outcome: Outcome) -> None:
        self._lanes.ends(sequence, trace.ttft, trace.tpot)
        self._counts.ends(sequence, trace, outcome)
        if trace.ttft is not None and (slowest := trace.slowest_engine):
            self.ttfts.add(slowest, trace.ttft)

    def moved(self, move: MoveRecord) -> None:
        """Record that a move begins or has ended."""
        # A page shows some of the moves of a burst, but the end of each that it shows; the metrics count all of them.
        if move.number in self._move_begins or len(self._changed_moves) < MOVES_PER_FRAME:
            self._changed_moves[move.number] = self._shown(move)
        if move.outcome == "under_way":
            with suppress(UnknownSequence):
                self._lanes.moves(self._service.sequences.named(move.seq_id))

    # ---- between workers -------------------------------------------------------------------------------------

    def heard(self, ttfts: Iterable[EngineTTFT]) -> None:
        """Add the engines' TTFTs that other workers have seen, for the next frame."""
        for each in ttfts:
            self.ttfts.add_of_others(each)

    # ---- frames ----------------------------------------------------------------------------------------------

    def frame(self) -> Frame:
        engines, loads = self._rows.look()
        point = self._counts.take(self._time(self._clock()), self._rows.running, self._rows.waiting)
        lanes, spans, ends = self._lanes.take()
        moves, self._changed_moves = self._changed_moves, {}
        about = self._about_now()
        changed = about if about != self._about else None
        self._about = about
        frame = Frame(
            t=point.t, about=changed, engines=engines, loads=loads or (), unseen=self._rows.unseen or (),
            points=[point], lanes=lanes or (), spans=spans or (), ends=ends or (), moves=tuple(moves.values()),
        )  # fmt: skip
        self._kept.add(frame)
        return frame

    def whole(self) -> Frame:
        """Return the whole state at the last frame, for a new viewer."""
        now = round(self._counts.last, 3)
        rows = self._rows
        return self._kept.with_whole(
            Frame(t=now, whole=True, about=self._about, engines=rows.seats, loads=rows.all(), unseen=rows.unseen)
        )

    def _time(self, clock: float) -> float:
        return self._epoch + clock

    def _shown(self, move: MoveRecord) -> MoveShown:
        """Return the record of a move for the page, with a time of the fleet's clock.

        The move's own time is that of a wall clock, which a simulation does not have.
        """
        began = self._move_begins.setdefault(move.number, self._clock() - move.seconds)
        if move.outcome != "under_way":
            del self._move_begins[move.number]
        pause = None if move.pause is None else round(move.pause, 6)
        return MoveShown(
            number=move.number, t=round(self._time(began), 6), source=move.source, to=move.destination,
            reason=move.reason[:LONGEST_WORDS], outcome=move.outcome, tokens=move.tokens,
            seconds=round(move.seconds, 6), bytes=move.bytes, stages=len(move.stages), pause=pause,
            seq_id=move.seq_id[:LONGEST_WORDS], error=move.error[:LONGEST_WORDS],
        )  # fmt: skip


def about_service(service: Service, model: str, roles: str = "fixed", why: str = "") -> About:
    """Return the description of a service: its programs and objectives; ``why`` is the reason if it does not serve."""
    routing, wanted = service.routing, service.attainments.objectives
    plan, returned = routing.current.plan, routing.returned
    shares = tuple(ShareShown(share.label, share.program, share.weight) for share in plan.shares)
    said = "" if returned is None else f"{returned.program} failed {returned.failures} times in a row"
    return About(
        model=model, version=routing.current.number, shares=shares, rules=len(plan.rules), sticky=plan.sticky or "",
        roles=roles, why=why, returned=said, ttft_objective=in_ms(wanted.ttft), tpot_objective=in_ms(wanted.tpot),
    )  # fmt: skip
