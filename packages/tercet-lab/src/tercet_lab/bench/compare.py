"""The comparison of programs: the order of rounds, and ratios with confidence intervals. No I/O.

Rounds are interleaved, so that a drift of the machine affects every program equally. Within a round, all programs get
the same arrival times and the same lengths, with different words: request i of one program is paired with request i of
the other.

The interval is that of a percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapters 8
and 13) in two stages: rounds are drawn with replacement, then pairs of requests within each. Requests of a round share
its queues and are not independent. The first stage accounts for that, so few rounds give wide intervals; the interval
of a single round is too narrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from tercet_lab.bench.bench_config import CompareConfig
from tercet_lab.bench.results import Point, Ratio
from tercet_lab.bench.summary import Samples, enough

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], float]

STATISTICS: dict[str, Statistic] = {
    "mean": lambda values: float(values.mean()),
    "median": lambda values: float(np.percentile(values, 50)),
    "p99": lambda values: float(np.percentile(values, 99)),
}


METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Interval:
    """A statistic of two samples, with the ratio and the bounds of the ratio's confidence interval."""

    value: float
    baseline: float
    ratio: float
    low: float
    high: float


def ratios_of(points: Sequence[Point], config: CompareConfig) -> list[Ratio]:
    """Return the ratios of every label to the baseline, per load, metric and statistic.

    Only rounds that both finished count. A percentile with too few requests has no ratio.
    """
    whole = [point for point in points if not point.partial]
    labels = [*config.program, *config.also]
    baseline = config.baseline or labels[0]
    loads = dict.fromkeys((point.request_rate, point.concurrency) for point in whole)
    found: list[Ratio] = []
    for load in loads:
        samples = {
            (point.label, point.round): Samples.of(point.records)
            for point in whole
            if (point.request_rate, point.concurrency) == load
        }
        for label in labels:
            sides = (label, baseline)
            rounds = [number for number in range(config.rounds) if all((side, number) in samples for side in sides)]
            if label != baseline and rounds:
                ours, theirs = ([samples[side, number] for number in rounds] for side in sides)
                found += [
                    Ratio(
                        label=label, baseline=baseline, request_rate=load[0], concurrency=load[1], metric=name,
                        value=interval.value, baseline_value=interval.baseline, ratio=interval.ratio, low=interval.low,
                        high=interval.high, confidence=config.confidence, rounds=len(rounds),
                    )
                    for name, interval in _intervals(ours, theirs, config)
                ]  # fmt: skip
    return found


def turns_of(labels: Sequence[str], rounds: int, seed: int) -> list[tuple[int, str]]:
    """Return pairs ``(round, label)`` in the order of measurement.

    Every label is measured once per round, and about equally often at each position of a round.
    """
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
    """Return the ratio ``statistic(rounds) / statistic(baseline)`` with its interval, or None if it is not defined.

    ``rounds`` and ``baseline`` have one array per round, with the same requests at the same indices. NaN means that a
    request has no value; it is left out on its side only.
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
    if not ratios:
        return None
    tail = (1 - confidence) / 2 * 100
    low, high = np.percentile(ratios, (tail, 100 - tail))
    return Interval(ours, theirs, ours / theirs, float(low), float(high))


def _intervals(
    ours: Sequence[Samples], theirs: Sequence[Samples], config: CompareConfig
) -> Iterator[tuple[str, Interval]]:
    for metric in METRICS:
        above: list[Floats] = [getattr(sample, metric) for sample in ours]
        below: list[Floats] = [getattr(sample, metric) for sample in theirs]
        fewest = min(sum(int(np.sum(~np.isnan(each))) for each in side) for side in (above, below))
        for name, statistic in STATISTICS.items():
            if not enough(fewest, name):
                continue
            found = ratio_interval(above, below, statistic, config.resamples, config.confidence, config.seed)
            if found is not None:
                yield f"{name} {metric.upper()}", found


def _paired(ours: Floats, theirs: Floats) -> tuple[Floats, Floats]:
    """Return both arrays, cut to their common length: an interrupted round may be shorter on one side."""
    common = min(ours.size, theirs.size)
    return ours[:common], theirs[:common]


def _measure(parts: Sequence[Floats], statistic: Statistic) -> float | None:
    if not parts:
        return None
    values = np.concatenate(parts)
    values = values[~np.isnan(values)]
    return statistic(values) if values.size else None
