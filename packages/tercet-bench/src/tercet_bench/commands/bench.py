"""``tercet bench``: measure a server, compare programs, draw the results, and make profiles of engines."""

from __future__ import annotations

import asyncio
import functools
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
import typer
import uvloop

from tercet.aio import signals_to
from tercet.cli.commands import Commands
from tercet.cli.setting_flags import (
    flags_as_records,
    flags_given,
    flags_of,
    given_as,
    optional,
    parameters_of,
    require_defaults,
    taking,
)
from tercet.cli.terminal import note, require_folder, say, show_table, write_file
from tercet.cluster.model import resolve_model
from tercet.protocol import BadRequest, EngineError
from tercet.protocol.entry_points import import_extra
from tercet.protocol.wire import UNREADABLE
from tercet.settings import SECRET_VARIABLE
from tercet.settings.engine_addresses import engine_address
from tercet.wire.client import HttpEngine
from tercet_bench.bench_config import (
    OUTPUT,
    REQUESTS,
    SECRET_HEADERS,
    BenchConfig,
    CompareConfig,
    ServeConfig,
    load_config,
)
from tercet_bench.bench_report import figure_of, markdown, point_text, program_served, ratio_table
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
from tercet_lab.drawing import require_drawing
from tercet_lab.run_files import RECORD_COLUMNS, add_records
from tercet_lab.sim import Profile, StepModel, load_profile, shipped_profiles
from tercet_lab.sim.step_times import Transfer, pairs_of
from tercet_lab.tables import Requests, Table, limits_of, require_table_file

SEVERAL = ("request_rate", "concurrency")
BY_HAND: dict[str, Any] = {
    "extra_body": Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help="Extra fields of every request's body, as a JSON object.", rich_help_panel=REQUESTS
        ),
    ],
    "goodput": Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:MS[,...]",
            help="SLO in milliseconds, as in `ttft:500,tpot:50,e2el:5000`.",
            rich_help_panel=OUTPUT,
        ),
    ],
    "result_filename": Annotated[
        Path | None,
        typer.Option(help="JSON file for the results.", show_default="bench-<time>.json", rich_help_panel=OUTPUT),
    ],
    "records": Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File for one row for each request (.csv, or .parquet).",
            rich_help_panel=OUTPUT,
        ),
    ],
    "config": Annotated[
        Path | None,
        typer.Option("--config", help="YAML file with the same keys; flags override it.", rich_help_panel=OUTPUT),
    ],
}


BenchRun = Callable[[Any, Path | None, Path | None], None]


def bench_command(kind: type[BenchConfig]) -> Callable[[BenchRun], Callable[..., None]]:
    """Return a decorator for a command that takes a configuration of ``kind``, and the paths of results and records.

    Flags override the file. ``TERCET_URL`` is the only environment variable that is read: the command line and the file
    determine a measurement.
    """

    def decorate(command: BenchRun) -> Callable[..., None]:
        @functools.wraps(command)
        def run(
            result_filename: Path | None = None, records: Path | None = None, config: Path | None = None, **given: Any
        ) -> None:  # fmt: skip
            for name in SEVERAL:
                given[name] = [part.strip() for item in given[name] or () for part in item.split(",")]
            if given["extra_body"] is not None:
                try:
                    given["extra_body"] = msgspec.json.decode(given["extra_body"], type=dict[str, Any])
                except UNREADABLE as error:
                    raise BadRequest(f"--extra-body: must be a JSON object: {error}", "extra-body") from error
            if given["goodput"] is not None:
                given["goodput"] = limits_of(given["goodput"])
            with given_as({**flags_of(kind), "goodput": "--goodput"}):
                found = load_config(kind, config, flags_given(kind, given))
            if records is not None:
                require_folder(records, "--records")
                require_table_file(records, "--records")
            command(found, result_filename, records)

        return taking(run, optional({**parameters_of(kind, by_variable=("base-url",)), **BY_HAND}))

    return decorate


HEADINGS = ["name", "device", "KV tokens", "prefill 512", "prefill 3000", "decode 1", "decode 64", "fit error"]
CONTEXT = 1024
DEVICE = platform.machine()


