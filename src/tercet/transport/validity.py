"""Extent to which the KV of a lease is valid: in every plane, and in every part of its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# Disjoint token ranges, sorted, not touching.
Ranges = list[tuple[int, int]]


class Validity:
    """The valid ranges of a lease's KV in each of ``num_planes`` planes; ``end`` is the end of those from ``begin``.

    Senders that split heads differently cut blocks into different numbers of parts; parts of different numbers are not
    combined.
    """

    def __init__(self, begin: int, num_planes: int) -> None:
        self.end = begin
        self._begin = begin
        self._num_planes = num_planes
        # Keys: number of parts, part, plane.
        self._of: dict[int, dict[int, dict[int, Ranges]]] = {}

    def add(self, part: int, parts: int, planes: Iterable[int], pieces: Ranges) -> None:
        """Add token ranges that are valid in one part of the blocks of some planes."""
        valid = self._of.setdefault(parts, {}).setdefault(part, {})
        for plane in planes:
            for piece in pieces:
                valid[plane] = _merged(valid.get(plane, []), piece)
        self._settle()

    def remove(self, part: int, parts: int, planes: range, gone: tuple[int, int]) -> None:
        """Remove a token range that is overwritten in one part of some planes' blocks, in all its parts."""
        changed = False
        for other, by_part in self._of.items():
            for number, valid in by_part.items():
                # As fractions of a block: the parts may be cut differently.
                if number * parts < (part + 1) * other and part * other < (number + 1) * parts:
                    for plane in planes:
                        ranges = valid.get(plane)
                        if ranges and gone[0] < ranges[-1][1]:
                            valid[plane] = _without(ranges, gone)
                            changed = True
        if changed:
            self._settle()

    def _settle(self) -> None:
        self.end = max([self._begin, *(self._end_in(parts, by_part) for parts, by_part in self._of.items())])

    def _end_in(self, parts: int, by_part: Mapping[int, Mapping[int, Ranges]]) -> int:
        """Return the end of the range that is valid in all planes and in all parts of this number."""
        if len(by_part) < parts or any(len(valid) < self._num_planes for valid in by_part.values()):
            return self._begin
        return min(self._first_end(ranges) for valid in by_part.values() for ranges in valid.values())

    def _first_end(self, ranges: Ranges) -> int:
        return ranges[0][1] if ranges and ranges[0][0] == self._begin else self._begin


def _merged(ranges: Ranges, new: tuple[int, int]) -> Ranges:
    """Return disjoint sorted ranges with a new one added; ranges that touch are joined."""
    begin, end = new
    kept: Ranges = []
    for low, high in ranges:
        if high < begin or end < low:
            kept.append((low, high))
        else:
            begin, end = min(begin, low), max(end, high)
    return sorted([*kept, (begin, end)])


def _without(ranges: Ranges, gone: tuple[int, int]) -> Ranges:
    """Return disjoint sorted ranges with one range removed."""
    begin, end = gone
    pieces = [piece for low, high in ranges for piece in ((low, min(high, begin)), (max(low, end), high))]
    return [(low, high) for low, high in pieces if low < high]
