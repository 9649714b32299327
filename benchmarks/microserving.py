"""The evaluation of "Microserving LLM engines" in simulation, compared with its figure and its text.

    python benchmarks/microserving.py [--figures read.json] [--seeds 20] [--fit-rate 4]

The setting of the paper: Llama-3.1-70B-Instruct in FP8 on 8 H100 SXM; two engines of tensor-parallel degree 4 compared
with one of degree 8; 3000 +- 5 input tokens, 100 +- 5 output tokens; 1.6 to 5.6 requests per second, for each rate 800
requests to idle engines; no prefix cache; decodes and prompts in one step, MLC-LLM's default (``prefill_mode`` is
``hybrid``). The results are a figure and a paragraph, of one run for each point. Its arrivals are known: the published
commands give no seed, and ``mlc_llm.bench`` seeds NumPy with 0 before each rate, so that all lines and rates have the
same draws. Other seeds show what other arrivals would give.

The profiles are those of vLLM's operator tables; the three times that the tables lack, and a factor of their times of
prompts, since the figure's engine has other kernels, are fitted to the means of all lines at one rate. All other values
are predictions, also the 99th percentile at that rate.

The form of the file is ``{line: {rate: {"jct": seconds, ...}}}``. The default,
``microserving_figure.json``, was read from the figure's pixels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tercet.protocol import BadRequest
from tercet.protocol.wire import UNREADABLE
from tercet_lab.bench.simulated.experiment import Experiment, Fleet
from tercet_lab.bench.simulated.scenario import PlannedWorkload
from tercet_lab.bench.workloads.rows import RecordedRows, Row

RATES = (1.6, 2.4, 3.2, 4.0, 4.8, 5.6)
LOWEST = RATES[0]
TP4, TP8 = "llama-3.1-70b-fp8-h100-tp4", "llama-3.1-70b-fp8-h100-tp8"
FIT_RATE = 4.0
# By line of the figure: program, its parameters, fleet, profile.
LINES: Mapping[str, tuple[str, dict[str, str], str, str]] = {
    "data parallel": ("data_parallel", {}, "both=2", TP4),
    "1P1D": ("disaggregated", {}, "1P1D", TP4),
    "1P1D balanced 0.1": ("balanced", {"balance_ratio": "0.1"}, "1P1D", TP4),
    "TP8": ("data_parallel", {}, "both=1", TP8),
}
FITTED = ("ttft", "tpot", "jct")
TWO_ENGINES = tuple(LINES)[:3]


class Times(NamedTuple):
    """The fitted constants.

    In seconds: of the host per step, of sending per token, and per request off the engine. ``prompts`` is the factor
    of the profile's times of prompts.
    """

    host: float = 0.0
    send: float = 0.0
    latency: float = 0.0
    prompts: float = 1.0


START = Times(host=0.003, send=1e-5, latency=0.05)


class Figures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The results of a line at a rate, in seconds: three means and the 99th percentile of JCT; None: not read."""

    ttft: float | None = None
    tpot: float | None = None
    jct: float | None = None
    jct_p99: float | None = None


Plot = Mapping[str, Mapping[float, Figures]]


# Lengths that ``mlc_llm.bench`` draws before the first gap: four for each of 100 requests per GPU and 40 of warm-up.
LENGTHS = 4 * (100 + 40)


def published_rows(rate: float, requests: int, seed: int = 0) -> RecordedRows:
    """Return the requests that ``mlc_llm.bench`` sends at this rate: the draws of NumPy's generator in its order.

    Only which request has which length (within a few tokens) is another, since that depends on the text too.
    """
    draws = np.random.RandomState(seed)
    lengths = [(round(draws.normal(3000, 5)), round(draws.normal(100, 5))) for _ in range(LENGTHS)]
    times = np.append(0.0, np.cumsum(draws.exponential(1 / rate, requests - 1)))
    rows = (Row(float(at), *lengths[number % LENGTHS]) for number, at in enumerate(times))
    return RecordedRows(tuple(rows), block=16)


