"""``tercet chaos``: faults on purpose, on a simulated fleet or a real one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tercet.chaos.chaos_report import HEADINGS, ChaosResult, fault_rows, figures, violation_lines
from tercet.chaos.fault_schedule import KINDS, FaultSchedule, FleetShape, load_schedule, parse_kinds, plan_faults
from tercet.cli.terminal import note, require_folder, show_table
from tercet.protocol import BadRequest

NAMES = ", ".join(kind.replace("_", "-") for kind in KINDS)


def chaos(
    seed: Annotated[int, typer.Option(help="Faults and clients follow from it.")] = 0,
    minutes: Annotated[float, typer.Option(help="How long there are clients and faults.")] = 1.0,
    fleet: Annotated[
        str | None, typer.Option(metavar="PREFILL,DECODE", help="Engines of each role.", show_default="40,60")
    ] = None,
    faults: Annotated[
        str | None,
        typer.Option(metavar="KIND[,KIND...]", help=f"Of {NAMES}.", show_default="all that can happen there"),
    ] = None,
    without: Annotated[str | None, typer.Option(metavar="KIND[,KIND...]", help="All but these.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Faults a minute, while enough engines are well.", show_default="2000")
    ] = None,
    requests: Annotated[float | None, typer.Option(help="Requests a second.", show_default="20")] = None,
    patience: Annotated[float, typer.Option(help="Seconds for which a client may hear nothing.")] = 60.0,
    schedule: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Take the faults from a file that --save wrote.")
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the faults here before they begin.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the faults and do nothing.")] = False,
) -> None:
    """Break a simulated fleet under load, and check that nobody loses anything by it.

    The fleet runs in virtual time: the front door's service, its clients of engines and the engines' servers are those
    of production, over virtual sockets; engines are simulated. The same seed is the same run, whatever the machine. The
    clients' answers must be those of a run without faults, every request must end, and blocks, leases, sequences and
    connections must be back at the end. Exit status 1 if they are not.

    Examples:
    - `tercet chaos --seed 7 --minutes 5`
    - `tercet chaos --faults kill,cut --rate 500 --fleet 4,8`
    - `tercet chaos --seed 7 --plan`
    """
    prefill, decode = _counts(fleet or "40,60")
    _check(minutes, rate, requests, patience)
    for path, flag in ((save, "--save"),):
        require_folder(path, flag)
    from tercet.chaos.simulated_arena import SIMULATED_LOAD, SimulatedFleet, run_simulated

    logging.basicConfig(level=logging.CRITICAL)
    engines = SimulatedFleet(prefill=prefill, decode=decode)
    planned = _schedule(schedule, engines.shape(), seed, minutes, rate or 2000.0, faults, without)
    if save is not None:
        save.write_bytes(planned.to_json())
    if plan:
        for fault in planned.faults:
            typer.echo(str(fault))
        return
    load = msgspec.structs.replace(SIMULATED_LOAD, rate=requests or SIMULATED_LOAD.rate)
    result = run_simulated(engines, planned, load, patience, note)
    _report(result, _replay(locals()))


def _report(result: ChaosResult, replay: str) -> None:
    violations = result.violations
    show_table("faults, and the requests that they met", HEADINGS, fault_rows(result))
    for line in [*figures(result), *violation_lines(violations, result.seed, replay)]:
        typer.echo(line)
    if violations:
        raise typer.Exit(1)


def _replay(given: dict[str, object]) -> str:
    """The command that runs the same again."""
    defaults = {"patience": 60.0}
    shown = ("seed", "minutes", "fleet", "faults", "without", "rate", "requests", "patience", "schedule")
    flags = [(name, given[name]) for name in shown if given[name] not in (None, defaults.get(name))]
    words = [f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}" for name, value in flags]
    return " ".join(["tercet chaos", *words])


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
