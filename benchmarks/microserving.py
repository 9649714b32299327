"""The evaluation of "Microserving LLM engines" in simulation, compared with its figure and its text.

    python benchmarks/microserving.py [--figures read.json] [--seeds 3]

The setting of the paper: Llama-3.1-70B-Instruct in FP8 on 8 H100 SXM; two engines of tensor-parallel degree 4 compared
with one of degree 8; 3000 +- 5 input tokens, 100 +- 5 output tokens; 1.6 to 5.6 requests per second, for each rate 800
requests and 40 of warm-up; no prefix cache; engines that prefill first. Its results are a figure and a paragraph. Three
constants (prefill, decode, latency of a verb's call) are fitted to the means at the lowest rate. All other values are
predictions, also the 99th percentile at that rate, which varies most.

The form of the file is ``{line: {rate: {"jct": seconds, ...}}}``. The default,
``microserving_figure.json``, was read from the figure's pixels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from tercet.protocol import BadRequest
from tercet.protocol.wire import UNREADABLE
from tercet_lab.bench.simulated.experiment import Experiment, Fleet
from tercet_lab.bench.simulated.scenario import SyntheticWorkload

RATES = (1.6, 2.4, 3.2, 4.0, 4.8, 5.6)
LOWEST = RATES[0]
TP4, TP8 = "llama-3.1-70b-fp8-h100-tp4", "llama-3.1-70b-fp8-h100-tp8"
# By line of the figure: program, its parameters, fleet, profile.
LINES: Mapping[str, tuple[str, dict[str, str], str, str]] = {
    "data parallel": ("data_parallel", {}, "both=2", TP4),
    "1P1D": ("disaggregated", {}, "1P1D", TP4),
    "1P1D balanced 0.1": ("balanced", {"balance_ratio": "0.1"}, "1P1D", TP4),
    "TP8": ("data_parallel", {}, "both=1", TP8),
}
# Number of calls of verbs that a request waits for, one after the other: start_generate alone, or prep_recv,
# remote_send and start_generate.
CALLS: Mapping[str, int] = {"data parallel": 1, "1P1D": 3, "1P1D balanced 0.1": 3, "TP8": 1}
FITTED = ("ttft", "tpot", "jct")
TWO_ENGINES = tuple(LINES)[:3]
START_LATENCY = 0.02


class Scales(NamedTuple):
    """The fitted constants: two factors of the profiles' times, and ``latency`` in seconds per call, off the engine."""

    prefill: float = 1.0
    decode: float = 1.0
    latency: float = 0.0


