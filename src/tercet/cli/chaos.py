"""``tercet chaos``: faults on purpose, on a simulated fleet or a real one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple, cast

import msgspec
import typer

from tercet.chaos.chaos_report import HEADINGS, ChaosResult, fault_rows, figures, violation_lines
from tercet.chaos.client_load import LoadShape
from tercet.chaos.fault_schedule import KINDS, FaultSchedule, FleetShape, load_schedule, parse_kinds, plan_faults
from tercet.cli.setting_flags import VLLMArgs
from tercet.cli.terminal import note, require_folder, show_table, write_file
from tercet.cluster.up_config import UpConfig
from tercet.protocol import BadRequest

PATIENCE = 60.0
NAMES = ", ".join(kind.replace("_", "-") for kind in KINDS)


def chaos(
    real: Annotated[
        bool, typer.Option("--real", help="Real processes on this machine instead of a simulated fleet.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Faults and clients follow from it.")] = 0,
    minutes: Annotated[float, typer.Option(help="How long there are clients and faults.")] = 1.0,
    fleet: Annotated[
        str | None,
        typer.Option(metavar="PREFILL,DECODE", help="Engines of each role.", show_default="40,60; --real: 1,1"),
    ] = None,
    faults: Annotated[
        str | None,
        typer.Option(metavar="KIND[,KIND...]", help=f"Of {NAMES}.", show_default="all that can happen there"),
    ] = None,
    without: Annotated[str | None, typer.Option(metavar="KIND[,KIND...]", help="All but these.")] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Faults a minute, while enough engines are well.", show_default="2000; --real: 6"),
    ] = None,
    requests: Annotated[float | None, typer.Option(help="Requests a second.", show_default="20; --real: 0.6")] = None,
    patience: Annotated[float, typer.Option(help="Seconds for which a client may hear nothing.")] = PATIENCE,
    schedule: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Take the faults from a file that --save wrote.")
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the faults here before they begin.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the faults and do nothing.")] = False,
    simulate: Annotated[
        str | None,
        typer.Option(metavar="PROFILE", help="With --real: engines that are simulated, each in a process of its own."),
    ] = None,
    log_dir: Annotated[Path | None, typer.Option(help="With --real: where logs go.", show_default="nowhere")] = None,
    vllm_args: VLLMArgs = None,
) -> None:
    """Break a fleet under load, and check that nobody loses anything by it.

    The clients' answers must be those of a run without faults, every request must end, and blocks, leases, sequences,
    connections and processes must be back at the end. Exit status 1 if they are not.

    Without --real the fleet runs in virtual time: the front door's service, its clients of engines and the engines'
    servers are those of production, over virtual sockets; engines are simulated. The same seed is the same run, on any
    machine. With --real `tercet up`'s processes get the signals, in float32, behind proxies that can be cut; the
    faults and the clients are the same for a seed, and what comes of them is not.

    Examples:
    - `tercet chaos --seed 7 --minutes 5`
    - `tercet chaos --faults kill,cut --rate 500 --fleet 4,8`
    - `tercet chaos --seed 7 --plan`
    - `tercet chaos --real --minutes 10`
    - `tercet chaos --real --simulate llama-3.1-8b-h100-tp1 --fleet 2,3 --rate 20`
    """
    prefill, decode = _counts(fleet or ("1,1" if real else "40,60"))
    _check(minutes, rate, requests, patience)
    require_folder(save, "--save")
    if not real and (simulate or log_dir or vllm_args):
        raise BadRequest("--simulate, --log-dir and vLLM's flags go with --real", "--real")
    arena = _real(prefill, decode, simulate, log_dir, vllm_args) if real else _simulated(prefill, decode)
    planned = _schedule(schedule, arena.shape, seed, minutes, rate or arena.rate, faults, without)
    if save is not None:
        write_file(save, planned.to_json(), "--save")
    if plan:
        for fault in planned.faults:
            typer.echo(str(fault))
        return
    load = msgspec.structs.replace(arena.load, rate=requests or arena.load.rate)
    _report(arena.run(planned, load, patience), _replay(locals()))


class Arena(NamedTuple):
    """Where it happens: what can, how often it does if nobody says, and how to run it."""

    shape: FleetShape
    rate: float
    load: LoadShape
    run: Callable[[FaultSchedule, LoadShape, float], ChaosResult]


def _simulated(prefill: int, decode: int) -> Arena:
    from tercet.chaos.simulated_arena import SIMULATED_LOAD, SimulatedFleet, run_simulated

    logging.basicConfig(level=logging.CRITICAL)
    fleet = SimulatedFleet(prefill=prefill, decode=decode)

    def run(schedule: FaultSchedule, load: LoadShape, patience: float) -> ChaosResult:
        return run_simulated(fleet, schedule, load, patience, note)

    return Arena(fleet.shape(), 2000.0, SIMULATED_LOAD, run)


def _real(prefill: int, decode: int, simulate: str | None, log_dir: Path | None, vllm_args: list[str] | None) -> Arena:
    from tercet.chaos.real_arena import REAL_LOAD, real_shape, run_real
    from tercet.cluster.model import resolve_model

    config = UpConfig(
        prefill=prefill, decode=decode, port=0, dtype="float32", simulate=simulate, engine_args=tuple(vllm_args or ()),
        log_dir=None if log_dir is None else str(log_dir),
    )  # fmt: skip

    def run(schedule: FaultSchedule, load: LoadShape, patience: float) -> ChaosResult:
        return run_real(config, resolve_model(config.model), schedule, load, patience, note)

    return Arena(real_shape(config), 6.0, REAL_LOAD, run)


def _report(result: ChaosResult, replay: str) -> None:
    violations = result.violations
    show_table("faults, and the requests that they met", HEADINGS, fault_rows(result))
    for line in [*figures(result), *violation_lines(violations, result.seed, replay)]:
        typer.echo(line)
    if violations:
        raise typer.Exit(1)


def _replay(given: dict[str, object]) -> str:
    """The command that runs the same again."""
    defaults = {"patience": PATIENCE}
    shown = ("seed", "minutes", "fleet", "faults", "without", "rate", "requests", "patience", "schedule", "simulate")
    values = [(name, given[name]) for name in shown if given[name] not in (None, defaults.get(name))]
    words = [f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}" for name, value in values]
    flags = cast("list[str] | None", given["vllm_args"])
    last = ["--", *flags] if flags else []
    return " ".join(["tercet chaos", *(["--real"] if given["real"] else []), *words, *last])


def _schedule(
    file: Path | None,
    shape: FleetShape,
    seed: int,
    minutes: float,
    rate: float,
    faults: str | None,
    without: str | None,
) -> FaultSchedule:
    if file is not None:
        planned = msgspec.structs.replace(load_schedule(file), seed=seed)
        for fault in planned.faults:
            if fault.engine not in shape.engines or fault.kind not in shape.kinds:
                raise BadRequest(f"--schedule: this fleet has no {fault.engine}, or {fault.kind} cannot happen to it")
        return planned
    kinds = shape.kinds if faults is None else parse_kinds(faults)
    left_out = () if without is None else parse_kinds(without)
    return plan_faults(seed, shape, minutes, rate, [kind for kind in kinds if kind not in left_out])


def _counts(given: str) -> tuple[int, int]:
    first, comma, second = given.partition(",")
    if not (comma and first.isdecimal() and second.isdecimal() and int(second)):
        raise BadRequest(f"--fleet: {given!r} is not PREFILL,DECODE, such as 4,8", "--fleet")
    return int(first), int(second)


def _check(minutes: float, rate: float | None, requests: float | None, patience: float) -> None:
    for flag, value in (("minutes", minutes), ("rate", rate), ("requests", requests), ("patience", patience)):
        if value is not None and not 0 < value < 1e9:
            raise BadRequest(f"--{flag}: must be greater than 0, is {value:g}", f"--{flag}")
