"""The rows of the report. Each is measured separately: a failed row has the reason, and does not stop the others."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Failed(NamedTuple):
    """A measurement that failed, with the reason."""

    why: str


class Row(NamedTuple):
    """A row: name, result, requirement, and True if the result meets the requirement (None: no requirement)."""

    name: str
    found: str
    wanted: str = ""
    holds: bool | None = None


def attempt(what: str, measure: Callable[[], T]) -> T | Failed:
    """Measure, and return the result or the failure. Progress and tracebacks are printed to stderr."""
    print(f"measuring: {what}", file=sys.stderr, flush=True)
    try:
        return measure()
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        said = str(error).strip().splitlines() or [type(error).__name__]
        return Failed(f"failed: {said[-1]}")


def ratio(name: str, of: float | Failed, to: float | Failed, most: float) -> Row:
    """Return the row of a ratio of two times in seconds, which must be at most ``most``."""
    wanted = f"{most:g} or less"
    if isinstance(of, Failed) or isinstance(to, Failed):
        return Row(name, why_not(of, to), wanted, holds=False)
    return Row(name, f"{of / to:.3f} ({of * 1e3:.2f} / {to * 1e3:.2f} ms)", wanted, of / to <= most)


def why_not(*figures: object) -> str:
    """Return the reason of the first failure among results; empty without a failure."""
    return next((each.why for each in figures if isinstance(each, Failed)), "")


def share(name: str, of: float | Failed, to: float | Failed, wanted: str) -> Row:
    """Return the row of a rate in bytes per second, with its ratio to the rate of a plain copy."""
    if isinstance(of, Failed):
        return Row(name, of.why, wanted, holds=False)
    beside = "" if isinstance(to, Failed) else f", {of / to:.2f} of it"
    return Row(name, f"{speed(of)}{beside}", wanted)


def speed(found: float | Failed) -> str:
    """Return a rate as text, from bytes per second."""
    return found.why if isinstance(found, Failed) else f"{found / 1e9:.1f} GB/s"


def lines(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of the table."""
    marks = {None: "", True: "ok", False: "NOT"}
    cells = [(row.name, row.found, row.wanted, marks[row.holds]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
