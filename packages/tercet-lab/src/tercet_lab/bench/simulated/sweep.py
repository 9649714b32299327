"""The sweep of ``tercet sim --over``: a grid of settings, its report, and the settings that no other setting beats."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tercet import __version__
from tercet.protocol import BadRequest
from tercet_lab.bench.results import Point, enough, three_digits
from tercet_lab.bench.simulated.experiment import Experiment
from tercet_lab.bench.simulated.grid import Estimate, Grid, Standing, cells_of, grid_of, in_words, swept_metric
from tercet_lab.bench.simulated.run_metrics import metric_of
from tercet_lab.bench.simulated.simulation import NONE, SimulatedPoint, bench_file, figure_headings, figures_of
from tercet_lab.bench.workloads.conversations import refuse
from tercet_lab.sim import load_profile
from tercet_lab.slo import Slo

SUMMED = ("completed", "failed", "interrupted", "fallbacks", "retries")
MARKS: Mapping[Standing, str] = {"best": "*", "near": "~", "beaten": ""}


Axis = tuple[str, tuple[str, ...]]
"""One axis of a sweep: a setting (:func:`~tercet_lab.bench.simulated.grid.with_setting`) and its values."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of the axes' values, run once for each seed.

    ``standing``: ``best`` trials are on the frontier of means, where no other trial is as good in both metrics and
    better in one; ``beaten`` trials are not. For ``near`` trials, the variation between seeds is too large to decide.
    """

    settings: dict[str, str]
    points: tuple[SimulatedPoint, ...]
    x: Estimate
    y: Estimate
    standing: Standing


class SweepReport(msgspec.Struct, frozen=True, kw_only=True):
    """All trials of a sweep. ``x`` and ``y`` are the names of the two compared metrics; smaller is better.

    ``comparisons`` is the number of differences that were tested for the marks.
    """

    kind: str = "simulated sweep"
    version: str = __version__
    arguments: dict[str, Any]
    seeds: tuple[int, ...]
    x: str
    y: str
    trials: tuple[Trial, ...]
    comparisons: int = 0
    slo: Slo | None = None

    def to_json(self) -> bytes:
        """Return the report as a file for ``tercet bench report``, with one line of means over seeds for each trial.

        All other results are under ``sweep`` in its config.
        """
        arguments = dict(self.arguments)
        content = {
            "kind": self.kind, "seeds": self.seeds, "x": self.x, "y": self.y, "trials": self.trials,
            "comparisons": self.comparisons, "slo": self.slo,
        }  # fmt: skip
        target = {"model": load_profile(arguments["profile"]).name} if "profile" in arguments else {}
        points = tuple(self._bench_point(trial) for trial in self.trials)
        return bench_file({**arguments, "sweep": content}, self.seeds[0], self.version, target, points)

    def _bench_point(self, trial: Trial) -> Point:
        runs = [point.metrics() for point in trial.points]
        errors = Counter[str]()
        for point in trial.points:
            errors.update(point.summary.errors)
        return Point(
            label=", ".join(f"{name}={value or 'none'}" for name, value in trial.settings.items()),
            program=trial.settings.get("program", self.arguments.get("program")),
            request_rate=trial.points[0].rate,
            metrics={name: _over_seeds(name, [run.get(name) for run in runs]) for name in runs[0]},
            errors=errors,
        )


def _over_seeds(name: str, values: Sequence[float | int | None]) -> float | int | None:
    """Return the sum over seeds for counts of requests, else the mean; None unless each seed has a value."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return sum(known) if name in SUMMED else statistics.fmean(known)


def parse_axis(given: str) -> Axis:
    """Return the axis of a text ``NAME=VALUE,VALUE,...``; values that have commas are separated by ``;``.

    Raise :class:`~tercet.protocol.BadRequest` if invalid.
    """
    name, _, values = given.partition("=")
    # An empty value counts: reschedule=,neutral_load is without and with a policy.
    found = tuple(values.split(";" if ";" in values else ","))
    refuse(not name or not values, "--over", f"{given!r} is not NAME=VALUE[,VALUE...]")
    return name, found


