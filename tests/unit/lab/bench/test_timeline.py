"""Timelines of simulated runs, and steps in which nothing is decided: neither changes a figure."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest

from tercet.fleet import EngineFleet, FleetView, Member
from tercet.programs import Program, balanced, data_parallel, disaggregated, run_program
from tercet.protocol import Output, Request
from tercet.router.page.records import DEAD, Frame
from tercet_lab.bench.results import load_result
from tercet_lab.bench.simulated import Experiment, Fleet, Record, SyntheticWorkload
from tercet_lab.bench.simulated import recording as timelines
from tercet_lab.bench.simulated.simulation import SimulationReport
from tercet_lab.sim import EngineOptions, Network, SimEngine, run_virtual
from tercet_lab.sim.step_selection import DecodingBatch
from tests.unit.lab.sim.models import is_empty, profile_of
from tests.unit.lab.sim.test_reports import TIMES

RATE = 20.0


def simulation(fleet: str = "1P2D", requests: int = 60) -> Experiment:
    return Experiment(
        program="disaggregated",
        fleet=Fleet(fleet, profile="llama-3.1-8b-h100-tp1"),
        work=SyntheticWorkload(rate=1, requests=requests),
    )


def recorded(every: float | None, **more: Any) -> SimulationReport:
    return recording(simulation(**more), every).report([RATE], "x")


def recording(made: Experiment, every: float | None) -> Experiment:
    return msgspec.structs.replace(made, record=Record(frames_every=every))


def frames_of(report: SimulationReport) -> list[Frame]:
    (frames,) = msgspec.json.decode(report.to_json())["timelines"].values()
    return msgspec.convert(frames, list[Frame])


def test_recording_changes_no_figure_and_is_the_same_each_time(tmp_path: Any) -> None:
    without, once, twice = recorded(None), recorded(0.1), recorded(0.1)
    assert once.to_json() == twice.to_json()
    found = msgspec.json.decode(once.to_json())
    del found["timelines"]
    assert found == msgspec.json.decode(without.to_json())
    (tmp_path / "run.json").write_bytes(once.to_json())
    assert load_result(tmp_path / "run.json").points[0].metrics["completed"] == 60


def test_a_timeline_has_every_request_and_token() -> None:
    report = recorded(0.1)
    frames = frames_of(report)
    assert frames[0].engines is not None
    assert [seat.name for seat in frames[0].engines] == ["prefill-0", "decode-0", "decode-1"]
    assert frames[0].about is not None
    assert [frame.t for frame in frames] == sorted(frame.t for frame in frames)
    points = [values for frame in frames for point in frame.points for values in point.programs.values()]
    assert sum(values.done for values in points) == 60
    assert sum(values.tokens for values in points) == 60 * 128
    assert {span.verb for frame in frames for span in frame.spans} == {"prep_recv", "remote_send", "start_generate"}


@pytest.mark.slow
def test_a_long_run_has_frames_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    every = frames_of(recorded(0.01))
    monkeypatch.setattr(timelines, "MOST_FRAMES", 70)
    fewer = frames_of(recorded(0.01))
    assert len(every) > 200
    assert 35 <= len(fewer) <= 70
    assert fewer[-1].t == every[-1].t
    assert sum(len(frame.points) for frame in fewer) <= len(every)


def test_a_dead_engine_is_dead_in_the_frames(tmp_path: Any) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("engines: [{role: both, count: 2}]\nfaults: [{engine: both-1, kind: die, at: 0.5, down: 1.0}]\n")
    made = msgspec.structs.replace(simulation(str(file)), program="data_parallel")
    frames = frames_of(recording(made, 0.1).report([RATE], "x"))
    states = [(frame.t, row[7]) for frame in frames for row in frame.loads if row[0] == 1]
    assert any(state & DEAD for t, state in states if 0.5 <= t <= 1.6)
    assert not states[-1][1] & DEAD


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
