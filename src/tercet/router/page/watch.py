"""The observation of a service as frames, each with the changes since the previous one. No I/O, no waiting.

It exists only while a page is open, so it costs nothing otherwise.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from tercet.fleet import RunningSequence, Trace
from tercet.protocol import UnknownSequence
from tercet.router.page.engine_rows import EngineRows, FirstTokenTimes, LoadSource
from tercet.router.page.lanes import LONGEST_WORDS, Lanes, in_ms
from tercet.router.page.program_counts import ProgramCounts
from tercet.router.page.records import About, EngineTTFT, FleetPoint, Frame, MoveShown, ShareShown
from tercet.router.serve.moves import MoveRecord
from tercet.router.serve.sequence_observers import Outcome
from tercet.router.serve.service import Service

POINTS_KEPT = 600
"""Number of points of the charts that a new viewer gets."""
MOVES_KEPT = 60
MOVES_PER_FRAME = 100


class FleetWatch:
    """Frames of a service's fleet; the caller closes it, and until then the service reports sequences to it.

    ``loads`` has the engines' reports; ``epoch`` (seconds) is added to times of the fleet's clock to get times of
    frames. ``about`` returns the description of the service.
    """

    def __init__(
        self, service: Service[Any], loads: LoadSource, about: Callable[[], About], epoch: float = 0.0
    ) -> None:
        self._service = service
        self._clock = service.fleet.costs.clock
        self._epoch = epoch
        self._about_now = about
        self._about: About | None = None
        loads.begin()
        self._ttfts = FirstTokenTimes(self._clock)
        self._rows = EngineRows(service.fleet, loads, self._ttfts)
        self._lanes = Lanes(self._clock, self._time)
        self._counts = ProgramCounts(service.sequences)
        self._last = self._clock()
        self._points: deque[FleetPoint] = deque(maxlen=POINTS_KEPT)
        self._moves: OrderedDict[int, MoveShown] = OrderedDict()
        self._move_begins: dict[int, float] = {}
        self._changed_moves: dict[int, MoveShown] = {}
        for move in list(service.moves.since(0))[-MOVES_KEPT:]:
            self._move_begins[move.number] = move.at - epoch
            self._moves[move.number] = self._shown(move)
        service.observers.add(self)
        service.moves.observer = self.moved

    def close(self) -> None:
        """Stop observing the service."""
        self._service.observers.remove(self)
        if self._service.moves.observer == self.moved:
            self._service.moves.observer = None

    # ---- notices of the service ------------------------------------------------------------------------------

    def begins(self, sequence: RunningSequence, trace: Trace) -> None:
        """Record that a sequence begins."""
        self._lanes.begins(sequence, trace)

    def ends(self, sequence: RunningSequence, trace: Trace, outcome: Outcome) -> None:
        """Record that a sequence has ended."""
        self._lanes.ends(sequence, trace.ttft, trace.tpot)
        self._counts.ends(sequence, trace)
        if trace.ttft is not None and (slowest := trace.slowest_engine):
            self._ttfts.add(slowest, trace.ttft)

    def moved(self, move: MoveRecord) -> None:
        """Record that a move begins or has ended."""
        if move.number in self._changed_moves or len(self._changed_moves) < MOVES_PER_FRAME:
            self._changed_moves[move.number] = self._shown(move)
        if move.outcome == "under_way":
            with suppress(UnknownSequence):
                self._lanes.moves(self._service.sequences.named(move.seq_id))

    # ---- between workers -------------------------------------------------------------------------------------

    def own_ttfts(self) -> list[EngineTTFT]:
        """Return the engines' TTFTs that this process has seen since the last call."""
        return self._ttfts.take()

    def heard(self, ttfts: Iterable[EngineTTFT]) -> None:
        """Add the engines' TTFTs that other workers have seen, for the next frame."""
        for each in ttfts:
            self._ttfts.add_of_others(each)

    # ---- frames ----------------------------------------------------------------------------------------------

    def frame(self) -> Frame:
        """Return the changes since the last frame."""
        now = self._clock()
        engines, loads = self._rows.look()
        point = FleetPoint(
            round(self._time(now), 3), round(now - self._last, 3), self._rows.running, self._rows.waiting,
            self._counts.take(self._service.sequences),
        )  # fmt: skip
        self._last = now
        self._points.append(point)
        lanes, spans, ends = self._lanes.take()
        moves, self._changed_moves = self._changed_moves, {}
        self._keep(moves)
        about = self._about_now()
        changed = about if about != self._about else None
        self._about = about
        return Frame(
            t=point.t, about=changed, engines=engines, loads=loads or (), unseen=self._rows.unseen or (),
            points=[point], lanes=lanes or (), spans=spans or (), ends=ends or (), moves=tuple(moves.values()),
        )  # fmt: skip

    def whole(self) -> Frame:
        """Return the whole state at the last frame, for a new viewer."""
        lanes, spans, ends = self._lanes.kept()
        return Frame(
            t=round(self._time(self._last), 3), whole=True, about=self._about, engines=self._rows.seats,
            loads=self._rows.all(), unseen=self._rows.unseen, points=list(self._points),
            lanes=lanes, spans=spans, ends=ends, moves=list(self._moves.values()),
        )  # fmt: skip

    def _keep(self, moves: dict[int, MoveShown]) -> None:
        self._moves.update(moves)
        while len(self._moves) > MOVES_KEPT:
            number, _ = self._moves.popitem(last=False)
            self._move_begins.pop(number, None)

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
            number=move.number,
            t=round(self._time(began), 6),
            source=move.source,
            to=move.destination,
            reason=move.reason[:LONGEST_WORDS],
            outcome=move.outcome,
            tokens=move.tokens,
            seconds=round(move.seconds, 6),
            bytes=move.bytes,
            stages=len(move.stages),
            pause=pause,
            seq_id=move.seq_id[:LONGEST_WORDS],
            error=move.error[:LONGEST_WORDS],
        )


def about_service(service: Service[Any], model: str, roles: str = "fixed", why: str = "") -> About:
    """Return the description of a service: its programs and objectives; ``why`` is the reason if it does not serve."""
    routing, wanted = service.routing, service.attainments.objectives
    plan, returned = routing.current.plan, routing.returned
    shares = tuple(ShareShown(share.label, share.program, share.weight) for share in plan.shares)
    said = "" if returned is None else f"{returned.program} failed {returned.failures} times in a row"
    return About(
        model=model, version=routing.current.number, shares=shares, rules=len(plan.rules), sticky=plan.sticky or "",
        roles=roles, why=why, returned=said, ttft_objective=in_ms(wanted.ttft), tpot_objective=in_ms(wanted.tpot),
    )  # fmt: skip
