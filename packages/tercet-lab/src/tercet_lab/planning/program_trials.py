"""Trials of other programs with the present fleet and load, in simulation; a better one is only proposed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tercet.decisions.planning import Expected, FleetPlan
from tercet.programs import load_program
from tercet.protocol import BadRequest
from tercet_lab.planning.forecast import Forecast
from tercet_lab.planning.planner import Evaluate

GAIN = 0.02
"""Least gain of a program in requests within the objectives, as a share; at least two standard deviations."""


@dataclass(frozen=True)
class NamedProgram:
    """A program with its parameters, as ``disaggregated,min_send=64``."""

    program: str
    args: Mapping[str, str]

    def __str__(self) -> str:
        """Return the command that changes to this program."""
        return " ".join([f"tercet program {self.program}", *(f"--program-arg {k}={v}" for k, v in self.args.items())])


def parse_program(text: str) -> NamedProgram:
    """Parse ``PROGRAM,KEY=VALUE``; raise :class:`~tercet.protocol.BadRequest` for an unknown program or parameter."""
    program, *given = text.split(",")
    if not all("=" in each for each in given):
        raise BadRequest(f"planner-program: is {text!r}; give PROGRAM or PROGRAM,KEY=VALUE", "planner-program")
    args = dict(each.split("=", 1) for each in given)
    load_program(program, args)
    return NamedProgram(program, args)


class ProgramTrials:
    """Trials of the programs ``texts``, one in turn at each :meth:`look`, against the program in use."""

    def __init__(self, texts: tuple[str, ...], evaluate: Callable[[NamedProgram], Evaluate]) -> None:
        self._programs = [parse_program(each) for each in texts]
        self._turn = itertools.cycle(range(max(1, len(self._programs))))
        self._evaluate = evaluate

    def look(self, used: NamedProgram, plan: FleetPlan, forecast: Forecast) -> tuple[NamedProgram, Expected] | None:
        """Simulate the program whose turn it is; return it with its expected result if it gains, else None."""
        if not self._programs or not forecast.rate:
            return None
        other = self._programs[next(self._turn)]
        if other == used:
            return None
        now, then = (self._evaluate(each)(plan, forecast) for each in (used, other))
        return (other, then) if then.attainment >= now.attainment + max(GAIN, 2 * then.chance) else None
