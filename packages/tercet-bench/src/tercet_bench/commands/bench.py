"""``tercet bench``: measure a server, compare programs, draw the results, and make profiles of engines."""

from __future__ import annotations

import functools
import platform
import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

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
from tercet.cli.terminal import require_folder
from tercet.protocol import BadRequest
from tercet.protocol.wire import UNREADABLE
from tercet_bench.bench_config import OUTPUT, REQUESTS, BenchConfig, CompareConfig, ServeConfig, load_config
from tercet_lab.drawing import require_drawing
from tercet_lab.slo import limits_of

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
            metavar="FILE", help="File for one row for each request (.csv, or .parquet).", rich_help_panel=OUTPUT
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
                from tercet_lab.tables import require_table_file

                require_folder(records, "--records")
                require_table_file(records, "--records")
            command(found, result_filename, records)

        return taking(run, optional({**parameters_of(kind, by_variable=("base-url",)), **BY_HAND}))

    return decorate


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
    if measurement.engine and measurement.output is None:
        raise BadRequest("--output: is required; give a file for the profile", "--output")
    if not measurement.engine:
        require_defaults(measurement, "--engine", *(each.name for each in fields(measurement)))
    from tercet_bench.commands import bench_runs

    if measurement.engine and measurement.output is not None:
        bench_runs.measure_profile(name or measurement.output.stem, measurement, measurement.engine, measurement.output)
    else:
        bench_runs.show_profiles(name)


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
    from tercet_bench.commands import bench_runs

    bench_runs.serve(config, result, records)


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
    from tercet_bench.commands import bench_runs

    bench_runs.compare(config, result, records)


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
    from tercet_bench.commands import bench_runs

    bench_runs.report(files, figure or (), table, title, log=log)


bench.command()(profile)
