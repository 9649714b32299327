"""Running a measurement in the foreground: its points as they come, Ctrl-C, the file at the end."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import uvloop

from tercet.bench.bench_config import SECRET_HEADERS, BenchConfig, CompareConfig
from tercet.bench.compare import ratios_of
from tercet.bench.experiment import Bench, Cell, Contender, Experiment, prepare
from tercet.bench.result_report import point_text, ratio_table
from tercet.bench.results import BenchResult, Point, command_line, machine, now, save_result, versions
from tercet.bench.summary import Summary
from tercet.cli.terminal import say
from tercet.cluster.model import resolve_model
from tercet.protocol import BadRequest, EngineError

CellsOf = Callable[[Bench], Sequence[Cell]]


def run_bench(config: BenchConfig, contenders: Sequence[Contender], cells_of: CellsOf, file: Path | None) -> None:
    """Measure, print every point, and write the file; exits with 130 when interrupted, after that.

    Raises :class:`~tercet.protocol.TercetError`, also when not one request succeeded.
    """
    file = file or Path(f"bench-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json")
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise BadRequest(f"--result {file}: must be a file in a directory that exists", "result")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcome = runner.run(_measure(config, contenders, cells_of))
    if not config.save_records:
        bare = tuple(msgspec.structs.replace(point, records=()) for point in outcome.points)
        outcome = msgspec.structs.replace(outcome, points=bare)
    save_result(outcome, file)
    if outcome.ratios:
        say("\n" + ratio_table(outcome.ratios))
    say(f"\nwritten to {file}")
    if outcome.partial:
        sys.exit(128 + signal.SIGINT)
    if not any(point.metrics.get("completed") for point in outcome.points):
        raise EngineError("every request failed; the file has the reason of each")


async def _measure(config: BenchConfig, contenders: Sequence[Contender], cells_of: CellsOf) -> BenchResult:
    created, on = now(), machine()
    bench = await prepare(config, contenders, lambda name: resolve_model(name, lambda line: say(f"  model: {line}")))
    cells = cells_of(bench)
    experiment = Experiment(bench, cells, _show)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        say("\nstopping; what was measured is kept (Ctrl-C again drops it)")
        experiment.interrupt()
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        points = await experiment.run()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    targets = {url: dict(target.about) for url, target in bench.targets.items()}
    first = next(iter(targets.values()))
    return BenchResult(
        created=created,
        command=command_line(sys.argv[1:], SECRET_HEADERS),
        config=config.public(),
        seed=config.seed,
        versions=versions(),
        machine=on,
        target=first if len(targets) == 1 else {**first, "others": list(targets.values())[1:]},
        partial=experiment.interrupted,
        points=tuple(points),
        ratios=tuple(ratios_of(points, config)) if isinstance(config, CompareConfig) else (),
    )


def _show(cell: Cell, point: Point, summary: Summary) -> None:
    number = f", round {cell.round + 1}" if cell.rounds > 1 else ""
    say(f"{cell}{number}\n{point_text(point, summary)}\n")
