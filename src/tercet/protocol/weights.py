"""A choice by weights: each item's part of all draws is its weight divided by the sum of all weights."""

from __future__ import annotations

from collections.abc import Sequence


def chosen_by_weight(weights: Sequence[float], draw: float) -> int:
    """Return the index of the item whose part of ``[0, 1)`` contains ``draw``; an item with weight 0 has no part.

    ``weights`` are finite, at least 0, and not all 0.
    """
    # Relative to the largest: sums of the weights may overflow, and products of a draw with the smallest floats round.
    largest = max(weights)
    parts = [weight / largest for weight in weights]
    left = draw * sum(parts)
    last = 0
    for index, part in enumerate(parts):
        if part > 0:
            last = index
            left -= part
            if left < 0:
                break
    return last  # rounding errors may leave a small rest, which is the last item's
