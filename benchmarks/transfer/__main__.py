"""``python -m benchmarks.transfer``: the cost of KV transfers on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from benchmarks.command_line import names_in, numbers_in, run
from benchmarks.transfer.cases import KIB, MIB, Table, cases
from benchmarks.transfer.interference import MEMCPY, Interference, measure_interference
from benchmarks.transfer.measurement import BACKENDS, failures, idle_cpu, measure, ratios, report, rows
from benchmarks.transfer.transfer_figure import draw_transfer

from tercet.cli.terminal import progress, require_folder, say, show_table
from tercet.protocol import TransferFailed
from tercet.settings import require_url
from tercet.transport import TransportSettings
from tercet_lab.bench.results import three_digits, where_and_when
from tercet_lab.drawing import require_drawing


def transfer(
    chunk: Annotated[str, typer.Option(help="Sizes of chunks (a block of one layer) in KiB, separated by commas.")] = (
        "6,24,96,256,1024"
    ),
    total: Annotated[
        str, typer.Option(help="Amounts of data per transfer in MiB, separated by commas.")
    ] = "1,16,64,256",
    backend: Annotated[str, typer.Option(help="Transports of Tercet to measure, separated by commas.")] = ",".join(
        BACKENDS
    ),
    streams: Annotated[int, typer.Option(min=1, max=64, help="Connections per peer, for `tcp`.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds. Each round has every way once.")] = 7,
    engine: Annotated[
        str | None,
        typer.Option(help="URL of a running engine, to measure its decode steps with and without receiving."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=8, help="Number of tokens to decode in each round, with `--engine`.")
    ] = 100,
    result_filename: Annotated[Path | None, typer.Option(help="JSON file for all results.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="File for a figure of the rates (.png, .svg, .pdf); needs matplotlib.")
    ] = None,
) -> None:
    """Measure the rates of KV transfers between two processes of this machine, for all ways in one run.

    The ways are: plain `memcpy` by one thread; plain sockets with 1, 2 and 4 streams, with contiguous memory, with the
    same chunks as the other ways, and with checks of their content; each of Tercet's backends (a whole send, from
    opening to acknowledgement); NIXL and Mooncake called directly. Then the CPU use of an idle pair of ranks is
    measured.

    Cells are medians, in GB/s (10^9 bytes per second). A way that is not available is left out, and named with the
    remedy.
    """
    require_folder(result_filename, "--result-filename")
    if plot is not None:
        require_folder(plot, "--plot")
        require_drawing(plot, "--plot")
    if engine is not None:
        require_url(engine, "--engine")
    sizes = cases(numbers_in("--chunk", chunk, KIB), numbers_in("--total", total, MIB))
    backends = names_in("--backend", backend, BACKENDS)
    with progress("starting") as tell:
        found = measure(sizes, backends, rounds, streams, tell)
    # No spinner here: its CPU time would be measured too.
    idle = idle_cpu([name for name in backends if name in found.ways], streams, say)
    slowed = {} if engine is None else _interference(engine.rstrip("/"), backends, rounds, tokens, streams)
    _show(found, idle, slowed)
    if result_filename is not None:
        report(found, idle, slowed).save(result_filename)
    if plot is not None:
        draw_transfer(found, plot, where_and_when())


def _show(found: Table, idle: dict[str, float | str], interference: dict[str, Interference | str]) -> None:
    if found.results:
        show_table("GB/s", *rows(found))
    if "tcp" in found.ways:
        show_table("tcp over plain sockets of the same rounds: median (quartiles)", *ratios(found))
    for way, why in failures(found).items():
        say(f"{way} was not measured: {why}")
    for way, cores in idle.items():
        said = f"{three_digits(cores * 100)}% of a core" if isinstance(cores, float) else cores
        say(f"CPU of an idle pair of ranks over {way}: {said}")
    for way, slowed in interference.items():
        during = "next to another process's memcpy" if way == MEMCPY else f"while receiving over {way}"
        say(f"decode steps {during}: {_told(slowed)}")


def _told(found: Interference | str) -> str:
    if isinstance(found, str):
        return found
    alone, receiving = found.step_alone * 1e3, found.step_receiving * 1e3
    return (
        f"{three_digits(receiving)} ms at {three_digits(found.gb_per_s)} GB/s, {three_digits(alone)} ms alone "
        f"(x {three_digits(found.slowdown)})"
    )


def _interference(
    engine: str, backends: list[str], rounds: int, tokens: int, streams: int
) -> dict[str, Interference | str]:
    """Measure the slowdown of the engine's decode steps by each backend and by a plain copy; a text is a failure."""
    found: dict[str, Interference | str] = {}
    with progress("starting") as tell:
        for name in (MEMCPY, *backends):
            tell(f"decode steps of {engine} while it receives over {name}")
            settings = None if name == MEMCPY else TransportSettings(name, streams=streams)
            try:
                found[name] = measure_interference(engine, rounds, tokens, settings)
            except TransferFailed as error:
                found[name] = error.message
    return found


if __name__ == "__main__":
    run(transfer, "benchmarks.transfer")
