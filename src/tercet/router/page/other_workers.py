"""The frames of a router's other workers, joined with those of the worker whose page is open.

Each worker sends its frames to the other workers that show a page, over the sockets that also serve traces. Lanes and
moves get numbers that no other worker uses. Of the engines' data only TTFT is joined, since each worker has the
engines' reports itself.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress

import msgspec
from msgspec.structs import replace

from tercet.aio import TaskSet
from tercet.protocol.wire import UNREADABLE
from tercet.router.page.lanes import KEPT, KeptLane
from tercet.router.page.records import EngineTTFT, FleetPoint, Frame, MoveShown, ProgramPoint
from tercet.router.page.watch import MOVES_KEPT, POINTS_KEPT

APART = 10_000_000
"""Offset between the numbers of two workers' lanes and moves."""
NAMES_INTERVAL_S = 2.0
MOST_WAITING = 20
"""Largest number of other workers' frames that wait for this worker's next frame; beyond it the oldest is dropped."""
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
        self._lanes: OrderedDict[int, KeptLane] = OrderedDict()
        self._moves: OrderedDict[int, MoveShown] = OrderedDict()
        self._points: deque[FleetPoint] = deque(maxlen=POINTS_KEPT)
        self._ttfts: list[EngineTTFT] = []

    def __len__(self) -> int:
        return len(self._known)

    def begin(self) -> None:
        """Start following the other workers."""
        self._tasks.keep(self._find, "page-workers")

    def end(self) -> None:
        """Stop following the other workers, and drop their frames."""
        self._tasks.cancel()
        for kept in (self._known, self._waiting, self._lanes, self._moves, self._points, self._ttfts):
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
            points=[replace(point, programs=added(point, points)) for point in own.points],
            lanes=[*own.lanes, *(each for frame in others for each in frame.lanes)],
            spans=[*own.spans, *(each for frame in others for each in frame.spans)],
            ends=[*own.ends, *(each for frame in others for each in frame.ends)],
            moves=[*own.moves, *(each for frame in others for each in frame.moves)],
        )
        self._points.extend(joined.points)
        self._keep(others)
        return joined

    def join_whole(self, own: Frame) -> Frame:
        """Return this worker's whole frame, joined with all records of others that are kept."""
        lanes = self._lanes.values()
        return replace(
            own,
            points=[*self._points],
            lanes=[*own.lanes, *(lane.start for lane in lanes)],
            spans=[*own.spans, *(span for lane in lanes for span in lane.spans)],
            ends=[*own.ends, *(lane.end for lane in lanes if lane.end is not None)],
            moves=[*own.moves, *self._moves.values()],
        )

    def _keep(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            self._lanes.update((start.lane, KeptLane(start)) for start in frame.lanes)
            for span in frame.spans:
                if span.lane in self._lanes:
                    self._lanes[span.lane].spans.append(span)
            for end in frame.ends:
                if end.lane in self._lanes:
                    self._lanes[end.lane].end = end
            self._moves.update((move.number, move) for move in frame.moves)
        for kept, most in ((self._lanes, KEPT), (self._moves, MOVES_KEPT)):
            while len(kept) > most:
                kept.popitem(last=False)


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
