"""``tercet chaos``: inject faults into a simulated fleet or a real one."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer
from msgspec import Meta

from tercet.cli.setting_flags import settings_command
from tercet.cli.terminal import note, require_folder, show_table, write_file
from tercet.cluster.up_config import UpConfig
from tercet.protocol import BadRequest
from tercet.settings import Setting, Settings, declared
from tercet_checks.chaos.adversary import NO_TRICKS, TRICKS, PlannedTrick, TrickKind, parse_tricks, plan_tricks
from tercet_checks.chaos.chaos_report import (
    HEADINGS,
    KINDS,
    MOVE_HEADINGS,
    TRICK_HEADINGS,
    ChaosResult,
    FaultKind,
    FaultSchedule,
    FleetShape,
    fault_rows,
    figures,
    load_schedule,
    move_rows,
    parse_kinds,
    plan_faults,
    trick_rows,
    violation_lines,
)

if TYPE_CHECKING:
    from tercet_checks.chaos.arena import LoadShape, Note

Positive = Annotated[float, Meta(gt=0, lt=1e9)]
NAMES = ", ".join(kind.replace("_", "-") for kind in KINDS)
TRICK_NAMES = ", ".join(kind.replace("_", "-") for kind in TRICKS)
NO_FAULTS = "none"


class ChaosConfig(Settings, frozen=True):
    """Settings of one run: its fleet, its faults and its clients."""

    real: Annotated[bool, Setting("Run real processes on this machine instead of a simulated fleet.")] = False
    seed: Annotated[int, Setting("Seed of the faults and the clients.")] = 0
    minutes: Annotated[Positive, Setting("Duration of the run.", unit="minutes")] = 1.0
    fleet: Annotated[
        str | None, Setting("Number of engines of each role.", metavar="PREFILL,DECODE", default="40,60; --real: 1,1")
    ] = None
    faults: Annotated[
        str | None,
        Setting(
            f"Kinds of faults: {NAMES}; or {NO_FAULTS}.",
            metavar="KIND[,KIND...]",
            default="all kinds that this fleet supports",
        ),
    ] = None
    without: Annotated[str | None, Setting("Kinds of faults to leave out.", metavar="KIND[,KIND...]")] = None
    fault_rate: Annotated[
        Positive | None, Setting("Faults per minute, while enough engines are healthy.", default="2000; --real: 6")
    ] = None
    adversary: Annotated[
        str | None,
        Setting(f"Tricks of a hostile client: {TRICK_NAMES}; or {NO_TRICKS}.", metavar="KIND[,KIND...]", default="all"),
    ] = None
    adversary_rate: Annotated[
        Positive | None, Setting("Tricks of the hostile client per minute.", default="60; --real: 12")
    ] = None
    request_rate: Annotated[Positive | None, Setting("Requests per second.", default="20; --real: 0.6")] = None
    patience: Annotated[Positive, Setting("Longest allowed gap in a client's stream.", unit="seconds")] = 60.0
    schedule: Annotated[str | None, Setting("Read the faults from a file that --save wrote.", metavar="FILE")] = None
    save: Annotated[str | None, Setting("Write the faults to a file before the run.", metavar="FILE")] = None
    plan: Annotated[bool, Setting("Print the faults without running them.")] = False
    simulate: Annotated[
        str | None, Setting("Profile of simulated engines, each in its own process; needs --real.", metavar="PROFILE")
    ] = None
    log_dir: Annotated[str | None, Setting("Folder for logs; needs --real.", metavar="FOLDER", default="no logs")] = (
        None
    )
    engine_args: Annotated[tuple[str, ...], Setting("Flags of every vLLM engine; they follow `--`.", flag="")] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.real and (self.simulate or self.log_dir or self.engine_args):
            raise BadRequest("--simulate, --log-dir and vLLM's flags need --real", "--real")

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of prefill and of decode engines; raises :class:`~tercet.protocol.BadRequest`."""
        found = re.fullmatch(r"(\d+),(0*[1-9]\d*)", self.fleet or ("1,1" if self.real else "40,60"))
        if found is None:
            raise BadRequest(f"--fleet: {self.fleet!r} is not PREFILL,DECODE, such as 4,8", "--fleet")
        return int(found[1]), int(found[2])

    @property
    def tricks(self) -> tuple[TrickKind, ...]:
        """The kinds of tricks of the hostile client; raises :class:`~tercet.protocol.BadRequest`."""
        return TRICKS if self.adversary is None else parse_tricks(self.adversary)

    @property
    def replay(self) -> str:
        """The command line that repeats this run."""
        words = ["tercet", "chaos"]
        for each in declared(type(self)):
            value = getattr(self, *each.path)
            if each.key not in ("save", "log-dir", "engine-args") and value not in (each.default, False):
                shown = [] if value is True else [f"{value:g}" if isinstance(value, float) else str(value)]
                words += [each.flag, *shown]
        return " ".join([*words, *(("--", *self.engine_args) if self.engine_args else ())])


