"""A program with prefix-aware picking, to measure the speed of simulating large fleets.

``tercet sim --program benchmarks/prefix_aware.py:prefix_aware --fleet both=1000 --request-rate 2000
--num-prompts 20000 --input-mean 512 --output-mean 128 --prefixes 4000 --prefix 256``
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from tercet.fleet import FleetKnowledge, FleetView, Member
from tercet.programs import Answer
from tercet.protocol import Request
from tercet.protocol.content import chain

BLOCK = 64
# An engine with the prefix is chosen if it has at most this number of sequences more than the least busy engine.
AHEAD = 8


class Homes:
    """The engine that last got each block of prompts, and the number of sequences of each engine.

    The hash of a block covers all blocks before it.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self._homes: dict[int, int] = {}
        # A copy of the members' counts: reading them from a thousand members takes longer than all other work here.
        self._loads = np.zeros(len(members), dtype=np.int32)

    def find(self, blocks: list[int]) -> int | None:
        """Return the index of the engine with the longest prefix, or None."""
        homes = self._homes
        for block in reversed(blocks):
            if block in homes:
                return homes[block]
        return None

    def choose(self, blocks: list[int]) -> int:
        """Return the index of the engine to use, and count one more sequence there until :meth:`leave`."""
        place, loads, members = self.find(blocks), self._loads, self.members
        idle = int(loads.argmin())
        if not members[idle].reachable:
            idle = min(range(len(members)), key=lambda at: (not members[at].reachable, loads[at]))
        if place is None or not members[place].reachable or loads[place] > loads[idle] + AHEAD:
            place = idle
        self._homes.update(dict.fromkeys(blocks, place))
        loads[place] += 1
        return place

    def leave(self, place: int) -> None:
        """Record that a sequence has ended."""
        self._loads[place] -= 1


# Each request has its own view of the fleet, but the knowledge of the engines is shared.
_homes: WeakKeyDictionary[FleetKnowledge, Homes] = WeakKeyDictionary()


async def prefix_aware(request: Request, fleet: FleetView) -> Answer:
    """Serve on the engine with the longest cached prefix, unless it is much busier than the least busy engine."""
    homes = _homes.get(fleet.fleet.knowledge) or _homes.setdefault(fleet.fleet.knowledge, Homes(fleet.members))
    place = homes.choose(chain(0, request.prompt, BLOCK))
    try:
        yield homes.members[place].engine.start_generate(request)
    finally:
        homes.leave(place)
