"""The timeline of a simulated run for the web page: the frames of a router's stream, in virtual time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tercet.fleet import Member
from tercet.router.page.records import Frame, halved
from tercet.router.page.watch import FleetWatch, about_service
from tercet.router.serve.service import Service
from tercet_lab.sim import SimEngine

MOST_FRAMES, FEWEST_FRAMES, MOST_ROWS = 600, 60, 300_000
"""Limits of the frames that are kept, and of the rows of engines in them; larger fleets get fewer frames."""
OFTEN_S = 0.1
"""Default interval between frames, in virtual seconds. It is doubled whenever there are too many frames."""


class EngineLoads:
    """The present loads of simulated engines. Reading them does not inform the simulated router."""

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
    """The recorder of a run's ``frames``: one every ``interval_s`` virtual seconds, fewer if the run is long."""

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
