"""What was measured, for people: text for a terminal, a Markdown table, and a figure with a line per program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from tercet.bench.results import BenchResult, Point, Ratio, RequestRecord
from tercet.bench.summary import Distribution, Samples, Summary
from tercet.protocol import BadRequest

Metrics = Mapping[str, float | int | None]
ROWS = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2EL (JCT)", "e2el"))
SCHEDULED = (("TTFT scheduled", "ttft_scheduled"), ("E2EL scheduled", "e2el_scheduled"))
COLUMNS = (("mean", "mean"), ("P50", "median"), ("P90", "p90"), ("P99", "p99"))
LATE_SENDS = 0.05
LATE_SENDS_SECONDS = 0.005
LATE_LOOP_MS = 20.0
PANELS = (("TTFT", "ttft"), ("TPOT", "tpot"), ("JCT", "e2el"))
STATISTICS = (("mean", "mean"), ("P99", "p99"))
MARKERS = "osD^vP*X"
FORMATS = (".png", ".svg", ".pdf")
HEADROOM = 1.1


@dataclass(frozen=True)
class FigureLine:
    """One program's points, by x; the values are metrics by name."""

    label: str
    points: tuple[tuple[float, Metrics], ...]


@dataclass(frozen=True)
class Figure:
    """All lines of a figure, and what x is."""

    x_label: str
    lines: tuple[FigureLine, ...]


def point_text(point: Point, summary: Summary) -> str:
    """One point as a small table for a terminal, with what is odd about it below."""
    head = f"{summary.completed} completed, {summary.failed} failed, {summary.duration:.1f} s"
    rates = (
        f"{summary.request_throughput:.2f} requests/s, {summary.output_throughput:.1f} output tokens/s, "
        f"{summary.total_token_throughput:.1f} tokens/s"
    )
    if summary.request_goodput is not None:
        rates += f", goodput {summary.request_goodput:.2f} requests/s"
    rows = ["  ".join(["ms".ljust(16), *(name.rjust(9) for name, _ in COLUMNS)])]
    for title, name in (*ROWS, *SCHEDULED):
        values = [point.metrics.get(f"{column}_{name}_ms") for _, column in COLUMNS]
        rows.append("  ".join([title.ljust(16), *(_number(value).rjust(9) for value in values)]))
    return "\n".join([f"  {line}" for line in (head, rates, *rows, *remarks(point, summary))])


def remarks(point: Point, summary: Summary) -> list[str]:
    """What a reader must know before believing the numbers of a point."""
    found = [f"{count} x {kind}: {_example(point.records, kind)}" for kind, count in summary.errors.items()]
    measured = [record for record in point.records if record.ok and not record.warmup]
    short = sum(record.output_tokens < record.planned_output for record in measured)
    off = sum(record.input_tokens != record.planned_input for record in measured)
    merged = sum(len(record.token_times) < record.output_tokens for record in measured)
    if short:
        found.append(f"{short} answers are shorter than asked for")
    if off:
        found.append(f"{off} prompts have another length on the server than was planned")
    if merged:
        found.append(f"{merged} answers came in fewer events than tokens: ITL is between events")
    delay = summary.send_delay
    if delay and summary.ttft and delay.p99 > max(LATE_SENDS * summary.ttft.mean, LATE_SENDS_SECONDS):
        found.append(f"requests left up to {delay.max * 1000:.0f} ms late: see the scheduled latencies")
    if point.client.get("p99_loop_lag_ms", 0) > LATE_LOOP_MS:
        found.append(f"this client was slow: P99 of its lag {point.client['p99_loop_lag_ms']:.0f} ms")
    if point.partial:
        found.append("interrupted: these are the requests that were over by then")
    return found


