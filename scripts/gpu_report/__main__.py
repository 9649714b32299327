"""The cost of KV on a GPU: run ``python -m scripts.gpu_report`` in a clone, on a machine with an NVIDIA GPU or more.

The report measures each way in which KV is copied, and plain copies. Then it starts plain vLLM, one engine, one engine
behind a router, and two engines, one after the other, and prints a table. With one GPU, both engines share it. A row
that cannot be measured has the reason, and the other rows are still measured. The exit code is 1 if a result is not as
required. The default model, `smollm2`, comes from a wheel; ``--model random`` and ``--model random-8b`` need no files.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from scripts.gpu_report import copies, random_model, servers
from scripts.gpu_report.answers import Latencies, answers, latencies
from scripts.gpu_report.table import Failed, Row, attempt, lines, ratio, share, speed, why_not

from tercet.cluster.devices import Device, list_devices, why_no_devices
from tercet.vllm_plugin.hooks import vllm_version

ALONE = ("--prefill", "0", "--decode", "0", "--both", "1", "--program", "data_parallel")
TWO = ("--program-arg", "min_send=1")


class Asked(NamedTuple):
    """The results of one server."""

    latencies: Latencies | Failed
    answers: list[str] | Failed


def main() -> None:
    """Measure, and print the table."""
    options = argparse.ArgumentParser(prog="python -m scripts.gpu_report", description=__doc__)
    options.add_argument(
        "--model", default="smollm2", help="model as for `tercet up`; random, random-8b: generated here"
    )
    options.add_argument("--input-len", type=int, default=1200, help="approximate number of words of each prompt")
    options.add_argument("--only", choices=("copies", "engines"), help="measure only this half of the report")
    options.add_argument("flags", nargs="*", help="after --: flags of vLLM, for every engine and for plain vLLM")
    given = options.parse_args()
    devices = list_devices()
    if not devices:
        sys.exit(f"no GPU is visible here: {why_no_devices()}")
    rows = list(_machine(devices))
    if given.only != "engines":
        rows += _copies()
    if given.only != "copies":
        with tempfile.TemporaryDirectory() as made:
            rows += _engines(*_model(given.model, Path(made), given.flags), given.input_len)
    for line in lines(rows):
        print(line)
    sys.exit(int(any(row.holds is False for row in rows)))


def _model(name: str, made: Path, flags: list[str]) -> tuple[str, list[str]]:
    """Return the model that servers load, and vLLM's flags for it."""
    if name == "random":
        return str(random_model.make(made)), flags
    if name == "random-8b":
        return str(random_model.make_large(made)), [*random_model.MADE_BY_VLLM, *flags]
    return name, flags


def _machine(devices: tuple[Device, ...]) -> Iterator[Row]:
    where = "both engines share it" if len(devices) == 1 else f"{len(devices)} of them"
    yield Row("device", f"{devices[0].name}, driver {devices[0].driver or 'unknown'}", where)
    yield Row("vLLM", f"{vllm_version()}, torch {version('torch')}, tercet {version('tercet')}")


def _copies() -> Iterator[Row]:
    found = {name: attempt(name, lambda name=name: copies.measured(name)) for name in copies.WAYS}
    across, out = found["plain_across"], found["plain_out"]
    yield Row("plain copy, device to itself", speed(across))
    yield Row("plain copy, device to host", speed(out))
    yield share("ipc: blocks of another process", found["ipc"], across, "as near a plain copy as can be")
    yield share("staged: blocks to host memory", found["staged"], out, "as near a plain copy as can be")
    nixl = share("nixl: blocks of another agent", found["nixl"], across, "without RDMA, what UCX has")
    # NIXL is not in the wheel's requirements, so its failure is accepted.
    yield nixl._replace(holds=None) if isinstance(found["nixl"], Failed) else nixl


def _engines(model: str, flags: list[str], words: int) -> Iterator[Row]:
    plain = _asked("plain vLLM", servers.plain_vllm(model, flags), words)
    engine = _asked("one engine", servers.engine(model, flags), words)
    alone = _asked("one engine behind a router", servers.fleet(model, ALONE, flags), words)
    two = _asked("two engines", servers.fleet(model, TWO, flags), words)
    yield ratio("TTFT: two engines / one", _of(two, "first"), _of(alone, "first"), 1.05)
    yield ratio("decode step: engine / plain vLLM", _of(engine, "gap"), _of(plain, "gap"), 1.02)
    several = "gap_of_several"
    yield ratio("the same, 16 streams at once", _of(engine, several), _of(plain, several), 1.02)
    yield _same("answers of one engine", engine, plain)
    yield _same("answers of two engines", two, plain)


def _asked(what: str, server: AbstractContextManager[str], words: int) -> Asked:
    def ask() -> Asked:
        with server as url:
            said = attempt(f"{what}: its answers", lambda: answers(url))
            soon = attempt(f"{what}: how soon it answers", lambda: latencies(url, words))
            print(f"{what}: {soon}", file=sys.stderr, flush=True)
            return Asked(soon, said)

    found = attempt(f"{what}, which starts now", ask)
    return Asked(found, found) if isinstance(found, Failed) else found


def _of(asked: Asked, name: str) -> float | Failed:
    found = asked.latencies
    return found if isinstance(found, Failed) else getattr(found, name)


def _same(name: str, asked: Asked, plain: Asked) -> Row:
    """Return a row with the number of answers that equal those of plain vLLM."""
    wanted = "those of plain vLLM, all of them"
    ours, theirs = asked.answers, plain.answers
    if isinstance(ours, Failed) or isinstance(theirs, Failed):
        return Row(name, why_not(ours, theirs), wanted, holds=False)
    pairs = list(zip(ours, theirs, strict=True))
    others = [str(number) for number, (one, other) in enumerate(pairs) if one != other]
    found = f"{len(pairs) - len(others)} of {len(pairs)} equal"
    return Row(name, f"{found}; others: {', '.join(others)}" if others else found, wanted, not others)


if __name__ == "__main__":
    main()
