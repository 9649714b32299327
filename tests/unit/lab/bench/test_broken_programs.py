"""A simulation whose program raises ends with that error: no request is lost in silence."""

from __future__ import annotations

from itertools import count

import pytest

from tercet.programs import data_parallel
from tercet.programs.patterns import Answer
from tercet.protocol import Fleet, ProgramFailed, Request
from tercet_lab.bench.simulated.scenario import EngineGroup, FleetSpec, SyntheticWorkload
from tercet_lab.bench.simulated.virtual_run import run_once
from tercet_lab.sim import EngineOptions

FLEET = FleetSpec(engines=(EngineGroup(role="both"),))
WORK = SyntheticWorkload(rate=100, requests=20, input_mean=100, output_mean=5)


@pytest.mark.parametrize("number", [0, 3, 19])
def test_the_error_of_a_program_ends_the_simulation(number: int) -> None:
    """Of its first request, of one that others run next to, and of the last one."""
    numbers = count()

    async def program(request: Request, fleet: Fleet) -> Answer:
        if next(numbers) == number:
            raise ValueError("a bug")
        async for output in data_parallel(request, fleet):
            yield output

    with pytest.raises(ProgramFailed, match=r"ValueError: a bug \(.*test_broken_programs\.py, line \d+\)"):
        run_once(program, FLEET, "llama-3.1-8b-h100-tp1", EngineOptions(), WORK, 0)
