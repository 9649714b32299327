"""A program with prefix-aware picking, for measuring how fast fleets are simulated.

``tercet sim --program benchmarks/prefix_aware.py:prefix_aware --fleet both=1000 --request-rate 2000
--num-prompts 20000 --input-mean 512 --output-mean 128 --prefixes 4000 --prefix 256``
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from tercet.fleet import EngineFleet, FleetKnowledge, Member
from tercet.programs import Answer
from tercet.protocol import Request
from tercet.protocol.block_hashes import chain

BLOCK = 64
# Sequences by which an engine that knows a prefix may be ahead of the others and still be chosen for it.
AHEAD = 8


class Homes:
    """Which engine has last seen a prompt's blocks, and how many sequences each engine has.

    Each block's hash covers everything before it.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self._homes: dict[int, int] = {}
        # Beside the members' own counts: a look at each of a thousand takes longer than all else that is done here.
        self._loads = np.zeros(len(members), dtype=np.int32)

    def find(self, blocks: list[int]) -> int | None:
        """The place of the engine that has the longest prefix."""
        homes = self._homes
        for block in reversed(blocks):
            if block in homes:
                return homes[block]
        return None

    def choose(self, blocks: list[int]) -> int:
        """The place of the engine to take; its load counts one more, until :meth:`leave`."""
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
        """A sequence is over."""
        self._loads[place] -= 1


# Each request has a view of the fleet; what is known of its engines is shared.
_homes: WeakKeyDictionary[FleetKnowledge, Homes] = WeakKeyDictionary()


async def prefix_aware(request: Request, fleet: EngineFleet) -> Answer:
    """Serve on the engine that knows most of the prompt, unless it is far busier than the least busy one."""
    homes = _homes.get(fleet.knowledge) or _homes.setdefault(fleet.knowledge, Homes(fleet.members))
    place = homes.choose(chain(0, request.prompt, BLOCK))
    try:
        yield homes.members[place].engine.start_generate(request)
    finally:
        homes.leave(place)
