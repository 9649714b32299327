"""The lines of a report: groups of points, named by their program and by their differences from other lines.

Points are pooled if their files agree on all facts about the system and the settings that could change a number.
Requests per second, the number of users and the round distinguish the points of a line, and rounds may differ in their
seeds; these are not facts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from tercet.protocol import BadRequest
from tercet_bench.experiment import words
from tercet_lab.bench.results import (
    REQUESTS_NEEDED,
    BenchResult,
    Point,
    Ratio,
    Summary,
    achieved,
    enough,
    summarize,
    three_digits,
)

Facts = Mapping[str, str | None]
PROGRAM, SOURCE, MODEL, FLEET, WORKLOAD, ARRIVALS, MACHINE = (
    "program", "source", "model", "fleet", "workload", "arrivals", "machine",
)  # fmt: skip
# The most important facts: lines that differ in them have them in their labels.
FOREMOST = (SOURCE, MODEL, FLEET, WORKLOAD, ARRIVALS, MACHINE)
REAL, VIRTUAL, REAL_TIME = "real", "simulated", "simulated in real time"
SIMULATED_ENGINE = re.compile(r"\bsimulated (\S+)")
ROLES = ("prefill", "decode", "both")
GROUP = re.compile(rf"({'|'.join(ROLES)})=(\d+)")
# Keys of a configuration that other facts contain, or that change no number.
SAID = {
    "workload", "arrival", "burstiness", "max-concurrency", "program", "fleet", "profile", "program_args", "rate",
    "request-rate", "concurrency", "seed", "base-url", "model", "label", "also", "baseline", "rounds", "confidence",
    "resamples", "header", "over", "sweep",
}  # fmt: skip


def facts_of(result: BenchResult, point: Point) -> Facts:
    """Return all facts of a point, the most important first; None for a missing fact."""
    found = _simulated(result, point) if result.source == "sim" else _measured(result, point)
    versions = {"tercet": result.versions.get("tercet")}
    return {**found, **versions, **dict(_settings(result.config))}


def _measured(result: BenchResult, point: Point) -> Facts:
    config, target = result.config, _target_of(result, point)
    versions = [str(each) for each in target.get("engine_versions") or ()]
    own = str(_mapping(target.get("version")).get("version") or "")
    profiles = [each[1] for text in (*versions, own) if (each := SIMULATED_ENGINE.search(text))]
    real = ", ".join(versions) or own or None
    roles = [str(_mapping(engine).get("role")) for engine in target.get("engines") or ()]
    return {
        PROGRAM: program_served(target, point.program),
        SOURCE: REAL_TIME if profiles else REAL,
        MODEL: ", ".join(dict.fromkeys(profiles)) or _text(target.get("model")),
        FLEET: _fleet(",".join(f"{role}={roles.count(role)}" for role in ROLES if role in roles)),
        WORKLOAD: _phases(config.get("workload")),
        ARRIVALS: _arrivals(config.get("arrival"), config.get("burstiness"), point),
        MACHINE: _machine(result.machine),
        "server": urlsplit(str(target.get("base_url") or "")).hostname,
        "engines": None if profiles else real,
    }


def _simulated(result: BenchResult, point: Point) -> Facts:
    config: Mapping[str, Any] = result.config
    work = _mapping(config.get("workload"))
    return {
        PROGRAM: _called(point.program or point.label, config.get("program_args") or {}),
        SOURCE: VIRTUAL,
        MODEL: _text(config.get("profile") or result.target.get("model")),
        FLEET: _fleet(str(config.get("fleet") or "")),
        WORKLOAD: _phases(work.get("workload")) if "workload" in work else _lengths(work),
        ARRIVALS: _arrivals(work.get("arrivals"), work.get("burstiness"), point),
        MACHINE: None,
        # Two seeds of a simulation are two results: a simulation stores no requests that could be pooled.
        "seed": str(result.seed),
        "requests": _text(work.get("requests")),
        "warm-up": _text(work.get("warm_up")),
    }


def _target_of(result: BenchResult, point: Point) -> Mapping[str, Any]:
    """Return the facts of the point's server: the configured server, or another one in ``also``."""
    url = _mapping(result.config.get("also")).get(point.label) if point.program is None else None
    others: list[Mapping[str, Any]] = result.target.get("others") or []
    found = (other for other in others if url is not None and other.get("base_url") == str(url).rstrip("/"))
    return next(found, result.target)


def program_served(target: Mapping[str, Any], asked: str | None = None) -> str | None:
    """Return the router's program for requests that name ``asked``; None of both: another kind of server."""
    plan = _mapping(target.get("program"))
    if asked is not None:
        return _called(asked, plan.get("args") or {} if _name(plan) == asked else {})
    if shares := plan.get("split"):
        return " + ".join(f"{_called(_name(each), each.get('args') or {})} {each['weight']:g}" for each in shares)
    return _called(_name(plan), plan.get("args") or {}) if plan.get("program") else None