class Figures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The results of a line at a rate, in seconds: three means and the 99th percentile of JCT; None: not read."""

    ttft: float | None = None
    tpot: float | None = None
    jct: float | None = None
    jct_p99: float | None = None


Plot = Mapping[str, Mapping[float, Figures]]


class EvaluationSetup:
    """The setting of the evaluation. Results are means over seeds; each simulation runs once."""

    def __init__(self, seeds: int = 3, requests: int = 800) -> None:
        self._seeds = seeds
        self._workload = SyntheticWorkload(
            rate=1, requests=requests + 40, warm_up=40, input_mean=3000, input_dev=5, output_mean=100, output_dev=5
        )
        self._means = cache(self._means_of)

    def figures(self, line: str, rate: float, scales: Scales) -> Figures:
        """Return the results of a line at a rate (requests per second)."""
        ttft, tpot, jct, jct_p99 = self._means(line, rate, scales.prefill, scales.decode)
        # A delay without engine time is equal for all requests: it shifts them by the same time, and changes no queue.
        latency = scales.latency * CALLS[line]
        return Figures(ttft=ttft + latency, tpot=tpot, jct=jct + latency, jct_p99=jct_p99 + latency)

    def _means_of(self, line: str, rate: float, prefill: float, decode: float) -> tuple[float, ...]:
        found = [self._run(line, rate, prefill, decode, seed) for seed in range(self._seeds)]
        return tuple(float(np.mean(column)) for column in zip(*found, strict=True))

    def _run(
        self, line: str, rate: float, prefill: float, decode: float, seed: int
    ) -> tuple[float, float, float, float]:
        program, args, fleet, profile = LINES[line]
        options = {
            "schedule": "prefill_first",
            "prefix_caching": "false",
            "prefill_scale": str(prefill),
            "decode_scale": str(decode),
        }
        simulation = Experiment(
            program=program, args=args, fleet=Fleet.parse(fleet, profile, options), work=self._workload, seed=seed
        )
        found = simulation.point(rate).summary
        if found.ttft is None or found.tpot is None or found.e2el is None or found.failed:
            raise AssertionError(f"{line} at {rate}: {found.failed} requests failed")
        return found.ttft.mean, found.tpot.mean, found.e2el.mean, found.e2el.p99


# ---- fitting at the lowest rate ------------------------------------------------------------------------------


def fit_to_figures(setting: EvaluationSetup, plot: Plot) -> Scales:
    """Return the constants with the least squared relative error over all means that were read at the lowest rate."""
    read = {line: points[LOWEST] for line, points in plot.items() if LOWEST in points}
    if not read:
        raise BadRequest(
            f"figures: no values at rate {LOWEST}; give some, since the constants are fitted there", "figures"
        )

    def errors(logs: np.ndarray) -> np.ndarray:
        scales = Scales(*(round(float(value), 6) for value in np.exp(logs)))
        found = [means_errors(setting.figures(line, LOWEST, scales), wanted) for line, wanted in read.items()]
        return np.concatenate(found)

    logs = gauss_newton(errors, np.log([1.0, 1.0, START_LATENCY]))
    return Scales(*(round(float(value), 3) for value in np.exp(logs)))


def gauss_newton(errors: Callable[[np.ndarray], np.ndarray], start: np.ndarray, rounds: int = 6) -> np.ndarray:
    """Return the point with the least sum of squared errors, by Gauss-Newton. Steps that increase it are halved."""
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


def means_errors(found: Figures, wanted: Figures) -> np.ndarray:
    """Return the relative errors of the means that were read."""
    pairs = [(getattr(found, name), getattr(wanted, name)) for name in FITTED]
    return np.array([ours / theirs - 1 for ours, theirs in pairs if theirs is not None])


# ---- results of the fit --------------------------------------------------------------------------------------


def jct(figures: Figures) -> float:
    """Return the mean JCT in seconds. Raise :class:`~tercet.protocol.BadRequest` if it was not read."""
    if figures.jct is None:
        raise BadRequest("figures: jct is missing", "figures")
    return figures.jct


def tp8_gain(setting: EvaluationSetup, scales: Scales) -> float:
    """Return the share by which TP8's mean JCT is below the best other line's, at the lowest rate."""
    others = min(jct(setting.figures(line, LOWEST, scales)) for line in TWO_ENGINES)
    return 1 - jct(setting.figures("TP8", LOWEST, scales)) / others


def gains(setting: EvaluationSetup, scales: Scales, line: str, figure: str = "jct") -> dict[float, float]:
    """Return the share by which a line is below data parallel, by rate."""
    return {
        rate: 1
        - getattr(setting.figures(line, rate, scales), figure)
        / getattr(setting.figures("data parallel", rate, scales), figure)
        for rate in RATES
    }


def order(setting: EvaluationSetup, scales: Scales, rate: float) -> list[str]:
    """Return the lines in the order of mean JCT, the best one first."""
    return sorted(LINES, key=lambda line: jct(setting.figures(line, rate, scales)))


def held_out_error(
    setting: EvaluationSetup, scales: Scales, plot: Plot, lines: Sequence[str] = TWO_ENGINES, figure: str = "jct"
) -> float:
    """Return the mean absolute relative error of one value over these lines, without the lowest rate."""
    errors = [
        abs(getattr(setting.figures(line, rate, scales), figure) / getattr(wanted, figure) - 1)
        for line in lines
        for rate, wanted in plot.get(line, {}).items()
        if rate != LOWEST and getattr(wanted, figure) is not None
    ]
    if not errors:
        raise BadRequest(
            f"figures: {figure} of {', '.join(lines)} has values at rate {LOWEST} only; give others", "figures"
        )
    return float(np.mean(errors))


def parse_plot(data: bytes) -> Plot:
    """Return the values that were read off the figure, from JSON: ``{line: {rate: {ttft, tpot, jct, jct_p99}}}``.

    They are in seconds. Raise :class:`~tercet.protocol.BadRequest` for invalid data or an unknown line.
    """
    try:
        found = msgspec.json.decode(data, type=dict[str, dict[str, Figures]])
        plot = {line: {float(rate): figures for rate, figures in points.items()} for line, points in found.items()}
    except (ValueError, *UNREADABLE) as error:
        raise BadRequest(f"figures: {error}", "figures") from error
    unknown = [line for line in plot if line not in LINES]
    if unknown:
        raise BadRequest(f"figures: {unknown[0]!r} is not a line; the lines are {', '.join(LINES)}", "figures")
    return plot


READ = Path(__file__).with_name("microserving_figure.json")
TABLES = (("ttft", "mean TTFT, s", 1.0, 2), ("tpot", "mean TPOT, ms", 1e3, 1), ("jct", "mean JCT, s", 1.0, 2))
P99 = (("jct_p99", "P99 JCT, s", 1.0, 2),)


def main() -> None:
    """Run the evaluation and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, default=READ, help="file with the values that were read off the figure")
    parser.add_argument("--seeds", type=int, default=3, help="number of runs per mean")
    given = parser.parse_args()
    setting = EvaluationSetup(given.seeds)
    try:
        plot = parse_plot(given.figures.read_bytes())
        scales = fit_to_figures(setting, plot)
        report(setting, scales, plot)
    except (BadRequest, OSError) as error:
        sys.exit(f"microserving: {error}")


