"""Requests as a planner sees them: arrival times, lengths and shared blocks, but not their text."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

FEWEST_ENDED = 8
"""Ended answers to prompts of similar length that are needed; with fewer, all ended answers are used."""


@dataclass(frozen=True)
class ObservedRequest:
    """A request that came ``at`` a time in seconds, of the observer's clock.

    ``output_tokens`` is the number of tokens that its client has so far; ``ended`` is True if the answer is complete.
    ``blocks`` name the prompt's blocks of ``block_size`` tokens, in order: equal names mean equal beginnings. ``met``
    is True if the request met the objectives, None while that is not known.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    ended: bool
    blocks: tuple[int, ...] = ()
    block_size: int = 512
    met: bool | None = None


def answers_completed(arrivals: Sequence[ObservedRequest], seed: int = 0) -> list[ObservedRequest]:
    """Return the same requests, each with the full length of its answer; equal seeds give equal lengths.

    The length of an answer that has not ended is drawn from the ended answers to prompts of similar length that are
    longer than it is now. Without such an answer, it is assumed to be half done: the middle of what is possible.
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
    """Return the class of a prompt's length: prompts of one class differ in length by less than a factor of two."""
    return arrival.prompt_tokens.bit_length()