def figure_of(results: Sequence[BenchResult]) -> Figure:
    """A line per label over all files; points of one label and load are pooled.

    Raises :class:`~tercet.protocol.BadRequest` for files that do not go into one figure.
    """
    points = [point for result in results for point in result.points]
    if not points:
        raise BadRequest("report: there is no point in these files", "file")
    kinds = {_axis(point) for point in points}
    if len(kinds) > 1:
        raise BadRequest(
            "report: open-loop and closed-loop points do not go into one figure; report them apart", "file"
        )
    groups: dict[str, dict[float, list[Point]]] = {}
    for point in points:
        groups.setdefault(point.label, {}).setdefault(_x(point), []).append(point)
    lines = [
        FigureLine(label, tuple((x, pooled(group)) for x, group in sorted(by_x.items())))
        for label, by_x in groups.items()
    ]
    return Figure(kinds.pop(), tuple(lines))


def pooled(points: Sequence[Point]) -> Metrics:
    """The metrics of several rounds as one: latencies of all their requests, throughput over their summed durations."""
    if len(points) == 1:
        return points[0].metrics
    if not all(point.records for point in points):
        name = f"{points[0].label} at {_x(points[0]):g}"
        raise BadRequest(f"report: {name} was measured several times without records, which cannot be pooled", "file")
    samples = [Samples.of(point.records) for point in points]
    found: dict[str, float | int | None] = {}
    for name in ("ttft", "tpot", "e2el", "ttft_scheduled", "e2el_scheduled"):
        distribution = Distribution.of(np.concatenate([getattr(sample, name) for sample in samples]))
        found |= {} if distribution is None else distribution.flat(name)
    itl = Distribution.of(np.concatenate([sample.itl for sample in samples]))
    found |= {} if itl is None else itl.flat("itl")
    seconds = sum(_value(point, "duration") for point in points)
    for name in ("completed", "failed", "interrupted", "total_input_tokens", "total_output_tokens"):
        found[name] = int(sum(_value(point, name) for point in points))
    for name in ("request_throughput", "output_throughput", "total_token_throughput", "request_goodput"):
        counted = sum(_value(point, name) * _value(point, "duration") for point in points)
        found[name] = counted / seconds if seconds and points[0].metrics.get(name) is not None else None
    return found | {"duration": seconds}


def markdown(results: Sequence[BenchResult]) -> str:
    """The numbers of a figure as a table, the ratios of comparisons, and where they were measured."""
    figure = figure_of(results)
    header = ["", figure.x_label, "completed", "failed", "output tokens/s", "goodput"]
    header += [f"{title} {column}" for title, _ in ROWS for column in ("mean", "P99")]
    rows = [_row(line.label, x, metrics) for line in figure.lines for x, metrics in line.points]
    parts = [_table(header, rows), "Latencies in milliseconds, from the send."]
    ratios = [ratio for result in results for ratio in result.ratios]
    if ratios:
        parts.append(ratio_table(ratios))
    return "\n\n".join([*parts, *dict.fromkeys(_origin(result) for result in results)]) + "\n"


def ratio_table(ratios: Sequence[Ratio]) -> str:
    """Ratios with their intervals, one row per program and load."""
    names = list(dict.fromkeys(ratio.metric for ratio in ratios))
    keys = list(dict.fromkeys((ratio.label, ratio.baseline, ratio.request_rate, ratio.concurrency) for ratio in ratios))
    found = {(r.label, r.baseline, r.request_rate, r.concurrency, r.metric): r for r in ratios}
    rows: list[list[str]] = []
    for key in keys:
        label, baseline, rate, users = key
        cells = [found.get((*key, name)) for name in names]
        load = f"{rate:g}" if rate is not None else str(users or "")
        shown = [f"{cell.ratio:.3f} ({cell.low:.3f} to {cell.high:.3f})" if cell else "" for cell in cells]
        rows.append([f"{label} / {baseline}", load, *shown])
    confidence = f"{ratios[0].confidence:.0%} bootstrap intervals over {ratios[0].rounds} rounds"
    return _table(["ratio", "load", *names], rows) + f"\n\nBelow 1 is faster than the baseline; {confidence}."


def _axis(point: Point) -> str:
    closed = point.request_rate is None and point.concurrency is not None
    return "requests at once" if closed else "requests/s"


def _x(point: Point) -> float:
    if point.request_rate is not None:
        return point.request_rate
    return float(point.concurrency) if point.concurrency is not None else _value(point, "request_throughput")


def _value(point: Point, name: str) -> float:
    return float(point.metrics.get(name) or 0.0)


