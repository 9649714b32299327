"""The evaluation of "Microserving LLM engines" in simulation, compared with its figure and its text.

    python benchmarks/microserving.py [--figures read.json] [--seeds 3]

Three constants are fitted to the means that were read off the figure at the lowest rate; P99 and the other rates are
predictions. The form of the file is ``{line: {rate: {"jct": seconds, ...}}}``. The default,
``microserving_figure.json``, was read from the figure's pixels.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tercet.protocol import BadRequest
from tercet_lab.bench.simulated.microserving import (
    LINES,
    LOWEST,
    RATES,
    EvaluationSetup,
    Figures,
    Plot,
    Scales,
    fit_to_figures,
    gains,
    held_out_error,
    order,
    parse_plot,
    tp8_gain,
)

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
