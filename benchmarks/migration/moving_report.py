"""The costs of moves, as tables."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.migration.moving import DESTINATION, MOVES, SOURCE, THERE, WAYS, BystanderGaps, MoveCost, Side

from tercet_lab.bench.results import three_digits

PAUSES = ["way", "tokens", "moves", "pause, ms", "in steps", "step, ms", "stages", "MB"]
NEIGHBOURS = ["way", "decode steps of", "steps meanwhile", "meanwhile", "95%", "afterwards", "95%"]
RESAMPLES = 2000

Beside = tuple[Sequence[float], Sequence[float]]
"""Steps during a move, and the steps to compare them with, in seconds."""


class Slowdown(NamedTuple):
    """The mean factor by which steps were longer, and its 95% bootstrap interval."""

    ratio: float
    low: float
    high: float


def pause_rows(costs: Sequence[MoveCost]) -> Iterator[list[str]]:
    """Yield the rows for :data:`PAUSES`: medians for each way and length."""
    for length in sorted({cost.length for cost in costs}):
        for way in WAYS:
            found = [cost for cost in costs if (cost.way, cost.length) == (way, length)]
            if not found:
                continue
            pause, step = statistics.median(cost.pause for cost in found), statistics.median(c.step for c in found)
            in_steps = statistics.median(cost.pause / cost.step for cost in found)
            sent = statistics.median(sum(stage.bytes for stage in cost.stages) for cost in found) / 1e6
            stages = f"{statistics.median(len(cost.stages) for cost in found):g}"
            yield [
                way, str(length), str(len(found)), three_digits(pause * 1000), three_digits(in_steps),
                three_digits(step * 1000), stages, three_digits(sent),
            ]  # fmt: skip


def neighbour_rows(costs: Sequence[MoveCost]) -> Iterator[list[str]]:
    """Yield the rows for :data:`NEIGHBOURS`: one for each way and engine, over all lengths.

    Steps until the cut-over are compared with steps before the same move. Steps after a move are compared with those of
    the control ``there``, which have the same batches. The batches of the controls do not change.
    """
    for way in WAYS:
        moves = [cost for cost in costs if cost.way == way]
        if not moves:
            continue
        for side in (SOURCE, DESTINATION):
            found = [_of(cost, side) for cost in moves]
            during = slowdown([(gaps.during, gaps.before) for gaps in found])
            after = slowdown(
                list(_after_a_move(moves, costs, side)) if way in MOVES else [(g.after, g.before) for g in found]
            )
            yield [way, f"the {side}", str(sum(len(gaps.during) for gaps in found)), *_told(during), *_told(after)]


def slowdown(each: Sequence[Beside]) -> Slowdown | None:
    """Return the ratio of steps to the steps they are compared with, or None without data.

    The bootstrap resamples moves, not steps: the steps during one move are correlated.
    """
    # Pairs of measured seconds, and expected seconds for the same number of steps.
    found = [(sum(steps), len(steps) * statistics.fmean(others)) for steps, others in each if others]
    if not any(expected for _, expected in found):
        return None
    chance = random.Random(len(found))
    resampled = sorted(_ratio(chance.choices(found, k=len(found))) for _ in range(RESAMPLES))
    return Slowdown(_ratio(found), resampled[int(RESAMPLES * 0.025)], resampled[int(RESAMPLES * 0.975)])


def _after_a_move(moves: Sequence[MoveCost], costs: Sequence[MoveCost], side: Side) -> Iterator[Beside]:
    """Yield, for each move, its steps and those of the control of the same round and length."""
    controls = defaultdict[int, deque[MoveCost]](deque)
    for cost in costs:
        if cost.way == THERE:
            controls[cost.length].append(cost)
    for cost in moves:
        if controls[cost.length]:
            yield _of(cost, side).after, _of(controls[cost.length].popleft(), side).after


def _of(cost: MoveCost, side: Side) -> BystanderGaps:
    return next(gaps for gaps in cost.bystanders if gaps.engine == side)


def _ratio(each: Sequence[tuple[float, float]]) -> float:
    """Return the ratio of all measured to all expected seconds; 1 without steps."""
    expected = sum(otherwise for _, otherwise in each)
    return sum(took for took, _ in each) / expected if expected else 1.0


def _told(found: Slowdown | None) -> tuple[str, str]:
    if found is None:
        return "-", "-"
    return (
        f"x {three_digits(found.ratio)}", f"{three_digits(found.low)} to {three_digits(found.high)}"
    )  # fmt: skip
