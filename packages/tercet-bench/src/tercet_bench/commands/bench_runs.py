"""What ``tercet bench`` runs: a measurement with its report and files, and the making of a profile."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import typer
import uvloop

from tercet.aio.tasks import signals_to
from tercet.cli.setting_flags import given_as
from tercet.cli.terminal import note, require_folder, say, show_table, write_file
from tercet.cluster.model import resolve_model
from tercet.protocol import BadRequest, EngineError
from tercet.protocol.entry_points import import_extra
from tercet.settings import SECRET_VARIABLE
from tercet.settings.engine_addresses import engine_address
from tercet.wire.client import HttpEngine
from tercet_bench.bench_config import SECRET_HEADERS, BenchConfig, CompareConfig, ServeConfig
from tercet_bench.bench_report import figure_of, markdown, point_text, program_served, ratio_table
from tercet_bench.commands.bench import MeasurementFlags
from tercet_bench.experiment import Bench, Cell, Contender, Experiment, prepare, ratios_of, turns_of
from tercet_bench.figures import draw
from tercet_bench.step_measurement import Measured, MeasurementPlan, Meter, profile_from
from tercet_lab.bench.results import (
    BenchResult,
    Point,
    Summary,
    command_line,
    load_result,
    machine,
    now,
    save_result,
    versions,
)
from tercet_lab.run_files import RECORD_COLUMNS, add_records
from tercet_lab.sim import Profile, StepModel, load_profile, shipped_profiles
from tercet_lab.sim.step_times import Transfer, pairs_of
from tercet_lab.tables import Requests, Table

CellsOf = Callable[[Bench], Sequence[Cell]]

HEADINGS = ["name", "device", "KV tokens", "prefill 512", "prefill 3000", "decode 1", "decode 64", "fit error"]
CONTEXT = 1024


@given_as({"engine": "--engine", "repeats": "--repeats", "max_step_tokens": "--max-step-tokens"})
def measure_profile(name: str, measurement: MeasurementFlags, urls: list[str], output: Path) -> None:
    """Measure a running engine's steps, and fit a profile to them."""
    require_folder(output, "--output")
    import_extra("scipy.optimize", "tercet bench profile --engine")
    if len(urls) > 2:
        raise BadRequest("--engine: at most two are allowed: the measured engine and a receiver", "--engine")
    plan = MeasurementPlan(
        name=name,
        device=measurement.device,
        max_step_tokens=measurement.max_step_tokens,
        same_host=len({urlsplit(url).hostname for url in urls}) < len(urls),
        router=measurement.router.rstrip("/") if measurement.router else None,
        repeats=measurement.repeats,
        seed=time.time_ns(),
    )
    link = Transfer(bytes_per_second=measurement.bandwidth, latency=measurement.latency)
    began = time.monotonic()
    measured = asyncio.run(_measured_at(urls, plan))
    found = profile_from(measured, plan, measurement.command(), link)
    write_file(output, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n", "--output")
    errors = ", ".join(f"{kind} {error:.1%}" for kind, error in found.provenance.fit_error.items())
    typer.echo(f"{output}: in {time.monotonic() - began:.0f} s; mean error of the fit: {errors}")


def show_profiles(name: str | None) -> None:
    """Print the profile ``name``, or a table of all."""
    if name is None:
        show_table("profiles", HEADINGS, [_row(load_profile(each)) for each in shipped_profiles()])
    else:
        with given_as({"profile": "NAME"}):
            found = load_profile(name)
        typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode())


async def _measured_at(urls: list[str], plan: MeasurementPlan) -> Measured:
    async with AsyncExitStack() as stack:
        addresses = [engine_address(url, index) for index, url in enumerate(urls)]
        engines = [
            await stack.enter_async_context(HttpEngine(each.url, each.url, secret=os.environ.get(SECRET_VARIABLE, "")))
            for each in addresses
        ]
        receiver = engines[1] if len(engines) > 1 else None
        return await Meter(engines[0], receiver, plan, note).measure()


