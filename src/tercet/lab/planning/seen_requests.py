"""The requests of the last minutes as a planner may know them: lengths, times and hashes of blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tercet.decisions.objectives import meets
from tercet.decisions.planning import Arrival
from tercet.fleet import RunningSequence
from tercet.protocol import Request
from tercet.settings.role_settings import Objectives

BLOCK = 512
"""Tokens of a block by which shared beginnings are found."""
USUAL_TPOT_S = 0.02


def block_names(prompt: Sequence[int]) -> tuple[int, ...]:
    """A number for each whole block; equal for equal beginnings, and in one process only."""
    names, before = list[int](), 0
    for begin in range(0, len(prompt) - BLOCK + 1, BLOCK):
        before = hash((before, tuple(prompt[begin : begin + BLOCK])))
        names.append(before)
    return tuple(names)


class SeenRequest:
    """One request, while it runs and after."""

    __slots__ = ("_begun", "_objectives", "at", "blocks", "ended_at", "met", "output_tokens", "prompt_tokens")

    def __init__(self, request: Request, now: float, begun: Sequence[RunningSequence], objectives: Objectives) -> None:
        self.at = now
        self.prompt_tokens = request.num_tokens
        self.blocks = block_names(request.prompt)
        self.output_tokens = 0
        self.ended_at: float | None = None
        self.met: bool | None = None
        self._begun = begun
        self._objectives = objectives

    def end(self, now: float, failed: bool) -> None:
        """It ended ``now``; the text is forgotten."""
        sequence = self._begun[0] if self._begun else None
        self.ended_at, self._begun = now, ()
        self.output_tokens = len(sequence.tokens) if sequence is not None else 0
        ttft = None if sequence is None else sequence.ttft
        if failed or sequence is None or ttft is None:
            self.met = False
            return
        further = self.output_tokens - 1
        tpot = (now - sequence.began - ttft) / further if further > 0 else None
        self.met = meets(self._objectives, ttft, tpot)

    def as_arrival(self, now: float, tpot: float) -> Arrival:
        """As a planner sees it; a stream that hands its tokens over at the end has had one each ``tpot`` seconds."""
        tokens = self.output_tokens
        if self.ended_at is None and self._begun and self._begun[0].ttft is not None:
            ran = now - self._begun[0].began - (self._begun[0].ttft or 0.0)
            tokens = max(len(self._begun[0].tokens), 1 + int(ran / tpot))
        return Arrival(
            self.at, self.prompt_tokens, tokens, self.ended_at is not None, self.blocks, BLOCK, self.met
        )  # fmt: skip


class SeenRequests:
    """Those of the last ``window_s`` seconds, and how many that ended since the last question met the objectives."""

    def __init__(self, window_s: float, objectives: Objectives) -> None:
        self._window_s = window_s
        self._objectives = objectives
        self._seen: deque[SeenRequest] = deque()
        self._ended = self._met = 0
        self._tpot = USUAL_TPOT_S

    def add(self, request: Request, now: float, begun: Sequence[RunningSequence]) -> SeenRequest:
        """A request came ``now``."""
        found = SeenRequest(request, now, begun, self._objectives)
        self._seen.append(found)
        return found

    def ended(self, seen: SeenRequest, now: float, failed: bool) -> None:
        """It ended ``now``."""
        seen.end(now, failed)
        self._ended += 1
        self._met += bool(seen.met)
        if seen.output_tokens > 1:
            self._tpot += 0.01 * ((now - seen.at) / seen.output_tokens - self._tpot)

    def arrivals(self, now: float) -> tuple[Arrival, ...]:
        """Those of the window, in order."""
        while self._seen and now - self._seen[0].at > self._window_s:
            self._seen.popleft()
        return tuple(each.as_arrival(now, self._tpot) for each in self._seen)

    def came(self) -> float | None:
        """The share that met the objectives since the last question; None if none ended."""
        share = self._met / self._ended if self._ended else None
        self._ended = self._met = 0
        return share