@dataclass(frozen=True)
class MeasurementFlags:
    """An engine to measure, how it is measured, and the file of its profile."""

    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="URL of an idle engine to measure. With a second one, transfers are measured and, on the same host, "
            "how much longer steps take while both compute.",
        ),
    ] = None
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the new profile; required with --engine.")
    ] = None
    router: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="URL of a router before the engines; the time that it adds to a request is measured."
        ),
    ] = None
    device: Annotated[str, typer.Option(help="Name of the device in the profile.")] = DEVICE
    max_step_tokens: Annotated[int, typer.Option(help="Value of the engine's `--max-num-batched-tokens` (tokens).")] = (
        512
    )
    repeats: Annotated[int, typer.Option(help="Number of measurements of each step; the median is used.")] = 3
    bandwidth: Annotated[float, typer.Option(help="Bandwidth between engines, if not measured (bytes per second).")] = (
        1e9
    )
    latency: Annotated[
        float, typer.Option(help="Time from the last byte to the answer, if not measured (seconds).")
    ] = 0.0005

    def plan(self, name: str) -> MeasurementPlan:
        """Return the plan of the measurement of a profile ``name``; raise :class:`~tercet.protocol.BadRequest`."""
        return MeasurementPlan(
            name=name,
            device=self.device,
            max_step_tokens=self.max_step_tokens,
            same_host=len({urlsplit(url).hostname for url in self.engine or ()}) < len(self.engine or ()),
            router=self.router.rstrip("/") if self.router else None,
            repeats=self.repeats,
            seed=time.time_ns(),
        )

    def command(self) -> str:
        """Return the command line that repeats the measurement."""
        engines = [part for url in self.engine or () for part in ("--engine", url)]
        engines += ["--router", self.router] if self.router else []
        sizes = ["--max-step-tokens", str(self.max_step_tokens), "--repeats", str(self.repeats)]
        return shlex.join(["tercet", "bench", "profile", *engines, *sizes])


@flags_as_records
def profile(
    name: Annotated[
        str | None,
        typer.Argument(help="Built-in profile or JSON file to print; with --engine, the name of the new profile."),
    ] = None,
    *,
    measurement: MeasurementFlags,
) -> None:
    """List the step-time profiles of simulated engines, print one, or measure one on a running engine.

    The list has step times in milliseconds; decode steps have 1024 tokens of context. A measurement takes some minutes.

    Examples:
    - `tercet bench profile`
    - `tercet bench profile llama-3.1-8b-h100-tp1`
    - `tercet bench profile --engine http://127.0.0.1:8001 --engine http://127.0.0.1:8002 -o mine.json`
    - `tercet sim --profile mine.json --option max_num_batched_tokens=512 --fleet both=2@here --request-rate 1`
    """
    if measurement.engine:
        if measurement.output is None:
            raise BadRequest("--output: is required; give a file for the profile", "--output")
        _measure_and_write(name or measurement.output.stem, measurement, measurement.engine, measurement.output)
        return
    require_defaults(measurement, "--engine", *(each.name for each in fields(measurement)))
    if name is None:
        show_table("profiles", HEADINGS, [_row(load_profile(each)) for each in shipped_profiles()])
    else:
        with given_as({"profile": "NAME"}):
            found = load_profile(name)
        typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode())