def _row(found: Profile) -> list[str]:
    model = StepModel(found.steps)
    prefills = [model.step(tokens, pairs_of(0, tokens), 0, 0) for tokens in (512, 3000)]
    decodes = [model.step(0, 0, batch, batch * CONTEXT) for batch in (1, 64)]
    errors = found.provenance.fit_error.values()
    worst = f"{max(errors):.1%}" if errors else "-"
    times = [f"{seconds * 1000:.1f}" for seconds in (*prefills, *decodes)]
    tokens = found.total_blocks * found.block_size
    return [found.name, found.device, f"{tokens:,}", *times, worst]


def serve(config: ServeConfig, result: Path | None, records: Path | None) -> None:
    """Measure one server, and report the result."""
    contender = Contender(config.label or config.program or "", config.base_url, config.program)

    def cells(bench: Bench) -> list[Cell]:
        target = bench.targets[contender.base_url]
        label = contender.label or program_served(target.about) or target.model
        return [Cell(replace(contender, label=label), load) for load in config.loads]

    _measure_and_report(config, [contender], cells, result, records)


def compare(config: CompareConfig, result: Path | None, records: Path | None) -> None:
    """Measure the programs in turns, and report their results and ratios."""
    contenders = [Contender(name, config.base_url, name) for name in config.program]
    contenders += [Contender(name, url) for name, url in config.also.items()]
    by_label = {contender.label: contender for contender in contenders}
    order = turns_of(list(by_label), config.rounds, config.seed)
    cells = [Cell(by_label[label], load, number, config.rounds) for load in config.loads for number, label in order]
    _measure_and_report(config, contenders, lambda _: cells, result, records)


def report(files: Sequence[Path], figures: Sequence[Path], table: Path | None, title: str | None, *, log: bool) -> None:
    """Draw the results in ``files``, and print or write their table."""
    results = [load_result(file) for file in files]
    text = markdown(results)
    for file in figures:
        draw(figure_of(results), file, title, log=log)
    if table is None:
        typer.echo(text, nl=False)
    else:
        write_file(table, text.encode(), "--table")


def _measure_and_report(
    config: BenchConfig, contenders: Sequence[Contender], cells_of: CellsOf, file: Path | None, records: Path | None
) -> None:
    """Measure, print every point, and write the file; then exit with 130 or 143 if a signal stopped the run.

    Raises :class:`~tercet.protocol.TercetError`, also if all requests failed.
    """
    file = file or Path(f"bench-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json")
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise BadRequest(f"--result-filename {file}: must be a file in an existing directory", "result-filename")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcome, asked = runner.run(_measure(config, contenders, cells_of))
    if records is not None:
        found = Table(RECORD_COLUMNS)
        for point in outcome.points:
            requests = Requests.of_rows(point.records)
            requests.judge(config.slo)
            place = (point.label, point.request_rate, config.seed, point.round, point.concurrency)
            add_records(found, requests, *place)
        found.write(records)
    save_result(outcome, file)
    if outcome.ratios:
        say("\n" + ratio_table(outcome.ratios))
    say(f"\nwritten to {file}")
    if asked:
        sys.exit(128 + asked[0])
    if not any(point.metrics.get("completed") for point in outcome.points):
        raise EngineError("every request failed; see the reasons in the file")


async def _measure(
    config: BenchConfig, contenders: Sequence[Contender], cells_of: CellsOf
) -> tuple[BenchResult, list[int]]:
    """Return the results, and the signals that ended the run, if any."""
    created, on = now(), machine()
    bench = await prepare(config, contenders, lambda name: resolve_model(name, lambda line: say(f"  model: {line}")))
    cells = cells_of(bench)
    experiment = Experiment(bench, cells, _show)
    running = asyncio.ensure_future(experiment.run())

    def stop() -> None:
        say("\nstopping; the results so far are kept (Ctrl-C again discards them)")
        experiment.interrupt()

    with signals_to(stop, running.cancel) as asked:
        try:
            points = await running
        except asyncio.CancelledError:
            sys.exit(128 + asked[-1] if asked else 1)
    targets = {url: dict(target.about) for url, target in bench.targets.items()}
    first = next(iter(targets.values()))
    result = BenchResult(
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
    return result, asked


def _show(cell: Cell, point: Point, summary: Summary) -> None:
    number = f", round {cell.round + 1}" if cell.rounds > 1 else ""
    say(f"{cell}{number}\n{point_text(point, summary)}\n")