def _name(arm: Mapping[str, Any]) -> str:
    """Return the name of a program in the router's plan."""
    return str(arm.get("name") or arm.get("program"))


def _called(program: str, args: Mapping[str, Any]) -> str:
    return f"{program}({', '.join(f'{key}={value}' for key, value in args.items())})" if args else program


def _fleet(text: str) -> str | None:
    """Return a fleet in its shortest form: ``1P1D``, ``both=2``, or the given text."""
    groups = [GROUP.fullmatch(part) for part in text.split(",")]
    roles = [group[1] for group in groups if group]
    if len(roles) == len(groups) and roles == ["prefill", "decode"]:
        return "".join(f"{group[2]}{group[1][0].upper()}" for group in groups if group)
    return text or None


def _phases(workload: Any) -> str | None:
    if isinstance(workload, str):
        return workload
    return ", then ".join(str(phase) for phase in workload) if workload else None


def _lengths(work: Mapping[str, Any]) -> str | None:
    if not work:
        return None
    sides = ((f"{work.get(f'{side}_mean', 0):g}", work.get(f"{side}_dev", 0)) for side in ("input", "output"))
    into, out = (f"{mean}±{dev:g}" if dev else mean for mean, dev in sides)
    found = f"{into} tokens in, {out} out"
    found += f", {work['lengths']}" if work.get("lengths", "normal") != "normal" else ""
    return found + (f", {work['prefixes']} prefixes of {work['prefix']}" if work.get("prefixes") else "")


def _arrivals(kind: Any, burstiness: Any, point: Point) -> str | None:
    if kind is None:
        return None
    shape = f" {burstiness:g}" if kind == "gamma" else ""
    cap = f", at most {point.concurrency} at once" if point.request_rate is not None and point.concurrency else ""
    return f"{kind}{shape}{cap}"


