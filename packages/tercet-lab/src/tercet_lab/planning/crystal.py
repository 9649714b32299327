"""The simulation of a fleet under a load, for a planner: the router's own code in virtual time."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tercet.decisions.objectives import within
from tercet.decisions.planning import Expected, FleetPlan, ObservedRequest
from tercet.decisions.planning.candidates import most_decodes
from tercet.programs import load_program
from tercet.protocol import EngineError, Request
from tercet.settings.role_settings import Objectives
from tercet_lab.bench.simulated.scenario import EngineGroup, FleetSpec
from tercet_lab.bench.simulated.virtual_run import run_requests
from tercet_lab.planning.forecast import Forecast
from tercet_lab.sim import EngineOptions, Profile
from tercet_lab.sim.step_times import StepModel, pairs_of

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


class ProfileCapacity:
    """The capacity of one engine by its profile; implements :class:`~tercet.decisions.planning.EngineCapacity`."""

    def __init__(self, profile: Profile, options: EngineOptions | None = None) -> None:
        self._options = options or EngineOptions()
        self._steps = StepModel(profile.steps, self._options.prefill_scale, self._options.decode_scale)
        self._kv_tokens = (self._options.total_blocks or profile.total_blocks) * profile.block_size

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds of the steps that compute a prompt of ``tokens`` tokens alone."""
        begin, seconds, chunk = 0, 0.0, self._options.max_num_batched_tokens
        while begin < tokens:
            end = min(tokens, begin + chunk)
            seconds += self._steps.step(end - begin, pairs_of(begin, end), 0, 0)
            begin = end
        return seconds

    def decodes(self, context: float, tpot: float) -> int:
        """Return the most sequences with ``context`` tokens of KV whose step takes at most ``tpot`` s; at least 1."""
        most = min(self._options.max_num_seqs, int(self._kv_tokens / max(1.0, context)))
        return most_decodes(lambda number: self._steps.step(0, 0.0, number, int(number * context)), tpot, most)


class FleetSimulator:
    """A simulator of a program on equal engines; implements :data:`~tercet_lab.planning.planner.Evaluate`.

    Each simulation runs in its own thread, and the caller waits for it: a virtual clock in the caller's thread stands
    still meanwhile. Equal arguments give equal results. ``requests`` counts the simulated requests.
    """

    def __init__(
        self,
        program: str,
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
        warm_up_s = min(LONGEST_WARM_UP_S, 1.2 * _longest_answer(forecast.sample, self._objectives))
        measured_s = max(MEASURED_S, FEWEST_MEASURED / forecast.rate)
        length = min(warm_up_s + measured_s, MOST_REQUESTS / forecast.rate)
        begin = min(warm_up_s, length * 2 / 3)
        requests = list(traffic(forecast, length, self._seed))
        before = sum(when < begin for when, _ in requests)
        groups = (
            EngineGroup(role="prefill", count=plan.prefill),
            EngineGroup(role="decode", count=plan.decode),
        )
        found = run_requests(
            load_program(self._program, self._args), FleetSpec(engines=groups), self._profile, self._options, requests,
            before, self._seed,
        )  # fmt: skip
        self.requests += len(requests)
        # The enclosing run may collect garbage rarely, and a simulation leaves gigabytes of prompts.
        gc.collect(1)
        return _expected(found.sent, found.first, found.ended, found.output_tokens, self._objectives, forecast.rate)


def _expected(
    sent: Sequence[float], first: Sequence[float], ended: Sequence[float], tokens: Sequence[float],
    objectives: Objectives, rate: float,
) -> Expected:  # fmt: skip
    if not len(sent):
        raise EngineError("the simulation measured no request")
    ttft = np.array(first) - np.array(sent)
    served = ~np.isnan(ttft)
    counts = np.array(tokens)
    tpot = np.full(len(counts), np.nan)
    several = served & (counts > 1)
    tpot[several] = (np.array(ended)[several] - np.array(first)[several]) / (counts[several] - 1)
    met = served & within(ttft, objectives.ttft or np.inf) & within(tpot, objectives.tpot or np.inf)
    p99 = float(np.percentile(np.where(served, ttft, 1e9), 99))
    return Expected(float(met.mean()), p99, rate, len(met))


def _longest_answer(sample: Sequence[ObservedRequest], objectives: Objectives) -> float:
    """Return the seconds within which nine of ten answers end at the objective's TPOT, with 2 s for the prefill."""
    tokens = sorted(each.output_tokens for each in sample)
    return 2.0 + tokens[int(0.9 * (len(tokens) - 1))] * (objectives.tpot or 0.05)


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
            prompt = _prompt(each, often, turn, chance)
            yield (
                when,
                Request(seq_id=f"p{number}", prompt=prompt, sampling_params={"max_tokens": max(1, each.output_tokens)}),
            )
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
