"""What a planner knows of requests: when they came, how long they are and which blocks they share; never their text."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

FEWEST_ENDED = 8
"""Ended answers of prompts of like length below which all ended answers are looked at."""


@dataclass(frozen=True)
class ObservedRequest:
    """A request that came ``at`` a time in seconds, of the observer's clock.

    ``output_tokens`` are those that its client has so far; ``ended`` says whether that is all of them. ``blocks`` name
    the prompt's blocks of ``block_size`` tokens, in order: equal names are equal beginnings. ``met`` is whether it met
    the objectives, None while that is not known.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    ended: bool
    blocks: tuple[int, ...] = ()
    block_size: int = 512
    met: bool | None = None


def answers_completed(arrivals: Sequence[ObservedRequest], seed: int = 0) -> list[ObservedRequest]:
    """The same requests, each with the whole length of its answer; the same for the same seed.

    The length of an answer that has not ended is drawn from the ended ones of prompts of like length that are longer
    than it is already. If none is, it is taken to be half done: of all that is known, that is the middle.
    """
    if all(each.ended for each in arrivals):
        return list(arrivals)
    by_class, everyone = defaultdict[int, list[int]](list), list[int]()
    for each in arrivals:
        if each.ended:
            by_class[_class(each)].append(each.output_tokens)
            everyone.append(each.output_tokens)
    everyone.sort()
    for lengths in by_class.values():
        lengths.sort()
    chance = random.Random(seed)
    return [each if each.ended else _completed(each, by_class.get(_class(each), []), everyone, chance)
            for each in arrivals]  # fmt: skip


def _completed(
    arrival: ObservedRequest, alike: Sequence[int], everyone: Sequence[int], chance: random.Random
) -> ObservedRequest:
    known = alike if len(alike) >= FEWEST_ENDED else everyone
    longer = bisect_left(known, arrival.output_tokens + 1)
    drawn = known[chance.randrange(longer, len(known))] if longer < len(known) else None
    length = max(1, 2 * arrival.output_tokens) if drawn is None else drawn
    return replace(arrival, output_tokens=length, ended=True)


def _class(arrival: ObservedRequest) -> int:
    """Prompts of one class differ in length by less than a factor of two."""
    return arrival.prompt_tokens.bit_length()
