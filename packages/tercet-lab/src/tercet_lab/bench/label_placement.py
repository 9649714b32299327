"""The placement of labels next to points, so that no label covers another one or a point.

It uses no I/O, and any unit of length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

DISTANCES = (1.0, 1.8, 3.0, 4.5, 6.5)
# Degrees. A reader looks next to a point first: right, left, above, below, then diagonally.
ANGLES = (0, 180, 90, 270, 45, 315, 135, 225, 22, 338, 158, 202, 67, 293, 113, 247)


class Box(NamedTuple):
    """A rectangle."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: Box) -> bool:
        """True if this box and ``other`` have more than an edge in common."""
        return (
            self.left < other.right and other.left < self.right and self.bottom < other.top and other.bottom < self.top
        )

    def within(self, other: Box) -> bool:
        """True if this box is inside ``other``."""
        return (
            self.left >= other.left
            and self.bottom >= other.bottom
            and self.right <= other.right
            and self.top <= other.top
        )

    def distance(self, x: float, y: float) -> float:
        """Return the distance from a point to the box; 0 for a point inside it."""
        return math.hypot(max(self.left - x, 0.0, x - self.right), max(self.bottom - y, 0.0, y - self.top))

    @staticmethod
    def around(x: float, y: float, width: float, height: float) -> Box:
        """Return the box with this center."""
        return Box(x - width / 2, y - height / 2, x + width / 2, y + height / 2)


def place(
    points: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], taken: Sequence[Box], frame: Box,
    gap: float,
) -> list[Box | None]:  # fmt: skip
    """Return a box for each point's label, in order, or None if there is no room near the point.

    The boxes are inside the frame, and overlap neither each other nor the boxes ``taken``. ``gap`` is the least
    distance of a label from its point.
    """
    placed: list[Box | None] = []
    occupied = list(taken)
    for point, size in zip(points, sizes, strict=True):
        free = (
            box
            for box in _candidates(point, size, gap)
            if box.within(frame) and not any(box.overlaps(other) for other in occupied)
        )
        found = next(free, None)
        placed.append(found)
        if found is not None:
            occupied.append(found)
    return placed


def _candidates(point: tuple[float, float], size: tuple[float, float], gap: float) -> Iterator[Box]:
    for distance in DISTANCES:
        for angle in ANGLES:
            across, up = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            # The label's near edge, not its middle, is at this distance.
            x = point[0] + across * (gap * distance + size[0] / 2)
            y = point[1] + up * (gap * distance + size[1] / 2)
            yield Box.around(x, y, *size)
