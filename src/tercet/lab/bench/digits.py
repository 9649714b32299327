"""Formats numbers for people."""

from __future__ import annotations

import math

FIGURES = 3


def three_digits(value: float | None) -> str:
    """A number to three significant figures, without an exponent; empty for None."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = round(value, _places(value))
    return f"{rounded:.{max(0, _places(rounded))}f}"


def _places(value: float) -> int:
    """Decimal places that leave three significant figures; negative for numbers that have more before the point."""
    return FIGURES - 1 - math.floor(math.log10(abs(value)))