def _machine(machine: Mapping[str, Any]) -> str | None:
    parts = [str(machine[key]) + unit for key, unit in (("cpu", ""), ("cores", " cores")) if machine.get(key)]
    memory = machine.get("memory_gib")
    return ", ".join(parts + ([f"{memory:.0f} GiB"] if memory else [])) or None


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the other settings that are set, as text."""
    for key, value in config.items():
        if key not in SAID and value is not None and value != {} and value != []:
            parts = [f"{name}={item}" for name, item in _mapping(value).items() if item is not None]
            yield "SLO" if key in ("goodput", "slo") else key, " ".join(parts) or str(value)


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


Metrics = Mapping[str, float | int | None]
OPEN_LOOP, CLOSED_LOOP = "requests/s", "requests at once"


@dataclass(frozen=True)
class LinePoint:
    """One point of a line, at load ``x``. ``ratios`` to the baseline are by metric, such as ``mean TTFT``."""

    x: float
    metrics: Metrics
    ratios: Mapping[str, Ratio] = field(default_factory=dict[str, Ratio])


@dataclass(frozen=True)
class FigureLine:
    """One line of a report: points with the same facts, by load. ``differs`` has the facts in which lines differ."""

    label: str
    points: tuple[LinePoint, ...]
    differs: Facts = field(default_factory=dict[str, str | None])
    is_baseline: bool = False


@dataclass(frozen=True)
class Figure:
    """The content of a report: all lines, the label of the x axis, facts common to all lines, and days of measurement.

    ``days`` is empty for simulations.
    """

    x_label: str
    lines: tuple[FigureLine, ...]
    common: Facts = field(default_factory=dict[str, str | None])
    days: tuple[str, ...] = ()

    @property
    def requests(self) -> tuple[int, int]:
        """Smallest and largest number of completed requests of a point."""
        counts = [int(point.metrics.get("completed") or 0) for line in self.lines for point in line.points]
        return min(counts), max(counts)


@dataclass(frozen=True)
class _Measured:
    point: Point
    result: BenchResult
    facts: Facts

    @property
    def ratios(self) -> dict[str, Ratio]:
        """Ratios of this label at this load to the baseline, by metric."""
        key = (self.point.label, self.point.request_rate, self.point.concurrency)
        found = self.result.ratios
        return {each.metric: each for each in found if (each.label, each.request_rate, each.concurrency) == key}


def figure_of(results: Sequence[BenchResult]) -> Figure:
    """Return the figure of results: one line for all points with the same facts. Points of one load are pooled.

    Raise :class:`~tercet.protocol.BadRequest` for files that cannot be in one figure.
    """
    points = [_Measured(point, result, facts_of(result, point)) for result in results for point in result.points]
    if not points:
        raise BadRequest("report: these files have no points; give files of finished runs", "file")
    if len({msgspec.json.encode(result, order="deterministic") for result in results}) < len(results):
        raise BadRequest("report: two of these files have the same run, which would count twice; leave one out", "file")
    kinds = {
        CLOSED_LOOP if each.point.request_rate is None and each.point.concurrency is not None else OPEN_LOOP
        for each in points
    }  # fmt: skip
    if len(kinds) > 1:
        raise BadRequest(
            "report: the files have open-loop and closed-loop points, which cannot be in one figure; "
            "make a report of each kind",
            "file",
        )
    groups: dict[tuple[str, tuple[str | None, ...]], list[_Measured]] = {}
    names = list(dict.fromkeys(name for each in points for name in each.facts))
    for each in points:
        groups.setdefault((each.point.label, tuple(each.facts.get(name) for name in names)), []).append(each)
    lines = _lines(list(groups.values()))
    facts = points[0].facts
    differing = {name for line in lines for name in line.differs}
    days = sorted({result.created[:10] for result in results if result.source == "bench"})
    common = {name: facts[name] for name in facts if name not in differing}
    return Figure(kinds.pop(), tuple(lines), common, tuple(days))


def _lines(groups: Sequence[list[_Measured]]) -> list[FigureLine]:
    facts = [group[0].facts for group in groups]
    varying = _varying(facts)
    labels = _labels([group[0].point.label for group in groups], facts)
    return [
        FigureLine(
            label, tuple(_points(group)), {name: of.get(name) for name in varying},
            any(ratio.baseline == each.point.label for each in group for ratio in each.result.ratios),
        )
        for label, of, group in zip(labels, facts, groups, strict=True)
    ]  # fmt: skip


def _points(group: Sequence[_Measured]) -> Iterator[LinePoint]:
    by_x: dict[float, list[_Measured]] = {}
    for each in group:
        by_x.setdefault(_x(each.point), []).append(each)
    for x, found in sorted(by_x.items()):
        of_one_file = all(each.result is found[0].result for each in found)
        yield LinePoint(x, pooled([each.point for each in found]), found[0].ratios if of_one_file else {})


def _varying(facts: Sequence[Facts]) -> list[str]:
    """Return the names of facts that differ. A missing fact differs from a given one."""
    names = dict.fromkeys(name for of in facts for name in of)
    return [name for name in names if len({of.get(name) for of in facts}) > 1]


def _labels(bases: Sequence[str], facts: Sequence[Facts]) -> list[str]:
    """Return unique labels: the base, the most important differences, and further ones if needed."""
    shown = [name for name in FOREMOST if len({of.get(name) for of in facts} - {None}) > 1]
    labels = [
        ", ".join([base, *(value for name in shown if (value := of.get(name)) is not None)])
        for base, of in zip(_programs(bases, facts), facts, strict=True)
    ]
    found = list[str]()
    for label, of in zip(labels, facts, strict=True):
        alike = [other for each, other in zip(labels, facts, strict=True) if each == label]
        found.append(", ".join([label, *(f"{name} {of.get(name) or 'unknown'}" for name in _varying(alike))]))
    return found


def _programs(bases: Sequence[str], facts: Sequence[Facts]) -> list[str]:
    """Return each line's label. If lines of one label have several programs, it contains the program."""
    found: list[str] = []
    for base, of in zip(bases, facts, strict=True):
        program = of.get(PROGRAM)
        alike = {other.get(PROGRAM) for other_base, other in zip(bases, facts, strict=True) if other_base == base}
        if len(alike) == 1:
            found.append(base)
        elif program is not None and program.startswith(base):
            found.append(program)
        else:
            found.append(f"{base} ({program or 'program unknown'})")
    return found


def pooled(points: Sequence[Point]) -> Metrics:
    """Return the metrics of several rounds as one point.

    Latencies are over the requests of all rounds, throughput is over their summed durations. ``achieved_throughput``
    and ``achieved_goodput`` are means over rounds (:func:`~tercet_lab.bench.results.achieved`).
    """
    if len(points) == 1:
        return {**points[0].metrics, **_achieved(points)}
    if not all(point.records for point in points):
        name = f"{points[0].label} at {_x(points[0]):g}"
        raise BadRequest(f"report: {name} has several points without records, which cannot be pooled", "file")
    found = summarize(record for point in points for record in point.records).flat()
    found = {name: value for name, value in found.items() if name.endswith("_ms") and "send_delay" not in name}
    seconds = sum(_value(point, "duration") for point in points)
    for name in ("completed", "failed", "interrupted", "total_input_tokens", "total_output_tokens"):
        found[name] = int(sum(_value(point, name) for point in points))
    for name in ("request_throughput", "output_throughput", "total_token_throughput", "request_goodput"):
        counted = sum(_value(point, name) * _value(point, "duration") for point in points)
        found[name] = counted / seconds if seconds and points[0].metrics.get(name) is not None else None
    return found | {"duration": seconds, **_achieved(points)}