@given_as({"engine": "--engine", "repeats": "--repeats", "max_step_tokens": "--max-step-tokens"})
def _measure_and_write(name: str, measurement: MeasurementFlags, urls: list[str], output: Path) -> None:
    """Measure a running engine's steps, and fit a profile to them."""
    require_folder(output, "--output")
    import_extra("scipy.optimize", "tercet bench profile --engine")
    if len(urls) > 2:
        raise BadRequest("--engine: at most two are allowed: the measured engine and a receiver", "--engine")
    plan = measurement.plan(name)
    link = Transfer(bytes_per_second=measurement.bandwidth, latency=measurement.latency)
    began = time.monotonic()
    measured = asyncio.run(_measured_at(urls, plan))
    found = profile_from(measured, plan, measurement.command(), link)
    write_file(output, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n", "--output")
    errors = ", ".join(f"{kind} {error:.1%}" for kind, error in found.provenance.fit_error.items())
    typer.echo(f"{output}: in {time.monotonic() - began:.0f} s; mean error of the fit: {errors}")


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


CellsOf = Callable[[Bench], Sequence[Cell]]

bench = Commands(
    name="bench",
    help="Measure any OpenAI endpoint, compare programs on the same engines, draw the results, and make profiles.",
)


@bench.command()
@bench_command(ServeConfig)
def serve(config: ServeConfig, result: Path | None, records: Path | None) -> None:
    """Measure one server at one or more loads.

    Reports TTFT, TPOT, ITL and end-to-end latency as `vllm bench serve` defines them, and also counted from the time at
    which a request should have been sent. Ctrl-C ends the run and keeps its results.

    Examples:
    - `tercet bench serve --request-rate 0.5,1,2 --num-prompts 50 --workload sonnet,input_len=512,output_len=64`
    - `tercet bench serve --arrival closed --concurrency 1,4,16 --goodput ttft:500,tpot:50`
    - `tercet bench serve --arrival trace --workload mooncake,path=trace.jsonl,max_input_len=4000`
    - `tercet bench serve --request-rate 2 --workload sonnet,input_len=3000 --workload sonnet,output_len=400`
    """
    contender = Contender(config.label or config.program or "", config.base_url, config.program)

    def cells(bench: Bench) -> list[Cell]:
        target = bench.targets[contender.base_url]
        label = contender.label or program_served(target.about) or target.model
        return [Cell(replace(contender, label=label), load) for load in config.loads]

    _measure_and_report(config, [contender], cells, result, records)


@bench.command()
@bench_command(CompareConfig)
def compare(config: CompareConfig, result: Path | None, records: Path | None) -> None:
    """Compare programs on the same engines, in interleaved rounds.

    Each request names its program in the header `x-tercet-program`: nothing is restarted between rounds. In a round all
    programs get the same arrival times and lengths, with different words, so that they share no prefixes. The ratios
    have bootstrap confidence intervals; few rounds make them wide.

    Examples:
    - `tercet bench compare --program data_parallel --program disaggregated --request-rate 0.5,1 --rounds 5`
    - `tercet bench compare --program disaggregated --also peer=http://127.0.0.1:9000 --request-rate 1`
    """
    contenders = [Contender(name, config.base_url, name) for name in config.program]
    contenders += [Contender(name, url) for name, url in config.also.items()]
    by_label = {contender.label: contender for contender in contenders}
    order = turns_of(list(by_label), config.rounds, config.seed)
    cells = [Cell(by_label[label], load, number, config.rounds) for load in config.loads for number, label in order]
    _measure_and_report(config, contenders, lambda _: cells, result, records)


@bench.command()
def report(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Result files of serve, compare or sim.")],
    figure: Annotated[
        list[Path] | None, typer.Option(help="File of a figure to draw: .png, .svg or .pdf. Repeatable.")
    ] = None,
    table: Annotated[
        Path | None, typer.Option(help="File for the table in Markdown, which is otherwise printed.")
    ] = None,
    title: Annotated[
        str | None,
        typer.Option(help="Title above the figure.", show_default="the model, the workload and the arrivals"),
    ] = None,
    log: Annotated[bool, typer.Option("--log", help="Draw latencies on logarithmic axes.")] = False,
) -> None:
    """Draw TTFT, TPOT, JCT and rates over load, with a line per program, and print them as a table.

    Files of several runs go into one figure. Runs with the same program, model, machine, engines and workload are
    pooled. Other runs are separate lines, whose labels say how they differ. A figure whose name ends with `-dark`, such
    as `rates-dark.svg`, is for dark pages.

    Examples:
    - `tercet bench report run.json`
    - `tercet bench report dp.json pd.json --figure evaluation.svg --figure evaluation.png --table evaluation.md`
    """
    for file in figure or ():
        require_drawing(file, "--figure")
        require_folder(file, "--figure")
    results = [load_result(file) for file in files]
    text = markdown(results)
    for file in figure or ():
        draw(figure_of(results), file, title, log=log)
    if table is None:
        typer.echo(text, nl=False)
    else:
        write_file(table, text.encode(), "--table")


bench.command()(profile)


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
