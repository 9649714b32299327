"""``python -m tests.fuzz.run``: the long run. Says how far it is, and at the end what was said to whom.

What fails is kept in ``tests/fuzz/corpus``, from where the short tests run it again.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
import traceback
from pathlib import Path

import msgspec

from tests.fuzz.fuzzing import Case, Run, Target, bounded, fuzz, keep
from tests.fuzz.targets.all import TARGETS


def main() -> int:
    """Returns an exit code: 1 if something failed."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument(
        "--only", nargs="*", choices=[target.name for target in TARGETS], help="targets; all by default"
    )
    parser.add_argument("--frames", type=int, default=1_000_000, help="frames in all; shared among the targets")
    parser.add_argument("--calls", type=int, default=10_000, help="HTTP calls, to each target that takes them")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same cases")
    parser.add_argument("--replay", type=Path, help="run one file of the corpus, and nothing else")
    parser.add_argument("--keep", type=int, default=0, help="keep so many cases of each target that ended differently")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # every refusal is a line
    chosen = [target for target in TARGETS if not options.only or target.name in options.only]
    if options.replay is not None:
        target = next(target for target in TARGETS if target.name == options.replay.parent.name)
        asyncio.run(_replay(target, msgspec.msgpack.decode(options.replay.read_bytes(), type=Case)))
        return 0
    per_target = -(-options.frames // max(1, sum(target.unit == "frames" for target in chosen)))
    print(f"{'target':28}{'cases':>10}{'items':>12}{'seconds':>10}{'slowest':>10}{'MB':>7}{'ends':>7}{'failed':>8}")
    runs = [
        (target, asyncio.run(_one(target, options.seed, per_target if target.unit == "frames" else options.calls)))
        for target in chosen
    ]
    for unit in ("frames", "calls"):
        print(f"{unit}: {sum(run.items for target, run in runs if target.unit == unit)}")
    for target, run in runs:
        for case in list(run.ended.values())[: options.keep]:
            keep(target, case)
        for file, error in run.failed:
            last = traceback.extract_tb(error.__traceback__)[-1]
            print(f"{file}: {last.filename}:{last.lineno}: {type(error).__name__}: {error!s:.300}", file=sys.stderr)
    return int(any(run.failed for _, run in runs))


async def _one(target: Target, seed: int, items: int) -> Run:
    shown = time.monotonic()

    def progress(run: Run) -> None:
        nonlocal shown
        if sys.stderr.isatty() and time.monotonic() - shown > 0.5:
            shown = time.monotonic()
            print(f"\r{target.name:28}{run.items:>10} of {items} {target.unit}", end="", file=sys.stderr, flush=True)

    run = await fuzz(target, seed, items, progress)
    ends = len(run.happened)
    print(
        f"\r{target.name:28}{run.cases:>10}{run.items:>12}{run.seconds:>10.1f}{run.slowest:>10.3f}{run.megabytes:>7.1f}"
        f"{ends:>7}{len(run.failed):>8}",
        flush=True,
    )
    return run


async def _replay(target: Target, case: Case) -> None:
    async with target.room() as room:
        with bounded():
            print(await room.run(case))


if __name__ == "__main__":
    sys.exit(main())
