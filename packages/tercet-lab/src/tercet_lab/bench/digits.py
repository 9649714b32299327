"""The format of numbers for people."""

from __future__ import annotations

import math

FIGURES = 3


def three_digits(value: float | None) -> str:
    """Return a number with three significant figures and without an exponent; an empty text for None."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = round(value, _places(value))
    return f"{rounded:.{max(0, _places(rounded))}f}"


def _places(value: float) -> int:
    """Return the number of decimal places for three significant figures; it is negative for large numbers."""
    return FIGURES - 1 - math.floor(math.log10(abs(value)))
