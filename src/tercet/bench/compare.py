"""Comparing programs: the order of rounds, and ratios with confidence intervals. No I/O.

Rounds are interleaved, so that drift of the machine hits every program alike. Within a round all programs get the same
arrival times and the same lengths, with other words: request i of one program is paired with request i of the other.

The interval is that of a percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapters 8
and 13) in two stages: rounds are drawn with replacement, then pairs of requests within each. Requests of a round share
its queues and are not independent; the first stage is what accounts for that, so few rounds give wide intervals, and a
single round gives one that is too narrow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], float]

STATISTICS: dict[str, Statistic] = {
    "mean": lambda values: float(values.mean()),
    "median": lambda values: float(np.percentile(values, 50)),
    "p99": lambda values: float(np.percentile(values, 99)),
}


@dataclass(frozen=True)
class Interval:
    """The statistic of two samples, their ratio, and the bounds of its confidence interval."""

    value: float
    baseline: float
    ratio: float
    low: float
    high: float


def turns_of(labels: Sequence[str], rounds: int, seed: int) -> list[tuple[int, str]]:
    """``(round, label)`` in the order of measuring: every label once a round, in every place about equally often."""
    found: list[tuple[int, str]] = []
    order = list(labels)
    chance = Random(f"{seed}/order")
    for number in range(rounds):
        if number % len(order) == 0:
            chance.shuffle(order)
        shift = number % len(order)
        found += [(number, label) for label in order[shift:] + order[:shift]]
    return found


def ratio_interval(
    rounds: Sequence[Floats],
    baseline: Sequence[Floats],
    statistic: Statistic,
    resamples: int,
    confidence: float,
    seed: int,
) -> Interval | None:
    """The ratio ``statistic(rounds) / statistic(baseline)`` with its interval; None where a side has no value.

    Both have one array per round, with the same requests at the same places; NaN stands for a request without a value,
    and is left out on its side only.
    """
    pairs = [_paired(ours, theirs) for ours, theirs in zip(rounds, baseline, strict=True)]
    pairs = [pair for pair in pairs if pair[0].size]
    ours, theirs = (_measure([pair[side] for pair in pairs], statistic) for side in (0, 1))
    if ours is None or theirs is None or theirs == 0:
        return None
    generator = np.random.default_rng(seed)
    ratios: list[float] = []
    sizes = [pair[0].size for pair in pairs]
    for _ in range(resamples):
        drawn = [int(index) for index in generator.integers(len(pairs), size=len(pairs))]
        places: list[NDArray[np.int64]] = [generator.integers(sizes[index], size=sizes[index]) for index in drawn]
        above, below = (
            _measure([pairs[index][side][place] for index, place in zip(drawn, places, strict=True)], statistic)
            for side in (0, 1)
        )
        if above is not None and below:
            ratios.append(above / below)
    tail = (1 - confidence) / 2 * 100
    low, high = np.percentile(ratios, (tail, 100 - tail)) if ratios else (np.nan, np.nan)
    return Interval(ours, theirs, ours / theirs, float(low), float(high))


def _paired(ours: Floats, theirs: Floats) -> tuple[Floats, Floats]:
    """Both cut to the requests that both have; an interrupted round may be shorter on one side."""
    common = min(ours.size, theirs.size)
    return ours[:common], theirs[:common]


def _measure(parts: Sequence[Floats], statistic: Statistic) -> float | None:
    if not parts:
        return None
    values = np.concatenate(parts)
    values = values[~np.isnan(values)]
    return statistic(values) if values.size else None
