"""A simulation as its user describes it: everything is text or numbers, so that it can be repeated and varied."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tercet.bench.simulated.report import Point, Report, point_of
from tercet.bench.simulated.run import run_once
from tercet.bench.simulated.spec import parse_fleet
from tercet.bench.simulated.workload import SyntheticWorkload
from tercet.bench.summary import Slo
from tercet.programs import load_program
from tercet.protocol import BadRequest
from tercet.scheduling import load_scheduling
from tercet.sim import EngineOptions, load_profile, options_from


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """All arguments of a run but its rate, which ``workload`` leaves open (its own is ignored)."""

    program: str
    program_args: dict[str, str]
    fleet: str
    profile: str
    options: dict[str, str]
    workload: SyntheticWorkload
    seed: int = 0
    slo: Slo | None = None
    scheduling: str | None = None

    def point(self, rate: float, note: Callable[[str], None] = lambda _: None) -> Point:
        """Run it at a rate; ``note`` is told how fast that went.

        Raises :class:`~tercet.protocol.BadRequest` for whatever is wrong with the arguments, and the program's own
        when it refuses every request.
        """
        program, spec = load_program(self.program, self.program_args), parse_fleet(self.fleet)
        options, workload = (
            options_from(EngineOptions(), self.options),
            msgspec.structs.replace(self.workload, rate=rate),
        )
        # Read anew for each run: its plugins remember requests.
        scheduling = None if self.scheduling is None else load_scheduling(Path(self.scheduling).expanduser())
        began, worked = time.perf_counter(), time.process_time()
        outcome = run_once(program, spec, self.profile, options, workload, self.seed, scheduling)
        took, cpu = time.perf_counter() - began, time.process_time() - worked
        simulated = max(outcome.ended, default=0.0)
        pace = f"{simulated / took:.1f} times real time, {simulated / cpu:.1f} by CPU time"
        note(f"rate {rate:g}: {simulated:.1f} s in {took:.1f} s ({cpu:.1f} s of CPU): {pace}")
        point = point_of(rate, outcome, self.slo)
        if outcome.first_error is not None:
            if isinstance(outcome.first_error, BadRequest) and not point.summary.completed:
                raise outcome.first_error
            note(f"rate {rate:g}: {point.summary.failed} failed, the first one: {outcome.first_error}")
        return point

    def report(self, rates: list[float], label: str, note: Callable[[str], None] = lambda _: None) -> Report:
        """Run it at each rate; ``label`` names its line in figures."""
        model = load_profile(self.profile).name
        points = tuple(self.point(rate, note) for rate in rates)
        return Report(
            label=label, program=self.program, arguments=self.arguments(), seed=self.seed, model=model, points=points
        )

    def arguments(self) -> dict[str, Any]:
        """What the numbers depend on, but for the rate."""
        given = msgspec.to_builtins(self)
        del given["workload"]["rate"]
        return given
