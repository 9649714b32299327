"""The requests of the last minutes in the form that planners get: times, lengths and hashes of blocks, no text."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from tercet.decisions.objectives import meets
from tercet.decisions.planning import ObservedRequest
from tercet.fleet.sequences import RunningSequence
from tercet.fleet.trace import Trace
from tercet.settings.role_settings import Objectives

BLOCK = 512
"""Tokens per block in the comparison of prompts' beginnings."""
USUAL_TPOT_S = 0.02
MOST_SEEN = 50_000
"""Largest number of requests that are kept, for any window."""
MOST_BLOCKS = 1_000_000
"""Largest number of blocks of all kept requests, about 36 bytes each; beyond it the oldest requests are dropped."""


def block_names(prompt: Sequence[int]) -> tuple[int, ...]:
    """Return a hash for each whole block, equal for equal beginnings; it does not reveal the tokens."""
    names, before = list[int](), 0
    for begin in range(0, len(prompt) - BLOCK + 1, BLOCK):
        before = hash((before, tuple(prompt[begin : begin + BLOCK])))
        names.append(before)
    return tuple(names)


class SeenRequest:
    """One request, while it runs and after its end."""

    __slots__ = ("_sequence", "at", "blocks", "ended", "met", "output_tokens", "prompt_tokens")

    def __init__(self, sequence: RunningSequence, now: float, named: bool = True) -> None:
        self.at = now
        self.prompt_tokens = sequence.request.num_tokens
        self.blocks = block_names(sequence.request.prompt) if named else ()
        self.output_tokens = 0
        self.ended = False
        self.met: bool | None = None
        self._sequence: RunningSequence | None = sequence

    def end(self, met: bool | None) -> None:
        """Record the end, and whether objectives were ``met``; None, if the client left or caused an error."""
        sequence, self._sequence = self._sequence, None
        self.output_tokens = len(sequence.tokens) if sequence is not None else 0
        self.ended, self.met = True, met

    def as_arrival(self, now: float, tpot: float) -> ObservedRequest:
        """Return the request in the form that planners get.

        A running stream may hand its tokens over only at its end: it counts as having one token each ``tpot`` seconds.
        """
        tokens, sequence = self.output_tokens, self._sequence
        if sequence is not None and sequence.ttft is not None:
            tokens = max(len(sequence.tokens), 1 + int((now - sequence.began - sequence.ttft) / tpot))
        return ObservedRequest(self.at, self.prompt_tokens, tokens, self.ended, self.blocks, BLOCK, self.met)


class SeenRequests:
    """The requests of the last ``window_s`` seconds of one process.

    ``arrived``, ``ended`` and ``met`` count requests since the start at ``since``. ``clock`` is the fleet's clock in
    seconds. Without ``named``, blocks have no names, which cost time. The service calls :meth:`begins` and
    :meth:`ends`.
    """

    def __init__(self, window_s: float, objectives: Objectives, clock: Callable[[], float], named: bool = True) -> None:
        self.objectives = objectives
        self.since = clock()
        self._clock = clock
        self._named = named
        self._running: dict[RunningSequence, SeenRequest] = {}
        self.arrived = self.ended = self.met = 0
        self._window_s = window_s
        self._seen: deque[SeenRequest] = deque()
        self._blocks = 0
        self._tpot = USUAL_TPOT_S

    def begins(self, sequence: RunningSequence, trace: Trace) -> None:
        """Record a request that arrived."""
        now = self._clock()
        self._forget(now)
        found = self._running[sequence] = SeenRequest(sequence, now, self._named)
        self._seen.append(found)
        self._blocks += len(found.blocks)
        while len(self._seen) > MOST_SEEN or self._blocks > MOST_BLOCKS:
            self._drop_oldest()
        self.arrived += 1

    def ends(self, sequence: RunningSequence, trace: Trace, outcome: Literal["served", "failed", "left"]) -> None:
        """Record the end of a request; a request that arrived before this object existed is ignored."""
        found = self._running.pop(sequence, None)
        if found is None:
            return
        met = None if outcome == "left" else outcome == "served" and meets(self.objectives, trace.ttft, trace.tpot)
        found.end(met)
        if met is not None:
            self.ended += 1
            self.met += met
        if outcome == "served" and found.output_tokens > 1:
            seconds = (self._clock() - found.at) / found.output_tokens
            self._tpot += 0.01 * (seconds - self._tpot)

    def arrivals(self, now: float, newest_s: float = math.inf) -> tuple[ObservedRequest, ...]:
        """Return the requests of the last ``newest_s`` seconds within the window, in the order of their arrival."""
        self._forget(now)
        newest = list(itertools.takewhile(lambda each: now - each.at <= newest_s, reversed(self._seen)))
        return tuple(each.as_arrival(now, self._tpot) for each in reversed(newest))

    def _forget(self, now: float) -> None:
        while self._seen and now - self._seen[0].at > self._window_s:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._blocks -= len(self._seen.popleft().blocks)
