"""The evaluation of "Microserving LLM engines" (MLC, January 2025), simulated, and held against what it says.

Its setting: Llama-3.1-70B-Instruct in FP8 on 8 H100 SXM; two engines of tensor-parallel degree 4 against one of
degree 8; 3000 +- 5 tokens in, 100 +- 5 out; 1.6 to 5.6 requests per second, 800 requests and 40 of warm-up each; no
prefix cache; engines that prefill first. Its results are a figure and a paragraph. The profiles may be scaled by two
constants, for prefill and decode, that are fitted at the lowest rate; everything else is prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import msgspec
import numpy as np

from tercet.bench.simulated.scenario import SyntheticWorkload
from tercet.bench.simulated.simulation import Simulation
from tercet.protocol import BadRequest

RATES = (1.6, 2.4, 3.2, 4.0, 4.8, 5.6)
LOWEST = RATES[0]
TP4, TP8 = "llama-3.1-70b-fp8-h100-tp4", "llama-3.1-70b-fp8-h100-tp8"
# Line of the figure: program, its parameters, fleet, profile.
LINES: Mapping[str, tuple[str, dict[str, str], str, str]] = {
    "data parallel": ("data_parallel", {}, "both=2", TP4),
    "1P1D": ("disaggregated", {}, "1P1D", TP4),
    "1P1D balanced 0.1": ("balanced", {"balance_ratio": "0.1"}, "1P1D", TP4),
    "TP8": ("data_parallel", {}, "both=1", TP8),
}
TWO_ENGINES = tuple(LINES)[:3]
# "Using one engine with a larger tensor parallel degree achieves up to 8% lower mean JCT than other strategies when
# the request rate is 1.6": the only number that the text gives at the lowest rate.
TP8_GAIN_AT_LOWEST = 0.08


class Scales(NamedTuple):
    """The two constants that multiply the profiles' times."""

    prefill: float = 1.0
    decode: float = 1.0


class Figures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds: means of all three latencies, and the 99th percentile of JCT. What was not read is None."""

    ttft: float | None = None
    tpot: float | None = None
    jct: float | None = None
    jct_p99: float | None = None


Plot = Mapping[str, Mapping[float, Figures]]


class EvaluationSetup:
    """Seed 1's setting, averaged over seeds; asks for the same run once."""

    def __init__(self, seeds: int = 3, requests: int = 800) -> None:
        self._seeds = seeds
        self._workload = SyntheticWorkload(
            rate=1, requests=requests + 40, warm_up=40, input_mean=3000, input_dev=5, output_mean=100, output_dev=5
        )
        self.figures = cache(self._figures)

    def _figures(self, line: str, rate: float, scales: Scales) -> Figures:
        """What a line has at a rate."""
        found = [self._run(line, rate, scales, seed) for seed in range(self._seeds)]
        ttft, tpot, jct, jct_p99 = (float(np.mean(column)) for column in zip(*found, strict=True))
        return Figures(ttft=ttft, tpot=tpot, jct=jct, jct_p99=jct_p99)

    def _run(self, line: str, rate: float, scales: Scales, seed: int) -> tuple[float, float, float, float]:
        program, args, fleet, profile = LINES[line]
        options = {
            "schedule": "prefill_first",
            "prefix_caching": "false",
            "prefill_scale": str(scales.prefill),
            "decode_scale": str(scales.decode),
        }
        simulation = Simulation(
            program=program,
            program_args=args,
            fleet=fleet,
            profile=profile,
            options=options,
            workload=self._workload,
            seed=seed,
        )
        found = simulation.point(rate).summary
        if found.ttft is None or found.tpot is None or found.e2el is None or found.failed:
            raise AssertionError(f"{line} at {rate}: {found.failed} requests failed")
        return found.ttft.mean, found.tpot.mean, found.e2el.mean, found.e2el.p99


# ---- fitting at the lowest rate ------------------------------------------------------------------------------


def fit_to_text(setting: EvaluationSetup) -> Scales:
    """The prefill constant at which TP8 gains at the lowest rate what the text says; decode is left as it is."""
    low, high = 0.5, 4.0
    while high - low > 0.005:
        middle = (low + high) / 2
        # Slower prefill costs TP8 more: it has one queue, and gains less than twice the speed.
        low, high = (middle, high) if tp8_gain(setting, Scales(middle)) > TP8_GAIN_AT_LOWEST else (low, middle)
    return Scales(round((low + high) / 2, 3))


