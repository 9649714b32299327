"""Lengths in tokens, drawn as LLMPerf draws them."""

from __future__ import annotations

from random import Random

FEW_TRIES = 1000


def draw_length(mean: float, deviation: float, rng: Random, least: int = 1) -> int:
    """A normal deviate rounded to a whole number of tokens, drawn again until it is at least ``least``.

    A mean so far below ``least`` that none is found gives ``least``.
    """
    if deviation <= 0:
        return max(least, round(mean))
    for _ in range(FEW_TRIES):
        length = round(rng.gauss(mean, deviation))
        if length >= least:
            return length
    return least