def sweep(
    base: Experiment,
    rate: float,
    axes: Sequence[Axis],
    x: str,
    y: str,
    seeds: int = 1,
    note: Callable[[str], None] = lambda _: None,
    jobs: int = 1,
    records: Path | None = None,
) -> SweepReport:
    """Run every combination of the axes' values at ``rate``, which an axis may replace, with ``seeds`` seeds each.

    ``x`` and ``y`` are metrics such as ``ttft.p99``; ``note`` gets lines about progress; ``jobs`` processes run at
    once; ``records`` is a file for the requests of all runs. Raise :class:`~tercet.protocol.BadRequest` for an unknown
    metric or setting.
    """
    over = dict(axes)
    refuse(len(over) < len(axes), "--over", "two axes have the same setting; give all its values in one")
    base = base.at(rate)
    measured = min((each.work.requests or math.inf) - each.work.warm_up for _, each in cells_of(base, over))
    for option, metric in (("--x", x), ("--y", y)):
        swept_metric(metric, slo=base.limits is not None)
        if not enough(measured, metric.partition(".")[2]):
            less = f"{measured:g} requests are too few for this percentile"
            raise BadRequest(f"{option} {metric}: {less}; set --num-prompts, or compare {metric[:-3]}mean", option)
    grid = grid_of(base, over, seeds, jobs, note=note, records=records)
    if seeds > 1 and all(run == runs[0] for runs in grid.points for run in runs):
        note(f"warning: all {seeds} seeds gave the same results: a trace with its recorded times has no randomness")
    return report_of(grid, x, y)


def report_of(grid: Grid, x: str, y: str) -> SweepReport:
    """Return the report of a grid, which compares its cells in two metrics."""
    standings, comparisons = grid.standings(x, y)
    trials = tuple(
        Trial(
            settings={name: in_words(value) for name, value in grid.settings[cell].items()},
            points=tuple(grid.points[cell]),
            x=grid.estimate(cell, x),
            y=grid.estimate(cell, y),
            standing=standing,
        )
        for cell, standing in enumerate(standings)
    )
    return SweepReport(
        arguments=dict(grid.arguments), seeds=tuple(grid.seeds), x=x, y=y, trials=trials, comparisons=comparisons,
        slo=grid.slo,
    )  # fmt: skip


class _Cell(msgspec.Struct, frozen=True):
    """What a report's file has of a cell, as far as a grid needs it."""

    settings: dict[str, str]
    points: tuple[SimulatedPoint, ...]


class _SweepRecord(msgspec.Struct, frozen=True):
    seeds: tuple[int, ...]
    trials: tuple[_Cell, ...]
    slo: Slo | None = None


def grid_from(config: Mapping[str, Any]) -> Grid:
    """Return the grid of the config in a report's file; raise :class:`msgspec.ValidationError` for another one."""
    record = msgspec.convert(config["sweep"], _SweepRecord)
    arguments = {name: value for name, value in config.items() if name != "sweep"}
    settings, points = [each.settings for each in record.trials], [each.points for each in record.trials]
    return Grid(settings, record.seeds, points, record.slo, arguments)


def headings(report: SweepReport) -> list[str]:
    """Return the headings of the columns of :func:`rows`."""
    spread = [f"{metric}, ms" if _is_latency(metric) else metric for metric in (report.x, report.y)]
    spread = spread if len(report.seeds) > 1 or not all(map(_is_latency, (report.x, report.y))) else []
    return [*report.trials[0].settings, "failed", "fallbacks", *figure_headings(_points(report)), *spread, "best"]


def rows(report: SweepReport) -> list[list[str]]:
    """Return a row for each trial: settings, means over seeds with intervals, and a mark (``*``: best, ``~``: near)."""
    points, found = _points(report), list[list[str]]()
    for trial in report.trials:
        failures = (sum(run.summary.failed for run in trial.points), sum(run.fallbacks for run in trial.points))
        cells = [*map(str, failures), *figures_of(trial.points, points), *_spread(trial, report)]
        found.append([*trial.settings.values(), *cells, MARKS[trial.standing]])
    return found


def _is_latency(metric: str) -> bool:
    return metric_of(metric).unit == "s"


def _spread(trial: Trial, report: SweepReport) -> list[str]:
    """Return both metrics with their intervals; no cells for latencies of one seed, which other columns show."""
    metrics = ((trial.x, report.x), (trial.y, report.y))
    if len(trial.points) < 2 and all(_is_latency(metric) for _, metric in metrics):
        return []
    cells = list[str]()
    for estimate, metric in metrics:
        scale = 1e3 if _is_latency(metric) else 1.0
        mean = three_digits(estimate.mean * scale)
        if len(trial.points) < 2:
            cells.append(mean)
        else:
            cells.append(NONE if estimate.half is None else f"{mean} ± {three_digits(estimate.half * scale)}")
    return cells


def _points(report: SweepReport) -> list[SimulatedPoint]:
    return [point for trial in report.trials for point in trial.points]