def report(setting: EvaluationSetup, scales: Scales, plot: Plot) -> None:
    """Print simulated and published values, their differences, and the claims of the text with simulated values."""
    latency = f"{scales.latency * 1e3:.0f} ms for each call of a verb"
    print(f"prefill x {scales.prefill}, decode x {scales.decode}, {latency}\n")
    for name, title, factor, digits in TABLES + P99:
        print(f"| {title}: simulated / figure | " + " | ".join(f"{rate:g}/s" for rate in RATES) + " |")
        print("| --- |" + " ---: |" * len(RATES))
        for line in LINES:
            cells: list[str] = []
            for rate in RATES:
                read = getattr(plot.get(line, {}).get(rate, Figures()), name)
                shown = "-" if read is None else f"{read * factor:.{digits}f}"
                cells.append(f"{getattr(setting.figures(line, rate, scales), name) * factor:.{digits}f} / {shown}")
            print(f"| {line} | " + " | ".join(cells) + " |")
        print()
    print(f"mean error above {LOWEST}/s | " + " | ".join(name for name, *_ in TABLES + P99))
    for line in LINES:
        errors = [held_out_error(setting, scales, plot, [line], name) for name, *_ in TABLES + P99]
        print(f"{line} | " + " | ".join(f"{error:.1%}" for error in errors))
    print(f"mean JCT, the two-engine lines together: {held_out_error(setting, scales, plot):.1%}\n")
    mean, tail = (gains(setting, scales, "1P1D", figure) for figure in ("jct", "jct_p99"))
    print(f"TP8 below the best other line at {LOWEST}/s: {tp8_gain(setting, scales):.1%} (the text: up to 8%)")
    print(f"1P1D below data parallel, mean JCT: {told(mean)} (the text: up to 16%)")
    print(f"1P1D below data parallel, P99 JCT: {told(tail)} (the text: up to 28%)")
    print(f"balanced below data parallel, mean JCT: {told(gains(setting, scales, '1P1D balanced 0.1'))}")
    for rate in (RATES[0], RATES[len(RATES) // 2], RATES[-1]):
        print(f"order by mean JCT at {rate}/s: {', '.join(order(setting, scales, rate))}")


def told(shares: dict[float, float]) -> str:
    """Return shares by rate as percentages."""
    return ", ".join(f"{share:.0%}" for share in shares.values())


if __name__ == "__main__":
    main()
