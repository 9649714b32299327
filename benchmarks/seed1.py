"""Seed 1's evaluation in simulation: what the text says against what follows, or a plot's values against it.

    python benchmarks/seed1.py [--figures read.json] [--seeds 3]

Without ``--figures`` one constant is fitted to the one number that the text gives at the lowest rate. With it, two
constants are fitted to everything that was read there; the file is ``{line: {rate: {"jct": seconds, ...}}}``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tercet.bench.simulated.seed1 import (
    LINES,
    LOWEST,
    RATES,
    EvaluationSetup,
    Scales,
    fit_to_figures,
    fit_to_text,
    gains,
    held_out_error,
    order,
    parse_plot,
    tp8_gain,
)
from tercet.protocol import BadRequest


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, help="values read off the figure")
    parser.add_argument("--seeds", type=int, default=3, help="runs to average over")
    given = parser.parse_args()
    setting = EvaluationSetup(given.seeds)
    try:
        plot = parse_plot(given.figures.read_bytes()) if given.figures else None
        scales = fit_to_figures(setting, plot) if plot else fit_to_text(setting)
        report(setting, scales)
        if plot:
            print(f"mean error of mean JCT over what was read: {held_out_error(setting, scales, plot):.1%}")
    except (BadRequest, OSError) as error:
        sys.exit(f"seed1: {error}")


def report(setting: EvaluationSetup, scales: Scales) -> None:
    """Print the predicted figure, and the text's claims beside it."""
    print(f"prefill x {scales.prefill}, decode x {scales.decode}\n")
    for name, unit, factor in (("ttft", "ms", 1e3), ("tpot", "ms", 1e3), ("jct", "s", 1), ("jct_p99", "s", 1)):
        print(f"| {name}, {unit} | " + " | ".join(f"{rate:g}/s" for rate in RATES) + " |")
        print("| --- |" + " ---: |" * len(RATES))
        for line in LINES:
            values = [getattr(setting.figures(line, rate, scales), name) * factor for rate in RATES]
            print(f"| {line} | " + " | ".join(f"{value:.{1 if factor > 1 else 3}f}" for value in values) + " |")
        print()
    mean, tail = (gains(setting, scales, "1P1D", figure) for figure in ("jct", "jct_p99"))
    print(f"TP8 below the best other at {LOWEST}/s: {tp8_gain(setting, scales):.1%} (the text: up to 8%)")
    print(f"1P1D below data parallel, mean JCT: {told(mean)} (the text: up to 16%)")
    print(f"1P1D below data parallel, P99 JCT: {told(tail)} (the text: up to 28%)")
    print(f"balanced below data parallel, mean JCT: {told(gains(setting, scales, '1P1D balanced 0.1'))}")
    for rate in (RATES[0], RATES[len(RATES) // 2], RATES[-1]):
        print(f"order by mean JCT at {rate}/s: {', '.join(order(setting, scales, rate))}")


def told(shares: dict[float, float]) -> str:
    """Shares by rate, as percentages."""
    return ", ".join(f"{share:.0%}" for share in shares.values())


if __name__ == "__main__":
    main()
