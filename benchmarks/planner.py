"""A comparison of fixed fleets, automatic roles, the planner and Dynamo's planner on one trace.

    python -m benchmarks.planner --trace flip --seconds 600 --engines 6
    python -m benchmarks.planner --trace day --seconds 1200 --engines 3 --most 8 --dynamo-python ~/dynamo/bin/python
    python -m benchmarks.planner --trace-file trace.jsonl --objective-ttft 2 --starts 4P2D --fewest 2 --most 8

All runs are in virtual time. For Dynamo, a Python with `ai-dynamo` 1.4.2, scikit-learn, pmdarima, prophet, filterpy,
plotly, pandas and prometheus-api-client replays the same trace with the same step times. The two simulators differ in
their absolute numbers, so compare each planner with the fixed fleets of the same simulator.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import typer
from benchmarks.command_line import run

from tercet.cli.terminal import note, show_table, write_file
from tercet.decisions.planning import FleetPlan
from tercet.programs import load_program
from tercet.protocol import BadRequest
from tercet.settings.fleet_settings import Objectives
from tercet_lab.bench.simulated import (
    Experiment,
    Fleet,
    MovingSettings,
    PlannedWorkload,
    SimulatedPoint,
    parse_fleet,
    point_of,
    run_once,
)
from tercet_lab.planner_settings import PlannerSettings
from tercet_lab.sim import EngineOptions, load_profile
from tercet_lab.sim.step_times import StepModel, pairs_of
from tercet_lab.slo import MS, Slo

BLOCK = 512
INTERVAL_S = 60.0
"""Seconds between two changes of the fleet in the best sequence in hindsight."""
Shape = Literal["flip", "day", "bursts", "tenants", "steady"]


class Load(NamedTuple):
    """The load at one moment: requests per second, and mean lengths in tokens."""

    rate: float
    prompt: float
    answer: float


def load_at(shape: Shape, at: float, seconds: float, rate: float) -> Load:
    """Return the load at second ``at`` of a trace of ``seconds``, with a mean of about ``rate`` requests per second."""
    if shape == "flip":
        return Load(rate, 3000, 80) if at < seconds / 2 else Load(rate, 200, 1000)
    if shape == "day":  # two days; at night, the rate is a third of the mean
        return Load(rate * (1 - 2 / 3 * math.cos(4 * math.pi * at / seconds)), 1500, 200)
    if shape == "bursts":  # five bursts of three times the rate, which fill a tenth of the time
        return Load(rate * (3 if at * 5 / seconds % 1 > 0.9 else 0.78), 1500, 200)
    if shape == "tenants":  # one tenant is always active, one with long prompts in the middle half
        return Load(2 * rate, 2200, 120) if seconds / 4 <= at < seconds * 3 / 4 else Load(rate, 400, 300)
    return Load(rate, 1500, 200)


def trace(shape: Shape, seconds: float, rate: float, seed: int) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of a trace in Mooncake's form.

    Prompts share no prefix, arrivals are Poisson, and lengths have a standard deviation of 20% of the mean.
    """
    chance, at, block = random.Random(f"{shape} {seed}"), 0.0, 0
    most = 3 * rate
    while True:
        at += chance.expovariate(most)
        if at >= seconds:
            return
        load = load_at(shape, at, seconds, rate)
        if chance.random() > load.rate / most:
            continue
        prompt, answer = (max(1, round(chance.gauss(mean, mean / 5))) for mean in (load.prompt, load.answer))
        blocks = list(range(block, block := block + -(-prompt // BLOCK)))
        yield {"timestamp": round(at * 1e3), "input_length": prompt, "output_length": answer, "hash_ids": blocks}


def _lines(shape: Shape, seconds: float, rate: float, seed: int) -> bytes:
    return b"".join(msgspec.json.encode(line) + b"\n" for line in trace(shape, seconds, rate, seed))


class Fixed(NamedTuple):
    """The result of a fixed fleet. ``met`` counts, by interval of arrival, the requests that met the objectives."""

    row: Row
    met: list[float]


class Row(NamedTuple):
    """The result of one fleet: a row of the table.

    ``met`` is the share of requests that met the objectives, ``per_hour`` the number of such requests per engine-hour.
    """

    name: str
    met: float
    ttft_p99: float
    changes: str
    hours: float
    per_hour: float

    def cells(self) -> list[str]:
        """Return the cells of the row."""
        p99 = "" if math.isnan(self.ttft_p99) else f"{self.ttft_p99:.2f}"
        return [self.name, f"{self.met:.1%}", p99, self.changes, f"{self.hours:.2f}",
                f"{self.per_hour:.0f}"]  # fmt: skip


def ours(file: Path, fleet: str, profile: str, name: str, moving: MovingSettings) -> Row:
    """Simulate a fleet with Tercet's roles or planner. Return its row."""
    point = Experiment(
        program="disaggregated", fleet=Fleet(fleet, profile=profile), work=_workload(file), moves=moving
    ).point(None, note)
    return _row(point, fleet, name)


def unchanged(file: Path, fleet: str, profile: str, objectives: Objectives) -> Fixed:
    """Simulate a fixed fleet. Return its result."""
    outcome = run_once(
        load_program("disaggregated"), parse_fleet(fleet), profile, EngineOptions(), _workload(file), seed=0
    )
    slo = Slo(ttft=objectives.ttft or math.inf, tpot=objectives.tpot or math.inf)
    samples = outcome.requests
    met = np.bincount((samples["sent"] / INTERVAL_S).astype(int), weights=samples.meets(slo))
    return Fixed(_row(point_of(None, outcome, slo), fleet, f"fixed {fleet}"), met.tolist())


ROUNDS = 50
"""Most improvements of the ratio; each is at least as good as the one before, and five are usually enough."""


@dataclass(frozen=True)
class KnownBest:
    """The best sequence: the fleet of each interval, the requests that meet the objectives, and the engine-hours."""

    fleets: tuple[FleetPlan, ...]
    met: float
    engine_hours: float

    @property
    def per_hour(self) -> float:
        """Requests within the objectives per engine-hour."""
        return self.met / self.engine_hours if self.engine_hours else 0.0

    @property
    def changes(self) -> int:
        """Number of intervals whose fleet differs from the one before."""
        return sum(before != after for before, after in itertools.pairwise(self.fleets))


def best_sequence(met: Mapping[FleetPlan, Sequence[float]], interval_s: float, start_s: float) -> KnownBest:
    """Return the sequence that serves the most requests within the objectives per engine-hour.

    ``met`` has for each fleet the number of requests that came in each interval and met the objectives, in a run of
    that fleet alone: the queues and caches that a change leaves behind are not counted. An engine that is started costs
    ``start_s`` seconds more, and serves at once. ``interval_s`` is the length of an interval in seconds.
    """
    plans, counts = list(met), np.array([met[plan] for plan in met], dtype=float)
    engines = np.array([plan.engines for plan in plans], dtype=float)
    started = np.maximum(engines[None, :] - engines[:, None], 0.0) * start_s / 3600  # from a row's to a column's
    hours, price, found = engines * interval_s / 3600, 0.0, KnownBest((), 0.0, 0.0)
    for _ in range(ROUNDS):
        path = _best_path(counts - price * hours[:, None], price * started)
        cost = sum(hours[each] for each in path) + sum(started[pair] for pair in itertools.pairwise(path))
        served = sum(counts[each, when] for when, each in enumerate(path))
        found = KnownBest(tuple(plans[each] for each in path), float(served), float(cost))
        if found.per_hour <= price * (1 + 1e-9):
            break
        price = found.per_hour
    return found


def _best_path(values: np.ndarray, losses: np.ndarray) -> list[int]:
    """Return a row for each column, so that the sum of values less the losses of changes between rows is largest."""
    total, origins = values[:, 0], list[np.ndarray]()
    for column in values.T[1:]:
        reached = total[:, None] - losses
        origins.append(reached.argmax(axis=0))
        total = reached.max(axis=0) + column
    path = [int(total.argmax())]
    for origin in reversed(origins):
        path.append(int(origin[path[-1]]))
    return path[::-1]


def in_hindsight(fixed: Mapping[str, Fixed], requests: int, start_s: float) -> Row:
    """Return the row of the best sequence of fixed fleets for ``requests`` requests; starts of engines cost time."""
    best = best_sequence({_plan(fleet): each.met for fleet, each in fixed.items()}, INTERVAL_S, start_s)
    return Row(
        "best sequence in hindsight", best.met / requests, math.nan, str(best.changes), best.engine_hours, best.per_hour
    )


def _plan(fleet: str) -> FleetPlan:
    prefill, decode = (int(each) for each in fleet.rstrip("D").split("P"))
    return FleetPlan(prefill, decode)


def _workload(file: Path) -> PlannedWorkload:
    return PlannedWorkload(workload=(f"mooncake,path={file}",), arrivals="trace")


def _row(point: SimulatedPoint, fleet: str, name: str) -> Row:
    summary, metrics = point.summary, point.metrics()
    hours = metrics.get("engine_hours") or _plan(fleet).engines * summary.duration / 3600
    met = (summary.attainment or 0.0) * (summary.completed + summary.failed)
    flips = metrics.get("planner_changes", metrics.get("role_flips", 0))
    p99 = summary.ttft.p99 if summary.ttft else math.nan
    return Row(name, summary.attainment or 0.0, p99, str(flips), float(hours), met / float(hours))


def dynamos(
    python: str, file: Path, profile: str, plan: FleetPlan, objectives: Objectives, planner: Mapping[str, Any] | None
) -> Row:
    """Replay the trace offline with Dynamo, by the interpreter ``python``. Return its row (None ``planner``: fixed)."""
    with tempfile.TemporaryDirectory() as folder:
        steps, report = Path(folder) / "steps.npz", Path(folder) / "report.json"
        _write_steps(profile, steps)
        engine = {
            "planner_profile_data": str(steps), "num_gpu_blocks": load_profile(profile).total_blocks, "block_size": 16,
            "max_num_batched_tokens": 8192, "max_num_seqs": 256, "enable_prefix_caching": True,
        }  # fmt: skip
        command = [python, "-m", "dynamo.replay", str(file), "--trace-format", "mooncake"]
        for role, count in (("prefill", plan.prefill), ("decode", plan.decode)):
            command += [f"--{role}-engine-args", json.dumps({"worker_type": role, **engine})]
            command += [f"--num-{role}-workers", str(count)]
        limits = (f"{(objectives.ttft or math.inf) * MS:g}", f"{(objectives.tpot or math.inf) * MS:g}")
        command += ["--sla-ttft-ms", limits[0], "--sla-itl-ms", limits[1], "--report-json", str(report)]
        command += [] if planner is None else ["--planner-config", json.dumps(planner)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BadRequest(f"--dynamo-python: the replay failed: {done.stderr.strip()[-300:]}", "--dynamo-python")
        found = json.loads(report.read_text())
    met, hours = found["goodput_completed_requests"], found["gpu_hours"]
    name = f"Dynamo {plan}" + ("" if planner is None else f", by {planner['optimization_target']}")
    return Row(name, met / found["num_requests"], found["p99_ttft_ms"] / 1e3, "", hours, met / hours)


def _write_steps(profile: str, file: Path) -> None:
    """Write step times, in ms, for Dynamo's mocker: prefills by length, decodes by active KV tokens and context."""
    steps = StepModel(load_profile(profile).steps)
    lengths = np.array([16, 64, 128, 256, 512, 1024, 2048, 3000, 4096, 6144, 8192, 16384], float)
    active, contexts = np.linspace(256, 434_528, 40), np.array([64, 128, 256, 512, 1024, 2048, 4096, 8192], float)
    prefills = [steps.step(int(each), pairs_of(0, int(each)), 0, 0) * 1e3 for each in lengths]
    decodes = [[steps.step(0, 0.0, max(1, int(kv / each)), int(kv)) * 1e3 for each in contexts] for kv in active]
    np.savez(file, prefill_isl=lengths, prefill_ttft_ms=np.array(prefills), decode_active_kv_tokens=active,
             decode_context_length=contexts, decode_itl=np.array(decodes))  # fmt: skip


def planner(
    trace_shape: Annotated[Shape, typer.Option("--trace", help="Shape of the load.")] = "flip",
    trace_file: Annotated[
        Path | None,
        typer.Option(
            "--trace-file", help="File with a trace in Mooncake's form, instead of --trace.", show_default="none"
        ),
    ] = None,
    ttft: Annotated[
        float, typer.Option("--objective-ttft", help="Objective for the time to first token, seconds.")
    ] = 1.0,
    tpot: Annotated[
        float, typer.Option("--objective-tpot", help="Objective for the time per output token, seconds.")
    ] = 0.025,
    seconds: Annotated[float, typer.Option("--seconds", min=60, help="Length of the trace, seconds.")] = 600,
    rate: Annotated[float, typer.Option(min=0.1, help="Mean rate, requests per second.")] = 45,
    engines: Annotated[
        int, typer.Option("--engines", min=2, help="Number of engines at the start, and in fixed fleets.")
    ] = 6,
    fewest: Annotated[
        int | None,
        typer.Option("--fewest", help="Smallest number of engines of the planner.", show_default="--engines"),
    ] = None,
    most: Annotated[
        int | None, typer.Option("--most", help="Largest number of engines of the planner.", show_default="--engines")
    ] = None,
    starts: Annotated[
        str,
        typer.Option(
            "--starts", help="Fleets at the start, separated by commas.", show_default="splits of --engines, 2 each"
        ),
    ] = "",
    fixed: Annotated[bool, typer.Option(help="Also simulate every fixed fleet within the limits.")] = True,
    profile: Annotated[str, typer.Option(help="Profile of the engines.")] = "llama-3.1-8b-h100-tp1",
    seed: Annotated[int, typer.Option(help="Random seed of the trace.")] = 0,
    write_trace: Annotated[
        Path | None, typer.Option("--write-trace", help="Write the trace to this file, and stop.", show_default="none")
    ] = None,
    dynamo_python: Annotated[
        str | None, typer.Option("--dynamo-python", help="Python interpreter with Dynamo.", show_default="none")
    ] = None,
) -> None:
    """Print one table: fixed fleets, their best sequence, automatic roles, the planner, the oracle, and Dynamo."""
    if write_trace is not None:
        write_file(write_trace, _lines(trace_shape, seconds, rate, seed), "--write-trace")
        return
    splits = [f"{each}P{engines - each}D" for each in range(1, engines)]
    totals = range(fewest or engines, (most or engines) + 1)
    fleets = [f"{each}P{total - each}D" for total in totals for each in range(1, total)] if fixed else []
    objectives = Objectives(ttft=ttft, tpot=tpot)
    begun = starts.split(",") if starts else splits[1:-1] or splits
    bounds = PlannerSettings(fewest=fewest or engines, most=most or engines)
    plain = MovingSettings(objectives=objectives)
    with tempfile.TemporaryDirectory() as folder:
        file = trace_file or Path(folder) / "trace.jsonl"
        if trace_file is None:
            file.write_bytes(_lines(trace_shape, seconds, rate, seed))
        alone = {fleet: unchanged(file, fleet, profile, objectives) for fleet in fleets}
        rows = [each.row for each in alone.values()]
        if alone:
            rows.append(in_hindsight(alone, len(file.read_bytes().splitlines()), bounds.start_s))
        for fleet in begun:
            auto = msgspec.structs.replace(plain, roles="auto")
            rows.append(ours(file, fleet, profile, f"roles auto from {fleet}", auto))
            for policy in ("simulate", "oracle"):
                planned = msgspec.structs.replace(plain, planner=policy, planning=bounds)
                rows.append(ours(file, fleet, profile, f"planner, {policy}, from {fleet}", planned))
        if dynamo_python is None:
            note("skipped: Dynamo's planner; give --dynamo-python PYTHON with ai-dynamo 1.4.2")
        else:
            rows += _of_dynamo(dynamo_python, file, profile, begun, objectives)
    made = f"{trace_shape}, {seconds:g} s, {rate:g} requests/s"
    show_table(
        f"{made if trace_file is None else trace_file.name}, TTFT {ttft:g} s, TPOT {tpot * MS:g} ms",
        ["fleet", "within", "P99 TTFT, s", "changes", "engine-hours", "within per engine-hour"],
        [each.cells() for each in rows],
    )


def _of_dynamo(python: str, file: Path, profile: str, begun: list[str], objectives: Objectives) -> list[Row]:
    """Run Dynamo's fixed fleets, and its planner with the same number of engines. Return their rows."""
    rows = list[Row]()
    for plan in map(_plan, begun):
        rows.append(dynamos(python, file, profile, plan, objectives, None))
        for target in ("throughput", "latency", "sla"):
            config = {"optimization_target": target, "min_gpu_budget": plan.engines, "max_gpu_budget": plan.engines}
            rows.append(dynamos(python, file, profile, plan, objectives, config))
    return rows


if __name__ == "__main__":
    run(planner, "benchmarks.planner")
