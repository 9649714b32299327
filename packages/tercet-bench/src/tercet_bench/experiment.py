"""The run of a configuration: query the targets, plan each point's requests, send them, and summarize.

A router's ``/metrics`` before and after a point tell the prefix tokens that its picks predicted and its engines found.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import aiohttp
import numpy as np
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from tercet.protocol.headers import PROGRAM_HEADER
from tercet.protocol.wire import UNREADABLE
from tercet.settings.process_settings import OPENAI_KEY_VARIABLE
from tercet_bench.bench_config import BenchConfig, CompareConfig, Load
from tercet_bench.openai_client import Client, Clock
from tercet_bench.traffic import (
    BenchTarget,
    LiveProgress,
    ModelVocabulary,
    Style,
    Traffic,
    ask_target,
    compose,
    require_programs,
)
from tercet_lab.bench.results import Distribution, Point, Ratio, Summary, enough, summarize
from tercet_lab.bench.workloads import Conversation, Vocabulary, plan
from tercet_lab.bench.workloads.conversations import arrival_times, replayed
from tercet_lab.bench.workloads.recorded import ShareGPT
from tercet_lab.tables import Requests

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
            (point.label, point.round): Requests.of_rows(point.records)
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
    # An interrupted round may be shorter on one side.
    sizes = [min(ours.size, theirs.size) for ours, theirs in zip(rounds, baseline, strict=True)]
    pairs = [np.stack([rounds[index][:size], baseline[index][:size]]) for index, size in enumerate(sizes) if size]
    found = _both(pairs, statistic)
    if found is None:
        return None
    generator = np.random.default_rng(seed)
    ratios: list[float] = []
    for _ in range(resamples):
        drawn: list[Floats] = [pairs[int(index)] for index in generator.integers(len(pairs), size=len(pairs))]
        resampled: list[Floats] = [pair[:, generator.integers(pair.shape[1], size=pair.shape[1])] for pair in drawn]
        if (values := _both(resampled, statistic)) is not None:
            ratios.append(values[0] / values[1])
    if not ratios:
        return None
    tail = (1 - confidence) / 2 * 100
    low, high = np.percentile(ratios, (tail, 100 - tail))
    return Interval(*found, found[0] / found[1], float(low), float(high))


def _both(pairs: Sequence[Floats], statistic: Statistic) -> tuple[float, float] | None:
    """Return the statistic of both sides; None if a side has no values, or the baseline's is 0."""
    sides = [side[~np.isnan(side)] for side in np.concatenate(pairs, axis=1)] if pairs else []
    if not sides or not all(side.size for side in sides):
        return None
    ours, theirs = (statistic(side) for side in sides)
    return (ours, theirs) if theirs else None


def _intervals(
    ours: Sequence[Requests], theirs: Sequence[Requests], config: CompareConfig
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


ASK_SECONDS = 5.0
COUNTERS = {f"tercet_prefix_{what}_tokens_total": what for what in ("predicted", "delivered", "missing")}


async def prefix_counts(base_url: str) -> dict[str, int]:
    """Return the router's counters, summed over programs and engines.

    The dict is empty if the server does not have them or does not answer.
    """
    timeout, found = aiohttp.ClientTimeout(total=ASK_SECONDS), Counter[str]()
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{base_url.rstrip('/')}/metrics") as response,
        ):
            for family in text_string_to_metric_families(await response.text() if response.status == 200 else ""):
                for sample in (each for each in family.samples if each.name in COUNTERS):
                    found[COUNTERS[sample.name]] += round(sample.value)
    except (aiohttp.ClientError, OSError, ValueError, *UNREADABLE):
        return {}
    return found


