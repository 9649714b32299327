"""Whether an engine should pull KV that another engine has cached instead of computing it, and from which engine.

A pull costs the send alone: the engine that has the KV answers between two of its steps, computes nothing, and its
queue does not matter. Among engines that save nearly the same, one is drawn by load. Each sends to few at a time, so
that pulls leave the links to other sends; a store has no others, and sends to more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from random import Random

import msgspec

from tercet.decisions.cost.engine_work import CostModel

MOST_PULLS, MOST_FROM_STORE = 2, 16
"""Pulls at a time from one engine, and from one store."""
CHEAPER = 0.8
"""Share of the time of computing below which a send is predicted to be worth a call and a lease."""
NEARLY = 0.9
LEAST_PATIENCE_S = 1.0


class Pull(msgspec.Struct, frozen=True):
    """A pull of ``prompt[:end)`` from the engine ``source``, with predicted seconds: of the send, and of computing."""

    source: str
    end: int
    seconds: float
    computing: float

    @property
    def patience(self) -> float:
        """Seconds after which the pull is given up: by then the tokens would have been computed."""
        return max(LEAST_PATIENCE_S, self.computing)


class Pulls:
    """The decider of pulls, with the number of pulls that run from each engine of a fleet."""

    def __init__(self, model: CostModel, random: Random) -> None:
        self._model = model
        self._random = random
        self._running = Counter[str]()

    @contextmanager
    def counted(self, source: str) -> Generator[None]:
        self._running[source] += 1
        try:
            yield
        finally:
            self._running[source] -= 1
            if not self._running[source]:
                del self._running[source]

    def choose(
        self, length: int, own: int, holders: Mapping[str, int], loads: Mapping[str, float],
        computing: Callable[[int], float], stores: Collection[str] = (),
    ) -> Pull | None:  # fmt: skip
        """Return the pull that an engine with ``own`` cached tokens of a prompt of ``length`` should make, or None.

        ``holders`` are the tokens that others are believed to have, ``stores`` the names of stores among them, and
        ``loads`` the sequences on each engine.
        ``computing(end)`` returns the seconds that the engine saves if it receives the tokens up to ``end``.
        """
        found = list[Pull]()
        for name, matched in holders.items():
            end = min(matched, length - 1)  # the last token is always computed
            if end > own and self._running[name] < (MOST_FROM_STORE if name in stores else MOST_PULLS):
                pull = Pull(name, end, self._model.send(end - own), computing(end))
                if pull.seconds < CHEAPER * pull.computing:
                    found.append(pull)
        if not found:
            return None
        least = NEARLY * max(pull.computing - pull.seconds for pull in found)
        near = [pull for pull in found if pull.computing - pull.seconds >= least]
        near = [pull for pull in near if pull.source in stores] or near  # it runs no steps that a send would slow
        weights = [1 / (1 + loads.get(pull.source, 0.0)) for pull in near]
        return near[0] if len(near) == 1 else self._random.choices(near, weights)[0]
