"""The policies that ``--planner`` names: simulate, oracle (which knows the trace), or a user's function.

They simulate a fleet under a load by the router's own code in virtual time. Other programs are tried in the same way
with the present fleet and load; a better one is only proposed.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tercet.decisions.planning import Expected, FleetPlan, Observed, ObservedRequest, Policy, WantedPlan
from tercet.decisions.scheduling.assembly import load_module, user_file
from tercet.fleet.policy_views import BLOCK, block_names
from tercet.programs import load_program
from tercet.protocol import BadRequest, EngineError, Request
from tercet.settings.fleet_settings import Objectives
from tercet_lab.advice import ProfileCapacity
from tercet_lab.bench.simulated.scenario import EngineGroup, FleetSpec
from tercet_lab.bench.simulated.virtual_run import run_requests
from tercet_lab.planner_settings import PlannerSettings
from tercet_lab.sim import EngineOptions
from tercet_lab.sim.engine_options import max_tokens_of
from tercet_lab.slo import Slo
from tercet_planner.forecast import Forecast
from tercet_planner.planner import Evaluate, Planner

MEASURED_S = 30.0
"""Seconds of traffic that are measured, after a warm-up as long as answers take."""
LONGEST_WARM_UP_S = 60.0
MOST_REQUESTS = 4000
"""Most requests of one simulation; a higher load is simulated for a shorter time."""
FEWEST_MEASURED = 200
"""Fewest requests that are measured; a lower load is measured for a longer time."""
SHARED = 3
"""Number of requests of the sample with the same block, from which on later requests are expected to share it."""
_TOKENS = 256


class FleetSimulator:
    """A simulator of a program on equal engines; implements :data:`~tercet_planner.planner.Evaluate`.

    Each simulation runs in its own thread, and the caller waits for it: a virtual clock in the caller's thread stands
    still meanwhile. Equal arguments give equal results. ``requests`` counts the simulated requests.
    """

    def __init__(
        self,
        program: str | Callable[..., Any],
        profile: str,
        options: EngineOptions,
        objectives: Objectives,
        args: Mapping[str, str] | None = None,
        seed: int = 0,
    ) -> None:
        self._program, self._args = program, dict(args or {})
        self._profile = profile
        self._options = options
        self._objectives = objectives
        self._seed = seed
        self.requests = 0

    def become(self, program: str, args: Mapping[str, str], options: EngineOptions, objectives: Objectives) -> None:
        """Simulate this program, these engines and these objectives from now on."""
        self._program, self._args, self._options, self._objectives = program, dict(args), options, objectives

    def __call__(self, plan: FleetPlan, forecast: Forecast) -> Expected:
        """Simulate ``plan`` under ``forecast``; raise :class:`~tercet.protocol.TercetError` if nothing is measured."""
        with ThreadPoolExecutor(1, "planner") as thread:
            return thread.submit(self._run, plan, forecast).result()

    def _run(self, plan: FleetPlan, forecast: Forecast) -> Expected:
        # Nine of ten answers end at the objective's TPOT within this time, with 2 s for the prefill.
        tokens = sorted(each.output_tokens for each in forecast.sample)
        longest_answer_s = 2.0 + tokens[int(0.9 * (len(tokens) - 1))] * (self._objectives.tpot or 0.05)
        warm_up_s = min(LONGEST_WARM_UP_S, 1.2 * longest_answer_s)
        measured_s = max(MEASURED_S, FEWEST_MEASURED / forecast.rate)
        length = min(warm_up_s + measured_s, MOST_REQUESTS / forecast.rate)
        begin = min(warm_up_s, length * 2 / 3)
        requests = list(traffic(forecast, length, self._seed))
        before = sum(when < begin for when, _ in requests)
        groups = (EngineGroup(role="prefill", count=plan.prefill), EngineGroup(role="decode", count=plan.decode))
        found = run_requests(
            load_program(self._program, self._args), FleetSpec(engines=groups), self._profile, self._options, requests,
            before, self._seed,
        )  # fmt: skip
        self.requests += len(requests)
        # The enclosing run may collect garbage rarely, and a simulation leaves gigabytes of prompts.
        gc.collect(1)
        if not len(found.requests):
            raise EngineError("the simulation measured no request")
        met = found.requests.meets(Slo(ttft=self._objectives.ttft, tpot=self._objectives.tpot))
        p99 = float(np.percentile(np.where(found.requests["ok"], found.requests.ttft, 1e9), 99))
        return Expected(float(met.mean()), p99, forecast.rate, len(met))


def traffic(forecast: Forecast, length: float, seed: int) -> Iterator[tuple[float, Request]]:
    """Yield ``(time, request)`` for ``length`` seconds: the sample in repeated rounds, scaled to the forecast's rate.

    Blocks that at least :data:`SHARED` requests of the sample share are equal in all rounds; others are new in each.
    """
    sample = forecast.sample
    often = Counter(block for each in sample for block in each.blocks)
    offsets = [each.at - sample[0].at for each in sample]
    span = offsets[-1] * (len(sample) + 1) / len(sample) if offsets[-1] > 0 else 1.0
    scale = len(sample) / forecast.rate / span
    chance = random.Random(seed)
    turn, number = 0, 0
    while True:
        for offset, each in zip(offsets, sample, strict=True):
            when = (turn * span + offset) * scale
            if when >= length:
                return
            prompt, sampling = _prompt(each, often, turn, chance), {"max_tokens": max(1, each.output_tokens)}
            yield when, Request(seq_id=f"p{number}", prompt=prompt, sampling_params=sampling)
            number += 1
        turn += 1


def _prompt(arrival: ObservedRequest, often: Mapping[int, int], turn: int, chance: random.Random) -> tuple[int, ...]:
    """Return a prompt of the observed length, with equal blocks for equal observed blocks."""
    prompt = list[int]()
    for block in arrival.blocks:
        if len(prompt) >= arrival.prompt_tokens:
            break
        name = block if often[block] >= SHARED else hash((block, turn))
        prompt.append(_TOKENS + (name & 0x3FFFFFFF))
        prompt += _FILLER[: arrival.block_size - 1]
    rest = arrival.prompt_tokens - len(prompt)
    if rest > 0:
        prompt += [_TOKENS + chance.getrandbits(30), *(_FILLER * (rest // len(_FILLER) + 1))[: rest - 1]]
    return tuple(prompt[: arrival.prompt_tokens])


_FILLER = [number % _TOKENS for number in range(4096)]


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


LOOKED_AHEAD_S = 45.0
"""Seconds of the trace that the oracle looks at, after the time in which an engine starts."""


class Foresight:
    """A forecaster that knows the trace; implements :class:`~tercet_planner.forecast.Forecasting`."""

    def __init__(self, trace: Sequence[ObservedRequest]) -> None:
        self._trace = trace

    def look(self, now: float, since: float, arrivals: Sequence[ObservedRequest], ahead_s: float) -> Forecast:
        """Return the requests of the trace in the next ``ahead_s`` + :data:`LOOKED_AHEAD_S` seconds."""
        del since, arrivals
        length = ahead_s + LOOKED_AHEAD_S
        coming = tuple(each for each in self._trace if now <= each.at < now + length)
        if not coming:
            return Forecast(0.0, (), "the trace is over")
        return Forecast(len(coming) / length, coming, f"the trace, {len(coming) / length:.1f}/s")


def trace_of(arrivals: Iterable[tuple[float, Request]]) -> list[ObservedRequest]:
    """Return the requests of a trace without their text."""
    return [
        ObservedRequest(when, each.num_tokens, max_tokens_of(each), True, block_names(each.prompt), BLOCK)
        for when, each in arrivals
    ]


def load_policy(
    name: str | Callable[..., Any],
    settings: PlannerSettings,
    evaluate: Evaluate,
    engine: ProfileCapacity,
    trace: Iterable[tuple[float, Request]] | None = None,
) -> Policy | Planner:
    """Return the policy called ``name``; only the oracle reads ``trace``, which is None if the traffic is not known.

    Raises :class:`~tercet.protocol.BadRequest` for an unknown name, or a file without the named function.
    """
    if not isinstance(name, str):
        return _checked(getattr(name, "__name__", type(name).__name__), name)
    if name == "simulate":
        return Planner(evaluate, engine, settings.start_s, settings.margin)
    if name == "oracle" and trace is not None:
        return Planner(evaluate, engine, settings.start_s, 0.0, Foresight(trace_of(trace)))
    path, colon, function_name = name.rpartition(":")
    if not colon:
        raise BadRequest(
            f"planner: there is no {name!r}; choose simulate, oracle (in simulations), or file.py:function", "planner"
        )
    function = getattr(load_module(user_file(path, "planner"), "planner"), function_name, None)
    if not callable(function):
        raise BadRequest(f"planner: {path} has no function {function_name}", "planner")
    return _checked(name, function)


def _checked(name: str, function: object) -> Policy:
    """Wrap a user's policy: raise :class:`~tercet.protocol.BadRequest` if it does not return a ``WantedPlan``."""

    def policy(observed: Observed) -> WantedPlan:
        found = function(observed) if callable(function) else None
        if not isinstance(found, WantedPlan):
            raise BadRequest(f"planner: {name} must return WantedPlan, and returned {type(found).__name__}", "planner")
        return replace(found, reason=found.reason or name)

    return policy