def between(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return the growth of the counters between two reads; empty if nothing grew or the router was restarted."""
    grown = {what: tokens - before.get(what, 0) for what, tokens in after.items()}
    return grown if any(grown.values()) and min(grown.values()) >= 0 else {}


def words(counts: Mapping[str, int]) -> str:
    """Return the counts of a point as one sentence."""
    predicted, delivered, missing = (counts.get(what, 0) for what in COUNTERS.values())
    lacking = f", {missing} of the predicted ({missing / predicted:.0%}) were missing" if predicted else ""
    return f"picks predicted {predicted} prefix tokens in caches, engines found {delivered}{lacking}"


LEAD_SECONDS = 0.1
LAG_SECONDS = 0.05
FindModel = Callable[[str], str]


@dataclass(frozen=True)
class Contender:
    """The measured system of one label: a server, and the program that its requests name (None: no name)."""

    label: str
    base_url: str
    program: str | None = None


@dataclass(frozen=True)
class Cell:
    """One point to measure: round ``round`` of ``rounds`` of a contender under a load."""

    contender: Contender
    load: Load
    round: int = 0
    rounds: int = 1

    def __str__(self) -> str:
        return f"{self.contender.label}, {self.load}"


OnPoint = Callable[[Cell, Point, Summary], None]


@dataclass(frozen=True)
class Bench:
    """A configuration that is ready to run, with its targets by base URL and the model's vocabulary."""

    config: BenchConfig
    targets: Mapping[str, BenchTarget]
    vocabulary: Vocabulary
    headers: Mapping[str, str]

    def style(self, cell: Cell, salted: bool) -> Style:
        """Return the style of the requests of ``cell``. With ``salted``, they carry a cache salt."""
        config, contender = self.config, cell.contender
        target = self.targets[contender.base_url]
        program = {} if contender.program is None else {PROGRAM_HEADER: contender.program}
        return Style(
            target.base_url, target.model, self.vocabulary, config.prompt_as, config.ignore_eos, config.extra_body,
            {**self.headers, **program}, self._words(cell) if salted else None,
        )  # fmt: skip

    def plan(self, cell: Cell) -> list[Conversation]:
        """Return the conversations of ``cell``: equal lengths in a round, other words in each cell."""
        config = self.config
        wanted = config.requests_at(cell.load)
        lengths = f"{config.seed}/{cell.round}"
        return list(plan(config.phases, wanted, self.vocabulary, lengths, self._words(cell), config.num_warmups))

    def due(self, cell: Cell, conversations: Sequence[Conversation]) -> list[float] | None:
        """Return the time at which each conversation begins, in seconds; None for a closed loop."""
        config, rate = self.config, cell.load.request_rate
        if config.arrival == "closed":
            return None
        if config.arrival == "trace":
            return replayed([conversation.offset or 0.0 for conversation in conversations], rate)
        requests = sum(conversation.requests for conversation in conversations)
        # The rate counts requests, so conversations of several turns begin less often.
        starts = (rate or math.inf) * len(conversations) / max(1, requests)
        chance = Random(f"{config.seed}/{cell.round}/arrivals")
        return arrival_times(len(conversations), config.arrival, starts, config.burstiness, chance)

    def salted(self, cells: int) -> bool:
        """True if requests carry a cache salt: texts from a file are the same at every point, and would match."""
        fixed = any(isinstance(kind, ShareGPT) for phase in self.config.phases for kind in phase.mix)
        return fixed and cells > 1

    def _words(self, cell: Cell) -> str:
        return f"{self.config.seed}/{cell.round}/{cell}"


async def prepare(config: BenchConfig, contenders: Sequence[Contender], find_model: FindModel) -> Bench:
    """Query every target and load the tokenizer. Return the configuration, ready to run.

    ``find_model`` maps a model's name to its checkpoint or hub id. Raise :class:`~tercet.protocol.TercetError` if a
    target cannot be measured.
    """
    headers = dict(config.header)
    if (key := os.environ.get(OPENAI_KEY_VARIABLE)) and not any(name.lower() == "authorization" for name in headers):
        headers["authorization"] = f"Bearer {key}"
    urls = dict.fromkeys(contender.base_url for contender in contenders)
    targets = {url: await ask_target(url, config.model, headers) for url in urls}
    for url in urls:
        programs = [each.program for each in contenders if each.base_url == url and each.program is not None]
        await require_programs(url, programs, headers)
    model = find_model(config.tokenizer or next(iter(targets.values())).tokenizer)
    return Bench(config, targets, ModelVocabulary(model), headers)


class Experiment:
    """The measurement of cells, one after the other. :meth:`interrupt` ends it early and keeps the results so far."""

    def __init__(self, bench: Bench, cells: Sequence[Cell], on_point: OnPoint) -> None:
        self._bench = bench
        self._cells = cells
        self._on_point = on_point
        self._traffic: Traffic | None = None
        self.interrupted = False

    def interrupt(self) -> None:
        """Stop the experiment. A signal handler of the event loop may call this."""
        self.interrupted = True
        if self._traffic is not None:
            self._traffic.interrupt()

    async def run(self) -> list[Point]:
        """Measure and return one point per cell, in order. After :meth:`interrupt`, the last point is partial."""
        points: list[Point] = []
        for number, cell in enumerate(self._cells, start=1):
            if self.interrupted:
                break
            title = f"[{number}/{len(self._cells)}] {cell}" if len(self._cells) > 1 else str(cell)
            points.append(await self._measure(cell, title))
        return points

    async def _measure(self, cell: Cell, title: str) -> Point:
        bench, config = self._bench, self._bench.config
        conversations = bench.plan(cell)
        due = bench.due(cell, conversations)
        composers = compose(bench.style(cell, bench.salted(len(self._cells))), conversations, config.num_warmups)
        total = sum(conversation.requests for conversation in conversations)
        counted = await prefix_counts(cell.contender.base_url)
        with _Frozen():
            async with (
                Client(Clock() + LEAD_SECONDS, config.request_timeout) as client,
                LiveProgress(title, total) as progress,
                _Lag() as lag,
            ):
                self._traffic = Traffic(client, composers, due, cell.load.concurrency, progress)
                if self.interrupted:
                    self._traffic.interrupt()
                if due is None:
                    await asyncio.sleep(LEAD_SECONDS)
                before = time.process_time()
                records = await self._traffic.run()
                spent = time.process_time() - before
        summary = summarize(records, config.slo)
        at_once = cell.load.request_rate is not None and math.isinf(cell.load.request_rate)
        point = Point(
            label=cell.contender.label,
            program=cell.contender.program,
            request_rate=None if at_once else cell.load.request_rate,
            concurrency=cell.load.concurrency or (total if at_once else None),
            round=cell.round,
            metrics=summary.flat(),
            errors=summary.errors,
            client={"cpu_seconds": spent, **lag.flat()},
            prefix=between(counted, await prefix_counts(cell.contender.base_url)),
            partial=self._traffic.interrupted,
            records=tuple(records),
        )
        self._on_point(cell, point, summary)
        return point


class _Lag:
    """A monitor of the event loop's late wake-ups: an upper bound on the error of the recorded times."""

    async def __aenter__(self) -> _Lag:
        self._late: list[float] = []
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        while True:
            before = Clock()
            await asyncio.sleep(LAG_SECONDS)
            self._late.append(Clock() - before - LAG_SECONDS)

    def flat(self) -> dict[str, float]:
        """Return ``mean_loop_lag_ms``, ``p99_loop_lag_ms`` and ``max_loop_lag_ms``; empty for very short runs."""
        found = Distribution.of(self._late)
        flat = {} if found is None else found.flat("loop_lag")
        return {key: value for key, value in flat.items() if key.split("_")[0] in ("mean", "p99", "max")}


class _Frozen:
    """A context in which the garbage collector ignores the plan, while requests are timed."""

    def __enter__(self) -> None:
        self._frozen_before = gc.get_freeze_count()
        gc.collect()
        gc.freeze()

    def __exit__(self, *_: object) -> None:
        # Objects that the caller has frozen cannot be distinguished from the plan: they stay frozen.
        if not self._frozen_before:
            gc.unfreeze()
