"""``tercet bench``: measures a server, compares programs, and draws what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tercet.bench.bench_config import CompareConfig, ServeConfig
from tercet.bench.compare import turns_of
from tercet.bench.experiment import Bench, Cell, Contender
from tercet.bench.result_report import draw, figure_of, markdown, require_drawing
from tercet.bench.results import load_results
from tercet.cli.bench_options import bench_command
from tercet.cli.bench_run import run_bench
from tercet.cli.bench_transfer import transfer
from tercet.cli.terminal import write_file

bench = typer.Typer(
    name="bench",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Measure any OpenAI endpoint, compare programs on the same engines, and draw the results.",
)
bench.command()(transfer)


@bench.command()
@bench_command(ServeConfig)
def serve(config: ServeConfig, result: Path | None) -> None:
    """Measure one server at one or more loads.

    TTFT, TPOT, ITL and end-to-end latency as `vllm bench serve` defines them, and once more from the moment at which a
    request should have been sent. Ctrl-C ends the run and keeps what was measured.

    Examples:
    - `tercet bench serve --request-rate 0.5,1,2 --num-prompts 50 --workload sonnet,input_len=512,output_len=64`
    - `tercet bench serve --arrival closed --concurrency 1,4,16 --endpoint chat --goodput ttft:500,tpot:50`
    - `tercet bench serve --arrival trace --workload mooncake,path=trace.jsonl,max_input_len=4000`
    - `tercet bench serve --request-rate 2 --workload sonnet,input_len=3000 --workload sonnet,output_len=400`
    """
    contender = Contender(config.label or config.program or "", config.base_url, config.program)

    def cells(bench: Bench) -> list[Cell]:
        label = contender.label or bench.targets[contender.base_url].model
        return [Cell(replace(contender, label=label), load) for load in config.loads]

    run_bench(config, [contender], cells, result)


@bench.command()
@bench_command(CompareConfig)
def compare(config: CompareConfig, result: Path | None) -> None:
    """Compare programs on the same engines, in interleaved rounds.

    Each request names its program in the header `x-tercet-program`: nothing is restarted between rounds. In a round all
    programs get the same arrival times and lengths, with words of their own, so that none finds another one's prefixes.
    The ratios have bootstrap confidence intervals; few rounds make them wide.

    Examples:
    - `tercet bench compare --program data_parallel --program disaggregated --request-rate 0.5,1 --rounds 5`
    - `tercet bench compare --program disaggregated --also peer=http://127.0.0.1:9000 --request-rate 1`
    """
    contenders = [Contender(name, config.base_url, name) for name in config.program]
    contenders += [Contender(name, url) for name, url in config.also.items()]
    run_bench(config, contenders, lambda _: _rounds(config, contenders), result)


@bench.command()
def report(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Results of serve, compare or sim.")],
    figure: Annotated[list[Path] | None, typer.Option(help="A figure to draw: .png, .svg or .pdf. Repeatable.")] = None,
    table: Annotated[Path | None, typer.Option(help="Write the Markdown here instead of printing it.")] = None,
    title: Annotated[str | None, typer.Option(help="Above the figure.")] = None,
) -> None:
    """Draw rate against TTFT, TPOT and JCT, mean and P99, with a line per program; and print the same as a table.

    Files of several runs go into one figure. Runs of one program at one load are pooled.

    Examples:
    - `tercet bench report run.json`
    - `tercet bench report dp.json pd.json --figure evaluation.svg --figure evaluation.png --table evaluation.md`
    """
    for file in figure or ():
        require_drawing(file)
    results = load_results(files)
    text = markdown(results)
    for file in figure or ():
        draw(figure_of(results), file, title)
    if table is None:
        typer.echo(text, nl=False)
    else:
        write_file(table, text.encode(), "--table")


def _rounds(config: CompareConfig, contenders: Sequence[Contender]) -> list[Cell]:
    by_label = {contender.label: contender for contender in contenders}
    order = turns_of(list(by_label), config.rounds, config.seed)
    return [Cell(by_label[label], load, number, config.rounds) for load in config.loads for number, label in order]
