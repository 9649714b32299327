"""The figure of the costs of moves: a client's pause by the length of its prompt, with a line for each way to move."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from operator import mul
from pathlib import Path
from typing import Any

from benchmarks.migration.moving import MoveCost

from tercet_lab.drawing import Picture, picture

WIDTH, HEIGHT = 5.6, 4.0
# The shortest pause that is drawn on a logarithmic axis.
LEAST_SECONDS = 1e-3
STEPS = 2


def plot_pauses(costs: Sequence[MoveCost], file: Path, measured: str) -> None:
    """Draw the pauses over the lengths: medians and single moves, in milliseconds (left) and in decode steps (right).

    ``measured`` is the text at the bottom, with machine and date. Raise :class:`~tercet.protocol.BadRequest` if
    ``file`` cannot be written.
    """
    step = statistics.median(cost.step for cost in costs)
    lengths = sorted({cost.length for cost in costs})
    with picture(file, "--plot", WIDTH, HEIGHT) as drawn:
        axis: Any = drawn.canvas.add_subplot()
        for way, looks in _looks(drawn).items():
            _way(axis, [cost for cost in costs if cost.way == way], looks)
        axis.axhline(STEPS * step * 1000, color=drawn.palette.faint, linewidth=0.8, zorder=1, label="two decode steps")
        axis.set_xscale("log", base=2)
        drawn.logarithmic(axis)
        axis.set_xticks(lengths, [str(length) for length in lengths])
        axis.xaxis.minorticks_off()
        axis.set_xlabel("prompt, tokens")
        axis.set_ylabel("pause, ms")
        right = axis.secondary_yaxis("right", functions=(partial(mul, 1e-3 / step), partial(mul, 1e3 * step)))
        right.set_ylabel(f"pause, decode steps of {step * 1000:.3g} ms")
        drawn.logarithmic(right)
        drawn.canvas.legend(loc="outside upper center", ncols=5, title="Pause of a client when its request moves")
        drawn.footer("\n".join(_footer(costs, measured)))


def _looks(drawn: Picture) -> Mapping[str, dict[str, Any]]:
    names = {"live": "live", "blocking": "blocking", "recompute": "recompute"}
    looks = {way: {**drawn.series(index), "label": label} for index, (way, label) in enumerate(names.items())}
    looks["stay"] = {"color": drawn.palette.faint, "marker": "x", "linestyle": ":", "label": "stay: noise"}
    return looks


def _way(axis: Any, found: Sequence[MoveCost], looks: Mapping[str, Any]) -> None:
    if not found:
        return
    axis.scatter([cost.length for cost in found], [_shown(cost.pause) for cost in found], s=12, color=looks["color"],
                 marker=looks["marker"], alpha=0.35, linewidths=0.6 if looks["marker"] == "x" else 0)  # fmt: skip
    there = sorted({cost.length for cost in found})
    medians = [statistics.median(_shown(cost.pause) for cost in found if cost.length == length) for length in there]
    axis.plot(there, medians, **looks)


def _footer(costs: Sequence[MoveCost], measured: str) -> list[str]:
    counts = {(cost.way, cost.length): 0 for cost in costs}
    for cost in costs:
        counts[cost.way, cost.length] += 1
    fewest, most = min(counts.values()), max(counts.values())
    moves = f"{most}" if fewest == most else f"{fewest} to {most}"
    lines = [f"Lines: medians of n = {moves} moves for each way and length; dots: each move. {measured}"]
    if any(cost.pause < LEAST_SECONDS for cost in costs):
        lines.append("Pauses below 1 ms are drawn at 1 ms.")
    return lines


def _shown(pause: float) -> float:
    """Return a pause in milliseconds, at least the shortest one that is drawn."""
    return max(pause, LEAST_SECONDS) * 1000
