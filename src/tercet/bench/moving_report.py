"""What moves cost, as tables and as a figure."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

from tercet.bench.moving import DESTINATION, SOURCE, WAYS, BystanderGaps, MoveCost, Side
from tercet.bench.simulated.sweep import empty_plot, require_suffix, save_plot

PAUSES = ["way", "tokens", "moves", "pause, ms", "in steps", "step, ms", "stages", "MB"]
NEIGHBOURS = ["way", "decode steps of", "steps meanwhile", "meanwhile", "95%", "afterwards", "95%"]
RESAMPLES = 2000
# Of those that are told apart by all kinds of colour blindness (Okabe and Ito), with shapes beside them.
LOOKS = {"live": ("#0072B2", "o", "-"), "blocking": ("#D55E00", "s", "--"), "recompute": ("#000000", "^", ":")}
# What a logarithmic axis can show of a pause that is none.
LEAST_SECONDS = 1e-3


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
                way, str(length), str(len(found)), f"{pause * 1000:.0f}", f"{in_steps:.1f}", f"{step * 1000:.0f}",
                stages, f"{sent:.1f}",
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
    return ("-", "-") if found is None else (f"x {found.ratio:.3f}", f"{found.low:.2f} to {found.high:.2f}")


def plot_pauses(costs: Sequence[MoveCost], path: Path) -> None:
    """Draw the pause against the length: medians, and every move; in seconds, and in steps on the right.

    Raises :class:`~tercet.protocol.BadRequest` when the file cannot be written.
    """
    require_suffix(path)
    figure, axes = empty_plot()
    lengths = sorted({cost.length for cost in costs})
    for way, (color, marker, line) in LOOKS.items():
        found = [cost for cost in costs if cost.way == way]
        if not found:
            continue
        axes.scatter([cost.length for cost in found], [_shown(cost.pause) for cost in found], s=14, color=color,
                     marker=marker, alpha=0.3, linewidths=0)  # fmt: skip
        there = [length for length in lengths if any(cost.length == length for cost in found)]
        medians = [statistics.median(_shown(cost.pause) for cost in found if cost.length == length) for length in there]
        axes.plot(there, medians, color=color, marker=marker, linestyle=line, label=way)
    step = statistics.median(cost.step for cost in costs)
    axes.axhline(2 * step, color="#777777", linewidth=0.8)
    axes.annotate("two decode steps", (lengths[0], 2 * step), fontsize=8, color="#555555", xytext=(0, 3),
                  textcoords="offset points")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("pause, seconds")
    right: Any = axes.secondary_yaxis("right", functions=(partial(mul, 1 / step), partial(mul, step)))
    right.set_ylabel(f"in decode steps of {step * 1000:.0f} ms")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_title("What a client waits when its request moves: medians, and each move", fontsize=10)
    axes.legend(frameon=False)
    save_plot(figure, path)


def _shown(pause: float) -> float:
    return max(pause, LEAST_SECONDS)
