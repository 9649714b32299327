"""The memory and the CPU time of a long simulation whose requests leave in batches, as ``docs/lab.md`` has them.

python -m benchmarks.long_stream --requests 1000000
"""

from __future__ import annotations

import argparse
import resource
import time
from importlib import import_module
from typing import Any

# Type checkers see one folder of `tercet`; the other one is in the distribution tercet-lab.
lab: Any = import_module("tercet.lab")


def main() -> None:
    """Simulate, and print a line for each batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    given = parser.parse_args()
    lengths = {"input": lab.Lognormal(512, 512), "output": lab.Lognormal(32, 32)}
    work = lab.Poisson(rate=50, requests=given.requests, **lengths)
    began, rows = time.process_time(), 0
    for batch in lab.stream("data_parallel", "both=4", work, every=50_000):
        rows += len(batch)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{rows} requests: {time.process_time() - began:.0f} s of CPU, peak {peak:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