def fit_to_figures(setting: EvaluationSetup, plot: Plot) -> Scales:
    """The two constants with the least squared relative error at the lowest rate, over all that was read there."""
    read = {line: points[LOWEST] for line, points in plot.items() if LOWEST in points}
    if not read:
        raise BadRequest(f"figures: nothing was read at {LOWEST}, where the constants are fitted", "figures")

    def errors(logs: np.ndarray) -> np.ndarray:
        scales = Scales(*(round(float(value), 6) for value in np.exp(logs)))
        found = [relative_errors(setting.figures(line, LOWEST, scales), wanted) for line, wanted in read.items()]
        return np.concatenate(found)

    logs = gauss_newton(errors, np.zeros(2))
    return Scales(*(round(float(value), 3) for value in np.exp(logs)))


def gauss_newton(errors: Callable[[np.ndarray], np.ndarray], start: np.ndarray, rounds: int = 6) -> np.ndarray:
    """Minimizes the sum of squares; steps that make it worse are halved."""
    at, now = start, errors(start)
    for _ in range(rounds):
        slope = np.stack([(errors(at + step) - now) / 0.02 for step in np.eye(len(at)) * 0.02], axis=1)
        move = -np.linalg.lstsq(slope, now, rcond=None)[0].clip(-0.7, 0.7)
        for _halving in range(4):
            there = errors(at + move)
            if there @ there < now @ now:
                break
            move = move / 2
        else:
            break
        at, now = at + move, there
    return at


def relative_errors(found: Figures, wanted: Figures) -> np.ndarray:
    """Relative errors of what was read."""
    pairs = [(getattr(found, name), getattr(wanted, name)) for name in Figures.__struct_fields__]
    return np.array([ours / theirs - 1 for ours, theirs in pairs if theirs is not None])


# ---- what follows --------------------------------------------------------------------------------------------


def jct(figures: Figures) -> float:
    """Mean JCT, seconds."""
    if figures.jct is None:
        raise BadRequest("figures: jct is missing", "figures")
    return figures.jct


def tp8_gain(setting: EvaluationSetup, scales: Scales) -> float:
    """By what share TP8's mean JCT is below the best other one at the lowest rate."""
    others = min(jct(setting.figures(line, LOWEST, scales)) for line in TWO_ENGINES)
    return 1 - jct(setting.figures("TP8", LOWEST, scales)) / others


def gains(setting: EvaluationSetup, scales: Scales, line: str, figure: str = "jct") -> dict[float, float]:
    """By what share a line is below data parallel, by rate."""
    return {
        rate: 1
        - getattr(setting.figures(line, rate, scales), figure)
        / getattr(setting.figures("data parallel", rate, scales), figure)
        for rate in RATES
    }


def order(setting: EvaluationSetup, scales: Scales, rate: float) -> list[str]:
    """The lines by mean JCT, the best one first."""
    return sorted(LINES, key=lambda line: jct(setting.figures(line, rate, scales)))


def held_out_error(setting: EvaluationSetup, scales: Scales, plot: Plot) -> float:
    """Mean absolute relative error of mean JCT over all rates of the two-engine lines that were read."""
    errors = [
        abs(jct(setting.figures(line, rate, scales)) / wanted.jct - 1)
        for line in TWO_ENGINES
        for rate, wanted in plot.get(line, {}).items()
        if wanted.jct is not None
    ]
    if not errors:
        raise BadRequest("figures: no jct of a two-engine line was read", "figures")
    return float(np.mean(errors))


def parse_plot(data: bytes) -> Plot:
    """``{line: {rate: {ttft, tpot, jct, jct_p99}}}`` in seconds, as read off the figure."""
    try:
        found = msgspec.json.decode(data, type=dict[str, dict[str, Figures]])
        plot = {line: {float(rate): figures for rate, figures in points.items()} for line, points in found.items()}
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadRequest(f"figures: {error}", "figures") from error
    unknown = [line for line in plot if line not in LINES]
    if unknown:
        raise BadRequest(f"figures: there is no line {unknown[0]!r}; the lines are {', '.join(LINES)}", "figures")
    return plot
