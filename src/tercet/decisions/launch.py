"""Split of a fleet into prefill and decode engines: the launch rule, and the order of starts. Pure."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

from tercet.protocol import BadRequest, Role

_RATIO = re.compile(r"([1-9][0-9]{0,3}):([1-9][0-9]{0,3})")


class RoleRatio(NamedTuple):
    """Wanted ratio of prefill engines to decode engines; both numbers are at least 1."""

    prefill: int
    decode: int


def ratio_of(text: str) -> RoleRatio:
    """Return the ratio in a text such as ``1:3``. Raise :class:`~tercet.protocol.BadRequest`."""
    found = _RATIO.fullmatch(text)
    if found is None:
        raise BadRequest(f"pd-ratio: {text!r} is not a ratio such as 1:3, with numbers from 1 to 9999", "pd-ratio")
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
    """Return the roles in the order of starts: the first two differ, and each later start follows the rule.

    If the machine has no space for all engines, the rule splits the number that has started.
    """
    sizes = [1, *(split(size, ratio).prefill for size in range(2, instances + 1))]
    more: list[Role] = ["prefill" if now > before else "decode" for before, now in pairwise(sizes)]
    return ["prefill", *more]
