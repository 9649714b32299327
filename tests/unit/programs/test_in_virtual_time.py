"""Every program over simulated engines, and `auto` beside the others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import aclosing
from statistics import fmean
from typing import cast

import msgspec
import pytest

from tercet.decisions.cost import RouteDecision
from tercet.fleet import EngineFleet, FleetView, Member, Trace
from tercet.programs import BUILT_IN, load_program, outputs_of
from tercet.protocol import Request
from tercet_lab.bench.simulated.scenario import SyntheticWorkload, parse_fleet, requests_of
from tercet_lab.bench.simulated.virtual_run import run_requests
from tercet_lab.sim import EngineOptions, Network, SimEngine, load_profile, run_virtual

LLAMA = "llama-3.1-70b-fp8-h100-tp4"
SMOLLM = "smollm2-135m-cpu"
Phase = tuple[int, int]


def arrivals(rate: float, requests: int, *phases: Phase) -> Iterator[tuple[float, Request]]:
    began = when = 0.0
    for number, (prompt, answer) in enumerate(phases):
        workload = SyntheticWorkload(
            rate=rate, requests=requests // len(phases), input_mean=prompt, output_mean=answer, input_dev=prompt / 10
        )
        for after, request in requests_of(workload, number):
            when = began + after
            yield when, msgspec.structs.replace(request, seq_id=f"{number}-{request.seq_id}")
        began = when


def mean_jct(program: str, profile: str, fleet: str, rate: float, *phases: Phase, **args: str) -> float:
    options = EngineOptions(max_num_batched_tokens=512 if profile == SMOLLM else 8192)
    served = load_program(program, args)
    outcome = run_requests(served, parse_fleet(fleet), profile, options, arrivals(rate, 300, *phases), 20, 1)
    assert not outcome.failures
    return fmean(end - sent for end, sent in zip(outcome.requests["ended"], outcome.requests["sent"], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("fleet", ["1P1D", "both=1", "prefill=2,decode=3"])
@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_program_serves_every_request(name: str, fleet: str) -> None:
    if fleet == "both=1" and name in ("balanced", "cache_bypass", "disaggregated"):
        fleet = "both=2"  # these send, and an engine does not send to itself
    outcome = run_requests(
        load_program(name), parse_fleet(fleet), LLAMA, EngineOptions(), arrivals(4, 60, (500, 20), (50, 100))
    )
    assert not outcome.failures
    assert outcome.fallbacks == 0
    assert not any(math.isnan(first) for first in outcome.requests["first_token"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile", "rate", "phases"),
    [
        (LLAMA, 6, [(3000, 100)]),
        (LLAMA, 8, [(200, 400)]),
        (SMOLLM, 0.3, [(1500, 16)]),
        (SMOLLM, 0.8, [(64, 200)]),
        (SMOLLM, 0.4, [(64, 200), (1500, 16)]),
    ],
)
@pytest.mark.parametrize("fleet", ["1P1D", "both=2"])
def test_auto_is_close_to_the_best_static_program(profile: str, rate: float, phases: list[Phase], fleet: str) -> None:
    best = min(
        mean_jct("data_parallel", profile, fleet, rate, *phases),
        mean_jct("data_parallel", profile, fleet, rate, *phases, pick="least_loaded"),
        mean_jct("disaggregated", profile, fleet, rate, *phases),
        mean_jct("balanced", profile, fleet, rate, *phases),
    )
    assert mean_jct("auto", profile, fleet, rate, *phases) <= 1.05 * best


@pytest.mark.slow
def test_auto_is_ahead_when_the_mix_changes_half_way() -> None:
    phases = [(200, 400), (3000, 50)]
    static = ("data_parallel", "disaggregated", "balanced")
    best = min(mean_jct(name, LLAMA, "both=2", 10, *phases) for name in static)
    assert mean_jct("auto", LLAMA, "both=2", 10, *phases) < best


@pytest.mark.slow
def test_auto_finds_engines_that_are_slower() -> None:
    """One engine of four is three times as slow: it gets the least."""
    assert _shares(slow=3.0)["engine-3"] < 0.6 * _shares(slow=1.0)["engine-3"]


def _shares(slow: float) -> dict[str, float]:
    decisions = run_virtual(_decisions(slow))
    chosen = [decision.chosen.decode for decision, _ in decisions]
    return {name: chosen.count(name) / len(chosen) for name in set(chosen)}


@pytest.mark.slow
def test_what_auto_predicts_is_about_what_is_measured() -> None:
    decisions = run_virtual(_decisions(slow=1.0))[50:]
    assert len(decisions) > 100
    errors = sorted(abs(measured / decision.chosen.ttft - 1) for decision, measured in decisions)
    assert errors[len(errors) // 2] < 0.2


async def _decisions(slow: float) -> list[tuple[RouteDecision, float]]:
    """What was decided over four engines, of which the last may be slow, and the TTFT that came of it."""
    network, profile, loop = Network(), load_profile(LLAMA), asyncio.get_running_loop()
    scales = [1.0, 1.0, 1.0, slow]
    engines = [
        SimEngine(f"engine-{n}", profile, network, EngineOptions(prefill_scale=scale, decode_scale=scale))
        for n, scale in enumerate(scales)
    ]
    members = [Member(engine.name, "", "both", engine) for engine in engines]
    fleet, found = EngineFleet(members, clock=loop.time, seed=0), list[tuple[RouteDecision, float]]()

    async def serve(request: Request) -> None:
        trace, began, first = Trace(), loop.time(), 0.0
        async for _ in outputs_of(BUILT_IN["auto"](request, FleetView(fleet, trace))):
            first = first or loop.time()
        assert trace.decision is not None
        found.append((trace.decision, first - began))

    async with asyncio.TaskGroup() as tasks:
        for when, request in arrivals(6, 300, (1500, 100)):
            await asyncio.sleep(when - loop.time())
            tasks.create_task(serve(request))
    for member in members:
        assert fleet.costs.work(member.name).idle
    return found


@pytest.mark.slow
def test_an_objective_for_the_first_token_is_kept_where_it_can_be() -> None:
    """Prompts among long answers: without an objective some wait so that decodes are spared."""
    plain = _first_tokens({})
    kept = _first_tokens({"ttft": "0.4"})
    late = [sum(first > 0.4 for first in firsts) for firsts in (plain, kept)]
    assert late[1] <= late[0]


def _first_tokens(args: dict[str, str]) -> list[float]:
    outcome = run_requests(
        load_program("auto", args), parse_fleet("both=2"), LLAMA, EngineOptions(), arrivals(6, 300, (3000, 100)), 20, 1
    )
    return [first - sent for first, sent in zip(outcome.requests["first_token"], outcome.requests["sent"], strict=True)]


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_cancelled_at_any_time_engines_are_empty_again(name: str) -> None:
    assert run_virtual(_cancel(name))


async def _cancel(name: str) -> bool:
    network, profile, loop = Network(), load_profile(LLAMA), asyncio.get_running_loop()
    engines = [SimEngine(role, profile, network, EngineOptions()) for role in ("prefill", "decode")]
    members = [Member(engine.name, "", cast("object", engine.name), engine) for engine in engines]  # type: ignore[arg-type]
    fleet = EngineFleet(members, clock=loop.time, seed=0)

    async def serve(request: Request) -> None:
        async with aclosing(outputs_of(BUILT_IN[name](request, fleet))) as outputs:
            async for _ in outputs:
                pass

    tasks = [asyncio.create_task(serve(request)) for _, request in arrivals(1, 40, (2000, 50))]
    for number, task in enumerate(tasks):
        loop.call_later(0.05 * number, task.cancel)
    await asyncio.wait(tasks)
    await asyncio.sleep(1.0)
    for member in members:
        assert (member.in_flight, member.in_flight_tokens) == (0, 0)
        assert fleet.costs.work(member.name).idle
    return not any(engine.busy for engine in engines)


@pytest.mark.slow
def test_auto_goes_where_the_prompt_is_cached() -> None:
    """Sixteen prefixes over four engines: each is computed about once, and not on every engine."""
    computed: dict[str, int] = {}
    for name in ("auto", "data_parallel"):
        workload = SyntheticWorkload(rate=4, requests=200, input_mean=2000, output_mean=20, prefixes=16, prefix=1800)
        outcome = run_requests(
            load_program(name), parse_fleet("both=4"), LLAMA, EngineOptions(), requests_of(workload, 0)
        )
        assert not outcome.failures
        computed[name] = outcome.counts["prefill_tokens"]
    assert computed["auto"] < 0.8 * computed["data_parallel"]


@pytest.mark.parametrize("program", ["fetch", "auto"])
def test_prefixes_that_others_hold_are_pulled_and_not_computed(program: str) -> None:
    """Forty documents, asked about in turn; the least busy engine of six rarely has the one that it is asked about."""
    workload = SyntheticWorkload(rate=6, requests=400, input_mean=6300, output_mean=60, prefixes=40, prefix=6000)
    spec, profile = parse_fleet("both=6"), "llama-3.1-8b-h100-tp1"

    def served(name: str, **args: str) -> tuple[int, float]:
        found = run_requests(load_program(name, args), spec, profile, EngineOptions(), requests_of(workload, 1), 0, 1)
        assert not found.failures
        assert found.fallbacks == 0
        ttft = fmean(
            first - sent for first, sent in zip(found.requests["first_token"], found.requests["sent"], strict=True)
        )
        return found.counts["prefill_tokens"], ttft

    computed, ttft = served("data_parallel", pick="least_loaded")
    fewer, sooner = served(program)
    assert fewer < 0.5 * computed
    assert sooner < 0.8 * ttft