@settings_command(ChaosConfig, rest="engine-args")
def chaos(config: ChaosConfig) -> None:
    """Break a fleet under load, and check that clients get every token once.

    The clients' answers must equal those of a run without faults, every request must end, and all blocks, leases,
    sequences, connections and processes must be released at the end. Otherwise the exit status is 1. Meanwhile a
    hostile client sends requests that could stop all others: too many sequences, long bodies, structures that take long
    to compile, bodies and heads without an end. Each must be refused or cut off, and must not delay the others.

    Without --real the fleet runs in virtual time: the router's service, its clients of engines and the engines'
    servers are the production code, over virtual sockets; engines are simulated. The same seed gives the same run on
    any machine. With --real the processes of `tercet up` get the signals, in float32, behind proxies that can be cut;
    a seed then determines the faults and the clients, but not the results.

    Examples:
    - `tercet chaos --seed 7 --minutes 5`
    - `tercet chaos --faults kill,cut --fault-rate 500 --fleet 4,8`
    - `tercet chaos --faults none --adversary long-bodies,leaving --adversary-rate 300`
    - `tercet chaos --seed 7 --plan`
    - `tercet chaos --real --minutes 10`
    - `tercet chaos --real --simulate llama-3.1-8b-h100-tp1 --fleet 2,3 --fault-rate 20`
    """
    site = _real(config) if config.real else _simulated(config)
    planned = _schedule(config, site)
    tricks = plan_tricks(config.seed, planned.seconds, config.adversary_rate or site.tricks, config.tricks)
    if config.save is not None:
        require_folder(Path(config.save), "--save")
        write_file(Path(config.save), planned.to_json(), "--save")
    if config.plan:
        for each in sorted([*planned.faults, *tricks], key=lambda each: each.at):
            typer.echo(str(each))
        return
    load = msgspec.structs.replace(site.load, rate=config.request_rate or site.load.rate)
    result = site.run(planned, load, config.patience, note, tricks)
    violations = result.violations
    show_table("faults, and the requests that they met", HEADINGS, fault_rows(result))
    if result.tricks:
        show_table("a hostile client", TRICK_HEADINGS, trick_rows(result))
    if result.moves:
        show_table("moves, by reason", MOVE_HEADINGS, move_rows(result))
    for line in [*figures(result), *violation_lines(violations, result.seed, config.replay)]:
        typer.echo(line)
    if violations:
        raise typer.Exit(1)


class _Site(NamedTuple):
    """A fleet for faults: its shape, default faults and tricks per minute, its load, and the function that runs it."""

    shape: FleetShape
    rate: float
    tricks: float
    load: LoadShape
    run: Callable[[FaultSchedule, LoadShape, float, Note, Sequence[PlannedTrick]], ChaosResult]


def _simulated(config: ChaosConfig) -> _Site:
    from tercet_checks.chaos.simulated_arena import SIMULATED_LOAD, SimulatedFleet, run_simulated

    logging.basicConfig(level=logging.CRITICAL)
    prefill, decode = config.counts
    fleet = SimulatedFleet(prefill=prefill, decode=decode)
    return _Site(fleet.shape(), 2000.0, 60.0, SIMULATED_LOAD, partial(run_simulated, fleet))


def _real(config: ChaosConfig) -> _Site:
    from tercet.cluster.model import resolve_model
    from tercet_checks.chaos.real_arena import REAL_LOAD, real_shape, run_real

    prefill, decode = config.counts
    up = UpConfig(
        prefill=prefill, decode=decode, port=0, dtype="float32", simulate=config.simulate, log_dir=config.log_dir,
        engine_args=config.engine_args,
    )  # fmt: skip

    def run(*given: Any) -> ChaosResult:
        return run_real(up, resolve_model(up.model), *given)  # a plan needs no model

    return _Site(real_shape(up), 6.0, 12.0, REAL_LOAD, run)


def _schedule(config: ChaosConfig, site: _Site) -> FaultSchedule:
    shape = site.shape
    if config.schedule is not None:
        planned = msgspec.structs.replace(load_schedule(Path(config.schedule)), seed=config.seed)
        for fault in planned.faults:
            if fault.engine not in shape.engines or fault.kind not in shape.kinds:
                raise BadRequest(f"--schedule: this fleet has no {fault.engine}, or no fault {fault.kind}")
        return planned
    if config.faults == NO_FAULTS:
        return FaultSchedule(config.seed, config.minutes * 60, ())
    kinds = shape.kinds if config.faults is None else parse_kinds(config.faults)
    left_out = () if config.without is None else parse_kinds(config.without)
    chosen: list[FaultKind] = [kind for kind in kinds if kind not in left_out]
    return plan_faults(config.seed, shape, config.minutes, config.fault_rate or site.rate, chosen)
