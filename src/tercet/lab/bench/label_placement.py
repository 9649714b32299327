"""Places labels of points, so that none lies on another one or on a point. No I/O, any unit of length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

DISTANCES = (1.0, 1.8, 3.0, 4.5, 6.5)
# Next to a point first, where a reader looks: to the right, to the left, above, below, then diagonally.
ANGLES = (0, 180, 90, 270, 45, 315, 135, 225, 22, 338, 158, 202, 67, 293, 113, 247)


class Box(NamedTuple):
    """A rectangle."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: Box) -> bool:
        """Whether they have more than an edge in common."""
        return (
            self.left < other.right and other.left < self.right and self.bottom < other.top and other.bottom < self.top
        )

    def within(self, other: Box) -> bool:
        """Whether it lies inside."""
        return (
            self.left >= other.left
            and self.bottom >= other.bottom
            and self.right <= other.right
            and self.top <= other.top
        )

    def distance(self, x: float, y: float) -> float:
        """Distance from a point to the box; 0 inside."""
        return math.hypot(max(self.left - x, 0.0, x - self.right), max(self.bottom - y, 0.0, y - self.top))

    @staticmethod
    def around(x: float, y: float, width: float, height: float) -> Box:
        """The box with this middle."""
        return Box(x - width / 2, y - height / 2, x + width / 2, y + height / 2)


def place(
    points: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], taken: Sequence[Box], frame: Box,
    gap: float,
) -> list[Box | None]:  # fmt: skip
    """Boxes for the points' labels, in order: inside the frame, on no other and on nothing taken.

    ``gap`` is the least distance of a label from its point. None if there is no room nearby.
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
