"""A program with prefix-aware picking, for measuring how fast fleets are simulated.

``tercet sim --program benchmarks/prefix_aware.py:prefix_aware --fleet both=1000 --rate 2000 --requests 20000
--input-mean 512 --output-mean 128 --prefixes 4000 --prefix 256``
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from tercet.fleet import EngineFleet, Member
from tercet.programs import Answer
from tercet.protocol import Request

BLOCK = 64
# Sequences by which an engine that knows a prefix may be ahead of the others and still be chosen for it.
AHEAD = 8


class Homes:
    """Which engine has last seen a prompt's blocks; each block's hash covers everything before it."""

    def __init__(self) -> None:
        self._homes: dict[int, Member] = {}

    def blocks(self, prompt: tuple[int, ...]) -> list[int]:
        """The hashes of a prompt's full blocks."""
        found, parent = list[int](), 0
        for begin in range(0, len(prompt) - BLOCK + 1, BLOCK):
            parent = hash((parent, prompt[begin : begin + BLOCK]))
            found.append(parent)
        return found

    def find(self, blocks: list[int]) -> Member | None:
        """The engine that has the longest prefix."""
        homes = self._homes
        for block in reversed(blocks):
            if block in homes:
                return homes[block]
        return None

    def note(self, blocks: list[int], member: Member) -> None:
        """Remember where a prompt went."""
        self._homes.update(dict.fromkeys(blocks, member))


_homes: WeakKeyDictionary[EngineFleet, Homes] = WeakKeyDictionary()


async def prefix_aware(request: Request, fleet: EngineFleet) -> Answer:
    """Serve on the engine that knows most of the prompt, unless it is far busier than the least busy one."""
    homes = _homes.setdefault(fleet, Homes())
    blocks = homes.blocks(request.prompt)
    member, idle = homes.find(blocks), least_loaded(fleet.members)
    if member is None or not member.reachable or member.in_flight > idle.in_flight + AHEAD:
        member = idle
    homes.note(blocks, member)
    member.in_flight += 1
    try:
        yield member.engine.start_generate(request)
    finally:
        member.in_flight -= 1


def least_loaded(members: Sequence[Member]) -> Member:
    """The first of the least busy engines that answer."""
    # A pass over a thousand members for each request: it has no call for each of them.
    loads = [member.in_flight for member in members]
    found = members[loads.index(min(loads))]
    return found if found.reachable else min(members, key=lambda member: (not member.reachable, member.in_flight))