def _row(label: str, x: float, metrics: Metrics) -> list[str]:
    names = ["output_throughput", "request_goodput", *(f"{c}_{name}_ms" for _, name in ROWS for c in ("mean", "p99"))]
    counts = [str(metrics.get("completed") or 0), str(metrics.get("failed") or 0)]
    return [label, f"{x:.3g}", *counts, *(_number(metrics.get(name)) for name in names)]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _example(records: Iterable[RequestRecord], kind: str) -> str:
    failed = (record for record in records if not record.ok and not record.warmup)
    return next((record.error or "no token" for record in failed if (record.failure or "empty") == kind), "")


def _origin(result: BenchResult) -> str:
    def told(value: Any) -> str:
        return str(value) if value is not None else "unknown"

    cpu, cores = told(result.machine.get("cpu")), told(result.machine.get("cores"))
    where = "simulated" if result.source == "sim" else f"measured from a machine with {cores} cores, {cpu}"
    model = f"model {told(result.target.get('model'))}, " if result.target.get("model") else ""
    return f"{result.created}: {model}{where}, Tercet {told(result.versions.get('tercet'))}, seed {result.seed}."


def require_drawing(file: Path) -> None:
    """Raises :class:`~tercet.protocol.BadRequest` when ``file`` cannot be drawn: its format, or no matplotlib."""
    if file.suffix.lower() not in FORMATS:
        raise BadRequest(f"--figure {file}: must end with {', '.join(FORMATS)}", "figure")
    try:
        import_module("matplotlib.figure")
    except ImportError as error:
        why = "figures need matplotlib, which is not installed; install it with: pip install 'tercet[plot]'"
        raise BadRequest(f"--figure {file}: {why}", "figure") from error


def draw(figure: Figure, file: Path, title: str | None = None) -> None:
    """Write the figure; the file's suffix decides the format. Raises :class:`~tercet.protocol.BadRequest`."""
    require_drawing(file)
    # Optional, and only partly typed.
    library: Any = import_module("matplotlib")
    canvas_type: Any = import_module("matplotlib.figure").Figure

    # Text stays text in SVG, and the same numbers give the same file.
    with library.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tercet"}):
        canvas = canvas_type(figsize=(9, 9), layout="constrained")
        axes: Any = canvas.subplots(len(PANELS), len(STATISTICS), sharex=True, squeeze=False)
        for row, (name, metric) in enumerate(PANELS):
            for column, (statistic, key) in enumerate(STATISTICS):
                _panel(axes[row][column], figure, f"{statistic} {name}", f"{key}_{metric}_ms")
        for axis in axes[-1]:
            axis.set_xlabel(figure.x_label)
        handles, labels = axes[0][0].get_legend_handles_labels()
        columns = min(4, max(1, len(labels)))
        canvas.legend(
            handles,
            labels,
            loc="outside upper center",
            ncols=columns,
            frameon=False,
            title=title,
            title_fontsize="large",
        )
        try:
            canvas.savefig(file, dpi=150, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)
        except OSError as error:
            raise BadRequest(f"--figure {file}: {error.strerror}", "figure") from error


def _panel(axis: Any, figure: Figure, title: str, metric: str) -> None:
    highest = 0.0
    for index, line in enumerate(figure.lines):
        drawn = [(x, found) for x, metrics in line.points if (found := _seconds(metrics, metric)) is not None]
        axis.plot([x for x, _ in drawn], [y for _, y in drawn], marker=MARKERS[index % len(MARKERS)], label=line.label)
        highest = max([highest, *(y for _, y in drawn)])
    axis.set_title(title, fontsize="medium")
    axis.set_ylabel("ms" if "tpot" in metric else "s")
    axis.set_ylim(0, HEADROOM * highest if highest else 1)
    axis.grid(visible=True, alpha=0.3)


def _seconds(metrics: Metrics, name: str) -> float | None:
    """The value in the panel's unit: milliseconds for TPOT, seconds for the others."""
    value = metrics.get(name)
    if value is None:
        return None
    return float(value) if "tpot" in name else float(value) / 1000
