"""The results as text: a table for a terminal, and a Markdown table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tercet_lab.bench.experiment import words
from tercet_lab.bench.figure_lines import (
    FOREMOST,
    MACHINE,
    MODEL,
    PROGRAM,
    SOURCE,
    Figure,
    FigureLine,
    LinePoint,
    Metrics,
    facts_of,
    figure_of,
)
from tercet_lab.bench.results import BenchResult, Point, Ratio, RequestRecord
from tercet_lab.bench.summary import REQUESTS_NEEDED, Summary, achieved, enough, three_digits

ROWS = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2EL (JCT)", "e2el"))
SCHEDULED = (("TTFT scheduled", "ttft_scheduled"), ("E2EL scheduled", "e2el_scheduled"))
COLUMNS = (("mean", "mean"), ("P50", "median"), ("P90", "p90"), ("P99", "p99"))
RATES = (("achieved, requests/s", "achieved_throughput"), ("goodput, requests/s", "achieved_goodput"),
         ("output tokens/s", "output_throughput"))  # fmt: skip
TABLE = (*RATES, *((f"{title} {statistic.upper() if statistic != 'mean' else statistic}, ms", f"{statistic}_{name}_ms")
                  for title, name in ROWS for statistic in ("mean", "p99")))  # fmt: skip
TOO_FEW = "-"
NO_POINT = Point(label="", metrics={})
LATE_SENDS = 0.05
LATE_SENDS_SECONDS = 0.005
LATE_LOOP_MS = 20.0


def point_text(point: Point, summary: Summary) -> str:
    """Return one point as a small table for a terminal, with warnings below."""
    head = f"{summary.completed} completed, {summary.failed} failed, {three_digits(summary.duration)} s"
    rates = (
        f"{three_digits(achieved(point.metrics, 'throughput') or 0.0)} requests/s, "
        f"{three_digits(summary.output_throughput)} output tokens/s, "
        f"{three_digits(summary.total_token_throughput)} tokens/s"
    )
    goodput = achieved(point.metrics, "goodput")
    if goodput is not None:
        rates += f", goodput {three_digits(goodput)} requests/s"
    rows = ["  ".join(["ms".ljust(16), *(name.rjust(9) for name, _ in COLUMNS)])]
    for title, name in (*ROWS, *SCHEDULED):
        cells = [_cell(point.metrics, f"{column}_{name}_ms") for _, column in COLUMNS]
        rows.append("  ".join([title.ljust(16), *(cell.rjust(9) for cell in cells)]))
    return "\n".join(f"  {line}" for line in (head, rates, *rows, *_needed([point.metrics]), *remarks(point, summary)))


def remarks(point: Point, summary: Summary) -> list[str]:
    """Return the warnings and facts that a reader needs before using the numbers of a point."""
    found = [f"{count} x {kind}: {_example(point.records, kind)}" for kind, count in summary.errors.items()]
    measured = [record for record in point.records if record.ok and not record.warmup]
    short = sum(record.output_tokens < record.planned_output for record in measured)
    off = sum(record.input_tokens != record.planned_input for record in measured)
    merged = sum(len(record.token_times) < record.output_tokens for record in measured)
    if short:
        found.append(f"{short} answers are shorter than requested")
    if off:
        found.append(f"{off} prompts have a different length at the server than planned")
    if merged:
        found.append(f"{merged} answers have fewer events than tokens: ITL is the gap between events")
    delay = summary.send_delay
    if delay and summary.ttft and delay.p99 > max(LATE_SENDS * summary.ttft.mean, LATE_SENDS_SECONDS):
        found.append(f"requests were sent up to {delay.max * 1000:.0f} ms late: use the scheduled latencies")
    if point.client.get("p99_loop_lag_ms", 0) > LATE_LOOP_MS:
        found.append(f"this client was slow: the P99 of its event-loop lag is {point.client['p99_loop_lag_ms']:.0f} ms")
    if point.prefix:
        found.append(words(point.prefix))
    if point.partial:
        found.append("interrupted: the numbers are of the requests that had ended by then")
    return found


def markdown(results: Sequence[BenchResult]) -> str:
    """Return the numbers of a figure as Markdown: a table, the lines' differences, ratios, and sources."""
    figure = figure_of(results)
    columns = [column for column in TABLE if any(_has(line, column[1]) for line in figure.lines)]
    header = ["", figure.x_label, "completed", "failed", *(title for title, _ in columns)]
    names = [name for _, name in columns]
    rows = [_row(line.label, point, names) for line in figure.lines for point in line.points]
    metrics = [point.metrics for line in figure.lines for point in line.points]
    notes = ["Latencies count from the send.", *(f"{note[:1].upper()}{note[1:]}." for note in _needed(metrics))]
    parts = [_table(header, rows), " ".join(notes), *_alike_and_not(figure)]
    compared = [point for result in results for point in result.points if point.prefix]
    if compared:
        parts.append("\n".join(f"- {_place(point)}: {words(point.prefix)}" for point in compared))
    ratios = [ratio for result in results for ratio in result.ratios]
    if ratios:
        parts.append(ratio_table(ratios))
    return "\n\n".join([*parts, *dict.fromkeys(_origin(result) for result in results)]) + "\n"


