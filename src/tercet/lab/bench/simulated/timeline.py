"""The timeline of a simulated run, for the page: the frames of a router's stream, in virtual time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tercet.fleet import Member
from tercet.lab.sim import SimEngine
from tercet.router.page.records import Frame, halved
from tercet.router.page.watch import FleetWatch, about_service
from tercet.router.service import Service

MOST_FRAMES, FEWEST_FRAMES, MOST_ROWS = 600, 60, 300_000
"""Frames that are kept, and rows of engines in them: a longer run, or a larger fleet, gets fewer frames."""
OFTEN_S = 0.1
"""Virtual seconds between frames, unless others are asked for; doubled whenever there are too many."""


class EngineLoads:
    """Loads of simulated engines, as they are; the router of the simulation learns nothing from it."""

    def __init__(self, engines: Mapping[str, SimEngine]) -> None:
        self._engines = engines

    def begin(self) -> None: ...

    def table(self, members: Sequence[Member]) -> NDArray[np.float64]:
        return np.array([_row(self._engines[member.name]) for member in members]).reshape(len(members), 4)


def _row(engine: SimEngine) -> tuple[float, float, float, float]:
    if engine.down:
        return math.nan, math.nan, math.nan, math.nan
    load = engine.load()
    return load.kv_usage, load.running, load.waiting, math.nan if load.step_time is None else load.step_time


class TimelineRecorder:
    """Records a run every ``interval_s`` virtual seconds, or less often if it is long; ``frames`` are the timeline."""

    def __init__(self, service: Service[Any], engines: Mapping[str, SimEngine], model: str, interval_s: float) -> None:
        self._sequences = service.sequences
        self._watch = FleetWatch(service, EngineLoads(engines), lambda: about_service(service, model))
        self._most = max(FEWEST_FRAMES, min(MOST_FRAMES, MOST_ROWS // max(1, len(engines))))
        self._interval = interval_s
        self.frames: list[Frame] = []

    async def run(self) -> None:
        """Record until cancelled."""
        while True:
            self._take()
            await asyncio.sleep(self._interval)

    def close(self) -> None:
        """Record the end, and observe no more."""
        self._take()
        self._watch.close()

    def _take(self) -> None:
        for sequence in self._sequences:  # engines that skip steps deliver their tokens when they are asked for them
            if sequence.generation is not None and sequence.generation.stream is not None:
                sequence.generation.stream.catch_up()
        self.frames.append(self._watch.frame())
        if len(self.frames) > self._most:
            self.frames = halved(self.frames)
            self._interval *= 2