class EvaluationSetup:
    """The setting of the evaluation. Each simulation runs once. Seed 0 has the arrivals of the figure."""

    def __init__(self, seeds: int = 1, requests: int = 800) -> None:
        self._seeds = seeds
        self._requests = requests
        self._run = cache(self._results_of)

    def figures(self, line: str, rate: float, times: Times, seed: int = 0) -> Figures:
        """Return the results of a line at a rate (requests per second)."""
        # A delay without engine time is equal for all requests: it shifts them by the same time, and changes no queue.
        late = times.latency
        ttft, tpot, jct, jct_p99 = self._run(line, rate, times.host, times.send, times.prompts, seed)
        return Figures(ttft=ttft + late, tpot=tpot, jct=jct + late, jct_p99=jct_p99 + late)

    def runs(self, line: str, rate: float, times: Times) -> list[Figures]:
        """Return the results of a line at a rate for each seed."""
        return [self.figures(line, rate, times, seed) for seed in range(self._seeds)]

    def _results_of(
        self, line: str, rate: float, host: float, send: float, prompts: float, seed: int
    ) -> tuple[float, float, float, float]:
        program, args, fleet, profile = LINES[line]
        options = {
            "prefix_caching": "false", "host_time": str(host), "send_time": str(send), "prefill_scale": str(prompts)
        }  # fmt: skip
        work = PlannedWorkload(rows=published_rows(rate, self._requests, seed), arrivals="trace")
        simulation = Experiment(
            program=program, args=args, fleet=Fleet.parse(fleet, profile, options), work=work, seed=seed
        )
        found = simulation.point(None).summary
        if found.ttft is None or found.tpot is None or found.e2el is None or found.failed:
            raise AssertionError(f"{line} at {rate}: {found.failed} requests failed")
        return found.ttft.mean, found.tpot.mean, found.e2el.mean, found.e2el.p99


# ---- fitting at one rate -------------------------------------------------------------------------------------


def fit_to_figures(setting: EvaluationSetup, plot: Plot, rate: float = FIT_RATE) -> Times:
    """Return the constants with the least squared relative error over all means that were read at this rate."""
    read = {line: points[rate] for line, points in plot.items() if rate in points}
    if not read:
        raise BadRequest(
            f"figures: no values at rate {rate:g}; give some, since the constants are fitted there", "figures"
        )

    def errors(logs: np.ndarray) -> np.ndarray:
        times = _rounded(np.exp(logs), digits=5)
        found = [means_errors(setting.figures(line, rate, times), wanted) for line, wanted in read.items()]
        return np.concatenate(found)

    return _rounded(np.exp(gauss_newton(errors, np.log(START))), digits=3)


def _rounded(values: np.ndarray, digits: int) -> Times:
    return Times(*(float(f"{value:.{digits}g}") for value in values))


def gauss_newton(errors: Callable[[np.ndarray], np.ndarray], start: np.ndarray, rounds: int = 10) -> np.ndarray:
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


def tp8_gain(setting: EvaluationSetup, times: Times) -> float:
    """Return the share by which TP8's mean JCT is below the best other line's, at the lowest rate."""
    others = min(jct(setting.figures(line, LOWEST, times)) for line in TWO_ENGINES)
    return 1 - jct(setting.figures("TP8", LOWEST, times)) / others


def gains(setting: EvaluationSetup, times: Times, line: str, figure: str = "jct") -> dict[float, float]:
    """Return the share by which a line is below data parallel, by rate."""
    return {
        rate: 1
        - getattr(setting.figures(line, rate, times), figure)
        / getattr(setting.figures("data parallel", rate, times), figure)
        for rate in RATES
    }


def order(setting: EvaluationSetup, times: Times, rate: float) -> list[str]:
    """Return the lines in the order of mean JCT, the best one first."""
    return sorted(LINES, key=lambda line: jct(setting.figures(line, rate, times)))


def held_out_error(
    setting: EvaluationSetup,
    times: Times,
    plot: Plot,
    lines: Sequence[str] = tuple(LINES),
    figure: str = "jct",
    fit_rate: float = FIT_RATE,
) -> tuple[float, float]:
    """Return the mean and the largest absolute relative error of one value over these lines, without ``fit_rate``."""
    errors = [
        abs(getattr(setting.figures(line, rate, times), figure) / getattr(wanted, figure) - 1)
        for line in lines
        for rate, wanted in plot.get(line, {}).items()
        if rate != fit_rate and getattr(wanted, figure) is not None
    ]
    if not errors:
        raise BadRequest(
            f"figures: {figure} of {', '.join(lines)} has values at rate {fit_rate:g} only; give others", "figures"
        )
    return float(np.mean(errors)), float(np.max(errors))


