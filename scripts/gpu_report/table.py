"""Rows of the report: each is measured by itself, and one that fails says why and leaves the others alone."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Failed(NamedTuple):
    """Why there is no figure."""

    why: str


class Row(NamedTuple):
    """What was measured, how much it is, what it ought to be, and whether it is; None where nothing is asked."""

    name: str
    found: str
    wanted: str = ""
    holds: bool | None = None


def attempt(what: str, measure: Callable[[], T]) -> T | Failed:
    """Measure, and go on if that fails; progress and tracebacks go to stderr."""
    print(f"measuring: {what}", file=sys.stderr, flush=True)
    try:
        return measure()
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        said = str(error).strip().splitlines() or [type(error).__name__]
        return Failed(f"failed: {said[-1]}")


def ratio(name: str, of: float | Failed, to: float | Failed, most: float) -> Row:
    """Seconds divided by other seconds, which they may exceed by little."""
    wanted = f"{most:g} or less"
    if isinstance(of, Failed) or isinstance(to, Failed):
        return Row(name, why_not(of, to), wanted, holds=False)
    return Row(name, f"{of / to:.3f} ({of * 1e3:.2f} / {to * 1e3:.2f} ms)", wanted, of / to <= most)


def why_not(*figures: object) -> str:
    """What the first of some figures that there is not says."""
    return next((each.why for each in figures if isinstance(each, Failed)), "")


def share(name: str, of: float | Failed, to: float | Failed, wanted: str) -> Row:
    """Bytes per second, and how much of a plain copy's that is."""
    if isinstance(of, Failed):
        return Row(name, of.why, wanted, holds=False)
    beside = "" if isinstance(to, Failed) else f", {of / to:.2f} of it"
    return Row(name, f"{speed(of)}{beside}", wanted)


def speed(found: float | Failed) -> str:
    """Bytes per second in words."""
    return found.why if isinstance(found, Failed) else f"{found / 1e9:.1f} GB/s"


def lines(rows: list[Row]) -> Iterator[str]:
    """The table as text."""
    marks = {None: "", True: "ok", False: "NOT"}
    cells = [(row.name, row.found, row.wanted, marks[row.holds]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
