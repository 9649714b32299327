"""For how many more requests engines have room, by what they say and what was picked for them since.

By each engine's queue and KV cache, or by how much all of them run together, as llm-d's ``utilization-detector`` and
``concurrency-detector`` tell it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tercet.fleet import EngineFleet, Member
from tercet.gateway.reported_load import UNKNOWN_ROOM, ReportedLoad
from tercet.scheduling import ConcurrencyLimit, Saturation

ENOUGH_ROOM = 8
"""So many may hold a place at once; it is given back as soon as the pick is made."""


class Room(Protocol):
    """For how many more requests there is room."""

    def left(self) -> int:
        """Anything above 0 for who wants to know whether there is any; more where nobody can be asked."""
        ...

    def may_have_come(self, name: str) -> bool:
        """Whether there may be some, now that the engine of this name has reported."""
        ...


@dataclass(frozen=True)
class RoomByUtilization:
    """Engines that decode have room by the thresholds of ``limit``, each by itself."""

    fleet: EngineFleet
    load: ReportedLoad
    limit: Saturation

    def left(self) -> int:
        """What is more than enough for all that may hold a place is not counted to its end."""
        room, nobody = 0, True
        for member in self.fleet.open:
            if member.reachable and member.role != "prefill":
                nobody = False
                room += self._on(member.name)
                if room >= ENOUGH_ROOM:
                    return room
        return UNKNOWN_ROOM if nobody else room  # the pick says that there is nobody, or takes others

    def may_have_come(self, name: str) -> bool:
        return self._on(name) > 0

    def _on(self, name: str) -> int:
        return self.load.room(name, self.limit.queue_depth_threshold, self.limit.kv_cache_util_threshold)


@dataclass(frozen=True)
class RoomByConcurrency:
    """All engines that answer have room together, for as much as each may run by ``limit``."""

    fleet: EngineFleet
    limit: ConcurrencyLimit

    def left(self) -> int:
        able = [member for member in self.fleet.open if member.reachable]
        if not able:
            return UNKNOWN_ROOM  # the pick says that there is nobody
        limit = self.limit
        if limit.concurrency_mode == "requests":
            return max(0, len(able) * limit.max_concurrency - sum(member.in_flight for member in able))
        used = self._tokens_used(able) if limit.concurrency_mode == "tokens" else self._used(able)
        return ENOUGH_ROOM if used < 1 else 0  # how long the next ones are is not known

    def may_have_come(self, name: str) -> bool:
        return True

    def _tokens_used(self, able: list[Member]) -> float:
        return sum(member.in_flight_tokens for member in able) / (len(able) * self.limit.max_token_concurrency)

    def _used(self, able: list[Member]) -> float:
        """Of each the scarcer one of both counts."""
        limit = self.limit
        shares = [
            max(member.in_flight / limit.max_concurrency, member.in_flight_tokens / limit.max_token_concurrency)
            for member in able
        ]
        return sum(shares) / len(able)
