"""The engines of a fleet as rows of numbers, with the changes since the last frame."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tercet.fleet import EngineFleet, Member
from tercet.router.page.records import DEAD, DRAINING, REFUSED, SILENT, STOPPING, EngineTTFT, Seat, Unseen

MOST_ENGINES = 2000
"""Number of engines that are drawn one by one; the page shows the engines after them as sums by role."""
TTFT_SECONDS = 30.0
"""Time constant (seconds) of an engine's mean TTFT; after four of them without a request the mean is dropped."""
FORGOTTEN_AFTER = 4 * TTFT_SECONDS
Rows = NDArray[np.int64]
KV, RUNNING, WAITING, STEP = range(4)
_SCALES = np.array([1000.0, 1.0, 1.0, 1e6])


class LoadSource(Protocol):
    """The source of engines' reports."""

    def begin(self) -> None:
        """Start the engines' reports."""
        ...

    def table(self, members: Sequence[Member]) -> NDArray[np.float64]:
        """Return a row per member: KV usage (0 to 1), running, waiting, step time (seconds); NaN without a report."""
        ...


class ReportedLoads:
    """The reports that a router has received from its engines."""

    def __init__(self, fleet: EngineFleet) -> None:
        self._fleet = fleet

    def begin(self) -> None:
        self._fleet.knowledge.needed()

    def table(self, members: Sequence[Member]) -> NDArray[np.float64]:
        loads = self._fleet.knowledge.loads
        rows = self._fleet.knowledge.rows([member.name for member in members])
        return np.stack([loads.column(name, rows) for name in ("kv_usage", "running", "waiting", "step_time")], axis=1)


class FirstTokenTimes:
    """The mean TTFT by engine, of requests that spent most of it there; recent requests count more."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._found: dict[str, tuple[float, float, float]] = {}
        self._own: dict[str, EngineTTFT] = {}

    def add(self, engine: str, ttft: float) -> None:
        """Add the TTFT (seconds) of a request of this process."""
        _, requests, seconds = self._own.get(engine, (engine, 0, 0.0))
        self._own[engine] = EngineTTFT(engine, requests + 1, seconds + ttft)
        self._count(engine, 1, ttft)

    def add_of_others(self, seen: EngineTTFT) -> None:
        """Add the TTFTs of requests of another process."""
        self._count(*seen)

    def take(self) -> list[EngineTTFT]:
        """Return the TTFTs of this process that were added since the last call."""
        own, self._own = self._own, {}
        return [*own.values()]

    def _count(self, engine: str, requests: int, seconds: float) -> None:
        now = self._clock()
        total, count, at = self._found.get(engine, (0.0, 0.0, now))
        kept = math.exp((at - now) / TTFT_SECONDS)
        self._found[engine] = (total * kept + seconds, count * kept + requests, now)

    def in_ms(self, members: Sequence[Member]) -> list[int]:
        """Return the means in milliseconds, in the order of ``members``; 0 without a request, otherwise at least 1."""
        now = self._clock()
        for name in [name for name, (_, _, at) in self._found.items() if now - at > FORGOTTEN_AFTER]:
            del self._found[name]
        means = {name: int(total / count * 1e3) or 1 for name, (total, count, _) in self._found.items()}
        return [means.get(member.name, 0) for member in members]


class EngineRows:
    """The rows of all engines that are drawn, of the last frame."""

    def __init__(self, fleet: EngineFleet, loads: LoadSource, ttfts: FirstTokenTimes) -> None:
        self._fleet = fleet
        self._loads = loads
        self._ttfts = ttfts
        self.seats: list[Seat] = []
        self._rows: Rows = np.empty((0, 7), dtype=np.int64)
        self.unseen: list[Unseen] = []
        self.running = self.waiting = 0

    def look(self) -> tuple[list[Seat] | None, list[list[int]]]:
        """Return the engines if the list has changed, otherwise None, and the rows that have changed."""
        members = list(self._fleet.members)
        table = self._loads.table(members)
        rows = self._rows_of(members, table)
        self.running, self.waiting = int(rows[:, RUNNING].sum()), int(rows[:, WAITING].sum())
        self.unseen = _unseen(members[MOST_ENGINES:], rows[MOST_ENGINES:])
        rows, members = rows[:MOST_ENGINES], members[:MOST_ENGINES]
        seated = [(member.name, member.role) for member in members]
        if seated != self.seats:  # a Seat equals a plain tuple, which is made faster
            self.seats, self._rows = [Seat(*each) for each in seated], rows
            return self.seats, self.all()
        changed = np.nonzero((rows != self._rows).any(axis=1))[0]
        self._rows = rows
        return None, _listed(changed, rows[changed])

    def all(self) -> list[list[int]]:
        """Return every row of the last call of :meth:`look`."""
        return _listed(np.arange(len(self._rows)), self._rows)

    def _rows_of(self, members: Sequence[Member], table: NDArray[np.float64]) -> Rows:
        rows = np.zeros((len(members), 7), dtype=np.int64)
        if not members:
            return rows
        silent = np.isnan(table[:, KV])
        rows[:, :4] = np.rint(np.nan_to_num(table) * _SCALES)
        rows[:, 4] = [member.in_flight for member in members]
        rows[:, 5] = self._ttfts.in_ms(members)
        rows[:, 6] = [
            0 if each.reachable and not (each.draining or each.stopping or each.refused) else _state(each)
            for each in members
        ]  # a short cut, since most engines are well and there may be thousands
        rows[:, 6] += silent * SILENT
        return rows


def _state(member: Member) -> int:
    return (
        (not member.reachable) * DEAD + member.draining * DRAINING + member.stopping * STOPPING
        + bool(member.refused) * REFUSED
    )  # fmt: skip


def _listed(indexes: NDArray[np.int64], rows: Rows) -> list[list[int]]:
    return np.column_stack((indexes, rows)).tolist()


def _unseen(members: Sequence[Member], rows: Rows) -> list[Unseen]:
    found: list[Unseen] = []
    roles = np.array([member.role for member in members])
    for role in sorted(set(roles.tolist())):
        of_role = rows[roles == role]
        dead = int((of_role[:, 6] & DEAD != 0).sum())
        kv, running, waiting = (
            int(of_role[:, KV].mean()),
            int(of_role[:, RUNNING].sum()),
            int(of_role[:, WAITING].sum()),
        )
        found.append(Unseen(role, len(of_role), kv, running, waiting, dead))
    return found
