"""What moves cost, as tables."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tercet.bench.digits import three_digits
from tercet.bench.moving import DESTINATION, SOURCE, WAYS, BystanderGaps, MoveCost, Side

PAUSES = ["way", "tokens", "moves", "pause, ms", "in steps", "step, ms", "stages", "MB"]
NEIGHBOURS = ["way", "decode steps of", "steps meanwhile", "meanwhile", "95%", "afterwards", "95%"]
RESAMPLES = 2000


class Slowdown(NamedTuple):
    """By how much steps were longer, on average, and the interval in which 95% of resampled runs have that."""

    ratio: float
    low: float
    high: float


def pause_rows(costs: Sequence[MoveCost]) -> Iterator[list[str]]:
    """Rows below :data:`PAUSES`: a way and a length; medians."""
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
    """Rows below :data:`NEIGHBOURS`: a way and an engine, over all lengths."""
    for way in WAYS:
        moves = [cost for cost in costs if cost.way == way]
        if not moves:
            continue
        for side in (SOURCE, DESTINATION):
            steps = sum(len(gaps.during) for gaps in _of(moves, side))
            during = slowdown(moves, side, lambda gaps: gaps.during)
            after = slowdown(moves, side, lambda gaps: gaps.after)
            yield [way, f"the {side}", str(steps), *_told(during), *_told(after)]


def slowdown(
    moves: Sequence[MoveCost], side: Side, then: Callable[[BystanderGaps], Sequence[float]]
) -> Slowdown | None:
    """Steps of an engine at that time over those before each move; None if there are none.

    Moves are resampled, and not steps: those beside one move have more in common.
    """
    found = [gaps for gaps in _of(moves, side) if gaps.before]
    if not any(then(gaps) for gaps in found):
        return None
    # Steps beside a move are compared with those before the same one, whatever the lengths of the others.
    each = [(sum(then(gaps)), len(then(gaps)) * statistics.fmean(gaps.before)) for gaps in found]
    chance = random.Random(len(each))
    resampled = sorted(_ratio(chance.choices(each, k=len(each))) for _ in range(RESAMPLES))
    return Slowdown(_ratio(each), resampled[int(RESAMPLES * 0.025)], resampled[int(RESAMPLES * 0.975)])


def _of(moves: Sequence[MoveCost], side: Side) -> list[BystanderGaps]:
    return [gaps for cost in moves for gaps in cost.bystanders if gaps.engine == side]


def _ratio(each: Sequence[tuple[float, float]]) -> float:
    """Seconds that the steps took over those that they would have taken before; 1 if there were none."""
    expected = sum(before for _, before in each)
    return sum(took for took, _ in each) / expected if expected else 1.0


def _told(found: Slowdown | None) -> tuple[str, str]:
    if found is None:
        return "-", "-"
    return (
        f"x {three_digits(found.ratio)}", f"{three_digits(found.low)} to {three_digits(found.high)}"
    )  # fmt: skip