def _place(point: Point) -> str:
    """Return the line and the load of a point, as text."""
    load = f"{point.request_rate:g} requests/s" if point.request_rate is not None else f"{point.concurrency} users"
    return f"{point.label}, {load}"


def _alike_and_not(figure: Figure) -> Iterator[str]:
    """Yield the facts common to all lines, and a list of each line's differences."""
    told = [f"{name} {value}" for name in FOREMOST if (value := figure.common.get(name)) is not None]
    if told:
        yield f"All lines: {'; '.join(told)}."
    listed = [f"- {line.label}: {found}" for line in figure.lines if (found := _differences(line, figure.lines))]
    if listed:
        yield "\n".join(["The lines differ in:", "", *listed])


def _differences(line: FigureLine, lines: Sequence[FigureLine]) -> str:
    """Return a line's differences from others. Between real and simulated runs, only facts of both kinds count."""
    one_kind = SOURCE not in line.differs
    told = [name for name in line.differs if one_kind or all(each.differs[name] is not None for each in lines)]
    facts = ((name, line.differs[name]) for name in told)
    return "; ".join(
        f"{name} {value or 'not given'}" for name, value in facts if (name, value) != (PROGRAM, line.label)
    )


def ratio_table(ratios: Sequence[Ratio]) -> str:
    """Return a Markdown table of ratios with their intervals, one row per program and load."""
    names = list(dict.fromkeys(ratio.metric for ratio in ratios))
    keys = list(dict.fromkeys((ratio.label, ratio.baseline, ratio.request_rate, ratio.concurrency) for ratio in ratios))
    found = {(r.label, r.baseline, r.request_rate, r.concurrency, r.metric): r for r in ratios}
    load_title = "requests/s" if all(ratio.request_rate is not None for ratio in ratios) else "load"
    rows: list[list[str]] = []
    for key in keys:
        label, baseline, rate, users = key
        cells = [found.get((*key, name)) for name in names]
        load = f"{rate:g}" if rate is not None else str(users or "")
        shown = [_interval(cell) if cell else TOO_FEW for cell in cells]
        rows.append([f"{label} / {baseline}", load, *shown])
    confidence = f"{ratios[0].confidence:.0%} bootstrap intervals over {ratios[0].rounds} rounds"
    return _table(["ratio", load_title, *names], rows) + f"\n\nBelow 1 is faster than the baseline; {confidence}."


def _interval(ratio: Ratio) -> str:
    return f"{three_digits(ratio.ratio)} ({three_digits(ratio.low)} to {three_digits(ratio.high)})"


def _has(line: FigureLine, name: str) -> bool:
    return any(point.metrics.get(name) is not None for point in line.points)


def _row(label: str, point: LinePoint, names: Sequence[str]) -> list[str]:
    counts = [str(point.metrics.get("completed") or 0), str(point.metrics.get("failed") or 0)]
    return [label, f"{point.x:.3g}", *counts, *(_cell(point.metrics, name) for name in names)]


def _cell(metrics: Metrics, name: str) -> str:
    """Return a metric as text: empty for None, :data:`TOO_FEW` for a percentile of too few requests."""
    value = metrics.get(name)
    told = value is None or enough(int(metrics.get("completed") or 0), name.partition("_")[0])
    return three_digits(value) if told else TOO_FEW


def _needed(metrics: Sequence[Metrics]) -> Iterator[str]:
    counts = [int(each.get("completed") or 0) for each in metrics]
    short = [
        f"{statistic.upper()} needs {least} requests"
        for statistic, least in REQUESTS_NEEDED.items()
        if any(0 < count < least for count in counts)
    ]
    if short:
        yield f"{TOO_FEW}: too few requests for a percentile; {' and '.join(short)}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def _example(records: Iterable[RequestRecord], kind: str) -> str:
    failed = (record for record in records if not record.ok and not record.warmup)
    return next((record.error or "no token" for record in failed if (record.failure or "empty") == kind), "")


def _origin(result: BenchResult) -> str:
    facts = facts_of(result, result.points[0] if result.points else NO_POINT)
    where = f"{facts.get(SOURCE)}, model {facts.get(MODEL) or 'unknown'}"
    if result.source == "bench":
        where = f"{result.created}: {where}, measured from {facts.get(MACHINE) or 'an unknown machine'}"
    partial = " It was interrupted: its last point has the requests that had ended by then." if result.partial else ""
    return f"{where}, Tercet {result.versions.get('tercet', 'unknown')}, seed {result.seed}.{partial}"
