"""The number of further requests for which engines have room, by their reports and the picks since then.

It is computed from each engine's queue and KV cache, or from the work of all engines together, as in llm-d's
``utilization-detector`` and ``concurrency-detector``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tercet.decisions.scheduling import ConcurrencyLimit, Saturation
from tercet.fleet import EngineFleet, Member
from tercet_gateway.reported_load import UNKNOWN_ROOM, ReportedLoad

ENOUGH_ROOM = 8
"""Most requests that hold a slot at a time; a slot is given back as soon as the pick is made."""


class Room(Protocol):
    """Room for further requests."""

    def left(self) -> int:
        """Return the number of further requests; any positive number means room, and without engines it is large."""
        ...

    def may_have_come(self, name: str) -> bool:
        """True if there may be room now, after a report of this engine."""
        ...


@dataclass(frozen=True)
class RoomByUtilization:
    """Room by utilization: each decode engine has room while it is below the thresholds of ``limit``."""

    fleet: EngineFleet
    load: ReportedLoad
    limit: Saturation

    def left(self) -> int:
        """Return the number of further requests, up to a number that is enough for all slots."""
        room, nobody = 0, True
        for member in self.fleet.open:
            if member.reachable and member.role != "prefill":
                nobody = False
                room += self._on(member.name)
                if room >= ENOUGH_ROOM:
                    return room
        # without an engine, the pick raises the error, or picks an engine of another role
        return UNKNOWN_ROOM if nobody else room

    def may_have_come(self, name: str) -> bool:
        return self._on(name) > 0

    def _on(self, name: str) -> int:
        return self.load.room(name, self.limit.queue_depth_threshold, self.limit.kv_cache_util_threshold)


@dataclass(frozen=True)
class RoomByConcurrency:
    """Room by concurrency: the engines that answer have room together, by the work that ``limit`` allows for each."""

    fleet: EngineFleet
    limit: ConcurrencyLimit

    def left(self) -> int:
        able = [member for member in self.fleet.open if member.reachable]
        if not able:
            return UNKNOWN_ROOM  # without an engine, the pick raises the error
        limit = self.limit
        if limit.concurrency_mode == "requests":
            return max(0, len(able) * limit.max_concurrency - sum(member.in_flight for member in able))
        used = self._tokens_used(able) if limit.concurrency_mode == "tokens" else self._used(able)
        return ENOUGH_ROOM if used < 1 else 0  # the length of the next requests is unknown

    def may_have_come(self, name: str) -> bool:
        return True

    def _tokens_used(self, able: list[Member]) -> float:
        return sum(member.in_flight_tokens for member in able) / (len(able) * self.limit.max_token_concurrency)

    def _used(self, able: list[Member]) -> float:
        """Return the used share, averaged over engines; for each engine the larger of both shares counts."""
        limit = self.limit
        shares = [
            max(member.in_flight / limit.max_concurrency, member.in_flight_tokens / limit.max_token_concurrency)
            for member in able
        ]
        return sum(shares) / len(able)
