"""What a simulated run records besides its requests: a timeline for the web page, and the loads of engines.

A run's timeline has the frames of a router's stream in virtual time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Container, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from tercet.fleet import EngineFleet, Member
from tercet.protocol import BadRequest
from tercet.router.page.records import Frame
from tercet.router.page.watch import FleetWatch, about_service
from tercet.router.serve.service import Service
from tercet_lab.sim import SimEngine
from tercet_lab.tables import Kind, Table

if TYPE_CHECKING:
    from tercet_lab.sim.sim_store import SimStore

MOST_FRAMES, FEWEST_FRAMES, MOST_ROWS = 600, 60, 300_000
"""Limits of the frames that are kept, and of the rows of engines in them; larger fleets get fewer frames."""
OFTEN_S = 0.1
"""Default interval between frames, in virtual seconds. It is doubled whenever there are too many frames."""


class EngineLoads:
    """The present loads of simulated engines. Reading them does not inform the simulated router."""

    def __init__(self, engines: Mapping[str, SimEngine | SimStore]) -> None:
        self._engines = engines

    def __call__(self, members: Sequence[Member]) -> NDArray[np.float64]:
        return np.array([_row(self._engines[member.name]) for member in members]).reshape(len(members), 4)


def _row(engine: SimEngine | SimStore) -> tuple[float, float, float, float]:
    if engine.down:
        return math.nan, math.nan, math.nan, math.nan
    load = engine.load()
    return load.kv_usage, load.running, load.waiting, math.nan if load.step_time is None else load.step_time


def merged(first: Frame, second: Frame) -> Frame:
    """Return one frame with the changes of ``first`` and then ``second``."""
    if second.whole:
        return second
    rows = {} if second.engines is not None else {row[0]: row for row in first.loads}
    rows |= {row[0]: row for row in second.loads}
    moves = {move.number: move for move in (*first.moves, *second.moves)}
    return Frame(
        t=second.t, whole=first.whole, about=second.about or first.about, engines=second.engines or first.engines,
        loads=[rows[index] for index in sorted(rows)], unseen=second.unseen, points=[*first.points, *second.points],
        lanes=[*first.lanes, *second.lanes], spans=[*first.spans, *second.spans], ends=[*first.ends, *second.ends],
        moves=[moves[number] for number in sorted(moves)],
    )  # fmt: skip


def halved(frames: Sequence[Frame]) -> list[Frame]:
    """Return half as many frames with the same result: pairs are merged, and an odd last frame stays."""
    pairs = zip(frames[::2], frames[1::2], strict=False)
    return list(chain((merged(*pair) for pair in pairs), frames[len(frames) // 2 * 2 :]))


class TimelineRecorder:
    """The recorder of a run's ``frames``: one every ``interval_s`` virtual seconds, fewer if the run is long."""

    def __init__(
        self, service: Service, engines: Mapping[str, SimEngine | SimStore], model: str, interval_s: float
    ) -> None:
        self._sequences = service.sequences
        self._watch = FleetWatch(service, EngineLoads(engines), lambda: about_service(service, model))
        self._most = max(FEWEST_FRAMES, min(MOST_FRAMES, MOST_ROWS // max(1, len(engines))))
        self._interval = interval_s
        self.frames: list[Frame] = []

    async def run(self) -> None:
        while True:
            self._take()
            await asyncio.sleep(self._interval)

    def close(self) -> None:
        """Record the last frame, and stop observing."""
        self._take()
        self._watch.close()

    def _take(self) -> None:
        for sequence in self._sequences:  # simulated engines deliver the tokens of a run of steps only on request
            if sequence.generation is not None and sequence.generation.stream is not None:
                sequence.generation.stream.catch_up()
        self.frames.append(self._watch.frame())
        if len(self.frames) > self._most:
            self.frames = halved(self.frames)
            self._interval *= 2


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a run records besides one row for each request.

    ``tokens``: the time of each token, which costs time and memory. ``engines_every``: seconds between two rows of each
    engine (None: no rows). ``frames_every``: seconds between frames of a timeline for the web page (None: no timeline).
    """

    tokens: bool = False
    engines_every: float | None = None
    frames_every: float | None = None

    def __post_init__(self) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` for an interval that is not positive."""
        for field in ("engines_every", "frames_every"):
            every = getattr(self, field)
            if every is not None and not 0 < every < math.inf:
                raise BadRequest(f"{field}: is {every:g}, and must be a positive number of seconds", field)


ENGINE_COLUMNS: Mapping[str, Kind] = {
    "at": "time", "engine": "text", "role": "text", "running": "maybe", "waiting": "maybe", "kv_usage": "time",
    "step_s": "time", "paid": "flag",
}  # fmt: skip


class EngineSamples:
    """Rows of all engines in ``table``, one for each engine every ``interval_s`` virtual seconds.

    A row has the engine's role and load at a moment; the load is unknown while the engine is down. ``paid`` are the
    engines that cost something then.
    """

    def __init__(
        self, table: Table, fleet: EngineFleet, loads: EngineLoads, paid: Container[str], interval_s: float
    ) -> None:
        self._table, self._fleet, self._loads = table, fleet, loads
        self._paid, self._interval = paid, interval_s

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            members = self._fleet.members
            for member, row in zip(members, self._loads(members).tolist(), strict=True):
                usage, running, waiting, step = row
                self._table.append(
                    loop.time(), member.name, member.role, running, waiting, usage, step, member.name in self._paid
                )
            await asyncio.sleep(self._interval)