def _achieved(points: Sequence[Point]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name in ("throughput", "goodput"):
        rates = [rate for point in points if (rate := achieved(point.metrics, name)) is not None]
        found[f"achieved_{name}"] = sum(rates) / len(rates) if rates else None
    return found


def _x(point: Point) -> float:
    if point.request_rate is not None:
        return point.request_rate
    return float(point.concurrency) if point.concurrency is not None else _value(point, "request_throughput")


def _value(point: Point, name: str) -> float:
    return float(point.metrics.get(name) or 0.0)


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
    failed = (each for each in reversed(point.records) if not each.ok and not each.warmup)
    whys = {each.failure or "empty": each.error or "no token" for each in failed}
    found = [f"{count} x {kind}: {whys.get(kind, '')}" for kind, count in summary.errors.items()]
    measured = [record for record in point.records if record.ok and not record.warmup]
    short = sum(record.output_tokens < record.wanted_tokens for record in measured)
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
    metrics = [point.metrics for line in figure.lines for point in line.points]
    columns = [column for column in TABLE if any(each.get(column[1]) is not None for each in metrics)]
    header = ["", figure.x_label, "completed", "failed", *(title for title, _ in columns)]
    rows = [
        [line.label, f"{point.x:.3g}", *(str(point.metrics.get(name) or 0) for name in ("completed", "failed")),
         *(_cell(point.metrics, name) for _, name in columns)]
        for line in figure.lines for point in line.points
    ]  # fmt: skip
    notes = ["Latencies count from the send.", *(f"{note[:1].upper()}{note[1:]}." for note in _needed(metrics))]
    parts = [_table(header, rows), " ".join(notes), *_alike_and_not(figure)]
    compared = [point for result in results for point in result.points if point.prefix]
    if compared:
        loads = (f"{each.request_rate:g} requests/s" if each.request_rate is not None else f"{each.concurrency} users"
                 for each in compared)  # fmt: skip
        pairs = zip(compared, loads, strict=True)
        parts.append("\n".join(f"- {point.label}, {load}: {words(point.prefix)}" for point, load in pairs))
    ratios = [ratio for result in results for ratio in result.ratios]
    if ratios:
        parts.append(ratio_table(ratios))
    return "\n\n".join([*parts, *dict.fromkeys(_origin(result) for result in results)]) + "\n"


def _alike_and_not(figure: Figure) -> Iterator[str]:
    """Yield the facts common to all lines, and a list of each line's differences."""
    common = [f"{name} {value}" for name in FOREMOST if (value := figure.common.get(name)) is not None]
    if common:
        yield f"All lines: {'; '.join(common)}."
    listed = [f"- {line.label}: {found}" for line in figure.lines if (found := _differences(line, figure.lines))]
    if listed:
        yield "\n".join(["The lines differ in:", "", *listed])


def _differences(line: FigureLine, lines: Sequence[FigureLine]) -> str:
    """Return a line's differences from others. Between real and simulated runs, only facts of both kinds count."""
    one_kind = SOURCE not in line.differs
    names = [name for name in line.differs if one_kind or all(each.differs[name] is not None for each in lines)]
    facts = ((name, line.differs[name]) for name in names)
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
        shown = [
            f"{three_digits(cell.ratio)} ({three_digits(cell.low)} to {three_digits(cell.high)})" if cell else TOO_FEW
            for cell in cells
        ]
        rows.append([f"{label} / {baseline}", load, *shown])
    confidence = f"{ratios[0].confidence:.0%} bootstrap intervals over {ratios[0].rounds} rounds"
    return _table(["ratio", load_title, *names], rows) + f"\n\nBelow 1 is faster than the baseline; {confidence}."


def _cell(metrics: Metrics, name: str) -> str:
    """Return a metric as text: empty for None, :data:`TOO_FEW` for a percentile of too few requests."""
    value = metrics.get(name)
    is_shown = value is None or enough(int(metrics.get("completed") or 0), name.partition("_")[0])
    return three_digits(value) if is_shown else TOO_FEW


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


def _origin(result: BenchResult) -> str:
    facts = facts_of(result, result.points[0] if result.points else NO_POINT)
    where = f"{facts.get(SOURCE)}, model {facts.get(MODEL) or 'unknown'}"
    if result.source == "bench":
        where = f"{result.created}: {where}, measured from {facts.get(MACHINE) or 'an unknown machine'}"
    partial = " It was interrupted: its last point has the requests that had ended by then." if result.partial else ""
    return f"{where}, Tercet {result.versions.get('tercet', 'unknown')}, seed {result.seed}.{partial}"
