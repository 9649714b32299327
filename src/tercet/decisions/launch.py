"""How many of a fleet's engines prefill and how many decode: the launch rule, and the order of starts. Pure."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

from tercet.protocol import BadRequest, Role

_RATIO = re.compile(r"([1-9][0-9]{0,3}):([1-9][0-9]{0,3})")


class RoleRatio(NamedTuple):
    """Wanted prefill engines to decode engines; both are at least 1."""

    prefill: int
    decode: int


def ratio_of(text: str) -> RoleRatio:
    """A ratio such as ``1:3``. Raises :class:`~tercet.protocol.BadRequest`."""
    found = _RATIO.fullmatch(text)
    if found is None:
        raise BadRequest(f"pd-ratio: {text!r} is not a ratio such as 1:3, of numbers from 1 to 9999", "pd-ratio")
    return RoleRatio(int(found[1]), int(found[2]))


def split(instances: int, ratio: RoleRatio) -> RoleRatio:
    """Return the prefill and decode engines of a fleet of ``instances``, which are at least 2.

    All instances are used. Of the splits with at least one of each, the one whose ratio is closest has the smallest
    ``|prefill * ratio.decode - decode * ratio.prefill|``; of two equal ones, the one with more decode engines.
    """
    parts = ratio.prefill + ratio.decode
    nearest = -((parts - 2 * instances * ratio.prefill) // (2 * parts))  # halves are rounded down
    prefill = min(max(nearest, 1), instances - 1)
    return RoleRatio(prefill, instances - prefill)


def launch_order(instances: int, ratio: RoleRatio) -> list[Role]:
    """Roles in the order of their starts: the first two are one of each, and each later start is that of the rule.

    If the room is not enough for all engines, the rule splits the number that has started.
    """
    sizes = [1, *(split(size, ratio).prefill for size in range(2, instances + 1))]
    more: list[Role] = ["prefill" if now > before else "decode" for before, now in pairwise(sizes)]
    return ["prefill", *more]