def misplaced(setting: EvaluationSetup, times: Times, plot: Plot, apart: float = 0.05) -> list[str]:
    """Return the pairs of lines that are at least ``apart`` in the figure's mean JCT, and in the other order here."""
    found: list[str] = []
    for rate in RATES:
        read = {line: plot[line][rate].jct for line in LINES if rate in plot.get(line, {})}
        known = sorted((seconds, line) for line, seconds in read.items() if seconds is not None)
        for (low, better), (high, worse) in combinations(known, 2):
            here = [jct(setting.figures(line, rate, times)) for line in (better, worse)]
            if high >= (1 + apart) * low and here[0] > here[1]:
                found.append(f"{better} before {worse} at {rate:g}/s")
    return found


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
    parser.add_argument("--seeds", type=int, default=20, help="number of runs of the spread, at least 2")
    parser.add_argument("--fit-rate", type=float, default=FIT_RATE, help="requests per second of the fitted means")
    given = parser.parse_args()
    if given.seeds < 2:
        parser.error("--seeds: give at least 2, since intervals are over seeds")
    setting = EvaluationSetup(given.seeds)
    try:
        plot = parse_plot(given.figures.read_bytes())
        times = fit_to_figures(setting, plot, given.fit_rate)
        report(setting, times, plot, given.fit_rate)
    except (BadRequest, OSError) as error:
        sys.exit(f"microserving: {error}")


def report(setting: EvaluationSetup, times: Times, plot: Plot, fit_rate: float) -> None:
    """Print simulated and published values, their differences, and the claims of the text with simulated values."""
    host, send, latency = times.host * 1e3, times.send * 1e6, times.latency * 1e3
    print(f"fitted at {fit_rate:g}/s: {host:g} ms per step, {send:g} µs per sent token, {latency:g} ms per request,")
    print(f"prompts take {times.prompts:g} of the profile's time\n")
    for name, title, factor, digits in TABLES + P99:
        print(f"| {title}: simulated / figure | " + " | ".join(f"{rate:g}/s" for rate in RATES) + " |")
        print("| --- |" + " ---: |" * len(RATES))
        for line in LINES:
            cells: list[str] = []
            for rate in RATES:
                read = getattr(plot.get(line, {}).get(rate, Figures()), name)
                shown = "-" if read is None else f"{read * factor:.{digits}f}"
                cells.append(f"{getattr(setting.figures(line, rate, times), name) * factor:.{digits}f} / {shown}")
            print(f"| {line} | " + " | ".join(cells) + " |")
        print()
    print(
        "| mean JCT, s, other arrivals: mean ± its 95% interval (lowest to highest run) | "
        + " | ".join(map("{:g}/s".format, RATES))
    )
    for line in LINES:
        print(f"| {line} | " + " | ".join(spread(setting.runs(line, rate, times)) for rate in RATES) + " |")
    print(
        f"\nerror at other rates than {fit_rate:g}/s, mean (largest) | " + " | ".join(name for name, *_ in TABLES + P99)
    )
    for line in LINES:
        errors = [held_out_error(setting, times, plot, [line], name, fit_rate) for name, *_ in TABLES + P99]
        print(f"{line} | " + " | ".join(f"{mean:.1%} ({most:.1%})" for mean, most in errors))
    mean, most = held_out_error(setting, times, plot, fit_rate=fit_rate)
    print(f"mean JCT, all lines together: {mean:.1%} ({most:.1%})\n")
    gain, tail = (gains(setting, times, "1P1D", figure) for figure in ("jct", "jct_p99"))
    print(f"TP8 below the best other line at {LOWEST}/s: {tp8_gain(setting, times):.1%} (the text: up to 8%)")
    print(f"1P1D below data parallel, mean JCT: {told(gain)} (the text: up to 16%)")
    print(f"1P1D below data parallel, P99 JCT: {told(tail)} (the text: up to 28%)")
    print(f"balanced below data parallel, mean JCT: {told(gains(setting, times, '1P1D balanced 0.1'))}")
    wrong = ", ".join(misplaced(setting, times, plot)) or "none"
    print(f"lines that are 5% apart in the figure's mean JCT, in another order here: {wrong}")


def spread(runs: Sequence[Figures]) -> str:
    """Return the mean JCT over seeds with the half width of its 95% interval, and the lowest and the highest JCT."""
    found = [jct(run) for run in runs]
    student: Any = import_module("scipy.special")
    half = student.stdtrit(len(found) - 1, 0.975) * np.std(found, ddof=1) / len(found) ** 0.5
    return f"{np.mean(found):.2f} ± {half:.2f} ({min(found):.2f} to {max(found):.2f})"


def told(shares: dict[float, float]) -> str:
    """Return shares by rate as percentages."""
    return ", ".join(f"{share:.0%}" for share in shares.values())


if __name__ == "__main__":
    main()
