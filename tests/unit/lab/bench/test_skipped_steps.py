"""Steps in which nothing is decided are skipped by simulated engines, and no program can tell."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest

from tercet.fleet import EngineFleet, FleetView, Member
from tercet.programs import Program, balanced, data_parallel, disaggregated, run_program
from tercet.protocol import Output, Request
from tercet_lab.sim import EngineOptions, Network, SimEngine, run_virtual
from tercet_lab.sim.step_selection import DecodingBatch
from tests.unit.lab.sim.models import is_empty, profile_of
from tests.unit.lab.sim.test_sequences import TIMES


class Heard(NamedTuple):
    """What came of a run: when each token of each request came, and what the engines did."""

    times: dict[str, list[float]]
    counts: list[tuple[int, int, int, int]]
    busy: list[float]


class Sink:
    """Notes when outputs come."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.over = False
        self.times: list[float] = []

    def put(self, output: Output) -> None:
        self.times += [self._clock()] * len(output.token_ids)
        self.over = output.finished

    async def until_asked(self) -> None: ...


def run(seed: int, program: Program, every: int) -> Heard:
    """Requests at random times, of which a fifth are given up; two engines with room for some of them."""

    async def main() -> Heard:
        loop, chance, network = asyncio.get_running_loop(), random.Random(seed), Network()
        options = EngineOptions(stream_every=every, max_num_batched_tokens=96, max_num_seqs=12)
        engines = [SimEngine(name, profile_of(TIMES, 60), network, options) for name in ("p", "d")]
        roles = ("prefill", "decode")
        members = [Member(e.name, f"sim://{e.name}", role, e) for e, role in zip(engines, roles, strict=True)]
        fleet = EngineFleet(members, clock=loop.time, seed=seed)
        times: dict[str, list[float]] = {}

        async def serve(request: Request, at: float, patience: float | None) -> None:
            await asyncio.sleep(at)
            sink = Sink(loop.time)
            try:
                async with asyncio.timeout(patience):
                    await run_program(program(request, FleetView(fleet)), sink)
            except TimeoutError:
                pass
            else:
                times[request.seq_id] = sink.times

        async with asyncio.TaskGroup() as tasks:
            for index in range(25):
                prompt = (
                    *range(64 * chance.randrange(2)),
                    *range(index * 1000, index * 1000 + chance.randrange(1, 150)),
                )
                params = {"max_tokens": chance.randrange(1, 90)}
                patience = chance.uniform(0.1, 3) if chance.random() < 0.2 else None
                at = chance.uniform(0, 30)
                tasks.create_task(
                    serve(Request(seq_id=str(index), prompt=prompt, sampling_params=params), at, patience)
                )
        await asyncio.sleep(100)
        assert all(is_empty(engine) for engine in engines)
        counters = [engine.counters for engine in engines]
        counts = [(c.steps, c.prefill_tokens, c.decode_tokens, c.preemptions) for c in counters]
        return Heard(times, counts, [c.busy for c in counters])

    return run_virtual(main())


@pytest.mark.slow
@pytest.mark.parametrize("program", [data_parallel, disaggregated, balanced])
@pytest.mark.parametrize("every", [0, 1, 7])
@pytest.mark.parametrize("seed", range(4))
def test_every_token_comes_when_it_would_step_by_step(
    program: Program, every: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipping = run(seed, program, every)
    monkeypatch.setattr(DecodingBatch, "ticks_to_due", lambda _: 1)
    stepping = run(seed, program, every)
    assert skipping.counts == stepping.counts
    assert skipping.busy == pytest.approx(stepping.busy)
    assert skipping.times.keys() == stepping.times.keys()
    for name, times in stepping.times.items():
        assert skipping.times[name] == pytest.approx(times, abs=1e-9)
