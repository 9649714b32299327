"""What a route was chosen by: part of a request's trace."""

from __future__ import annotations

from typing import Literal

import msgspec

from tercet.protocol import BadRequest

RouteKind = Literal["alone", "pair", "split"]


class Targets(msgspec.Struct, frozen=True):
    """Service level objectives, in seconds; None is no objective.

    Raises :class:`~tercet.protocol.BadRequest` for one that is not positive.
    """

    ttft: float | None = None
    tpot: float | None = None

    def __post_init__(self) -> None:
        for name, seconds in (("ttft", self.ttft), ("tpot", self.tpot)):
            if seconds is not None and not seconds > 0:
                raise BadRequest(f"{name}: is {seconds}, and must be more than 0 seconds", name)

    def missed_by(self, ttft: float, tpot: float) -> float:
        """By what share of themselves the objectives are missed, in sum; 0 if they are met."""
        missed = 0.0 if self.ttft is None else max(0.0, ttft / self.ttft - 1)
        return missed if self.tpot is None else missed + max(0.0, tpot / self.tpot - 1)


class RouteOption(msgspec.Struct, omit_defaults=True):
    """One way to serve a request, and what was predicted of it, in seconds.

    ``decode`` alone, or ``prefill`` computes ``prompt[:split]`` for it. ``cost`` is the time until the last token, plus
    the time by which everything else that runs, or will come, ends later.
    """

    decode: str
    ttft: float
    tpot: float
    cost: float
    prefill: str = ""
    split: int = 0
    missed: float = 0.0

    def kind(self, num_tokens: int) -> RouteKind:
        """One engine, two, or two that share the prompt."""
        if not self.prefill:
            return "alone"
        return "pair" if self.split == num_tokens else "split"


class RouteDecision(msgspec.Struct, omit_defaults=True):
    """What ``auto`` decided: the chosen option, and the cheapest others that it weighed.

    ``explored``: the option was not the cheapest, and taken to learn what it costs. ``output`` is how many tokens were
    expected of the answer. What came of it is the trace's own ``ttft`` and ``tpot``.
    """

    kind: RouteKind
    chosen: RouteOption
    others: list[RouteOption] = []
    explored: bool = False
    output: float = 0.0
