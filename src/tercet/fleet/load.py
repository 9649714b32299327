"""What engines report of themselves, kept as columns so that a thousand can be compared at once."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tercet.protocol import EngineLoad
from tercet.scheduling.engines import Floats, Integers
from tercet.scheduling.hashing import key_of

STALE_AFTER = 1.0
"""Seconds after which a report counts as unknown: ten of those that engines send every 100 ms have not come."""


class LoadTable:
    """The last report of each engine; every engine has a row from :meth:`add` to :meth:`remove`.

    ``clock`` gives seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float], stale_after: float = STALE_AFTER) -> None:
        self._clock = clock
        self._stale_after = stale_after
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._at = np.empty(0)
        self._keys = np.empty(0, dtype=np.uint64)
        self._columns = {name: np.empty(0) for name in EngineLoad.__struct_fields__}

    @property
    def size(self) -> int:
        """The number of rows, unused ones included: every row is below it."""
        return len(self._at)

    def add(self, name: str) -> int:
        """A row for an engine that has said nothing yet."""
        if not self._free:
            self._grow()
        row = self._rows[name] = self._free.pop()
        self._at[row] = -math.inf
        self._keys[row] = key_of(name)
        return row

    def remove(self, name: str) -> int:
        """Give an engine's row back; what was there is void."""
        row = self._rows.pop(name)
        self._free.append(row)
        return row

    def row(self, name: str) -> int | None:
        """An engine's row, if it has one."""
        return self._rows.get(name)

    def report(self, name: str, load: EngineLoad) -> None:
        """An engine said this now; a name without a row, such as that of one just removed, is ignored."""
        row = self._rows.get(name)
        if row is None:
            return
        self._at[row] = self._clock()
        for field, column in self._columns.items():
            value: float | None = getattr(load, field)
            column[row] = math.nan if value is None else value

    def last(self, name: str) -> tuple[EngineLoad, float] | None:
        """An engine's last report, however old, and its age in seconds; None if it has said nothing."""
        row = self._rows.get(name)
        if row is None or not math.isfinite(self._at[row]):
            return None
        found = {field: float(column[row]) for field, column in self._columns.items()}
        load = EngineLoad(
            waiting=int(found["waiting"]),
            running=int(found["running"]),
            kv_usage=found["kv_usage"],
            tokens=None if math.isnan(found["tokens"]) else int(found["tokens"]),
            step_time=None if math.isnan(found["step_time"]) else found["step_time"],
        )
        return load, self._clock() - float(self._at[row])

    def column(self, name: str, rows: Integers) -> Floats:
        """See :class:`tercet.scheduling.engines.Reports`."""
        age = self._clock() - self._at[rows]
        if name == "age":
            return np.where(np.isfinite(age), age, np.nan)
        return np.where(age <= self._stale_after, self._columns[name][rows], np.nan)

    def keys(self, rows: Integers) -> NDArray[np.uint64]:
        """See :class:`tercet.scheduling.engines.Reports`."""
        return self._keys[rows]

    def _grow(self) -> None:
        old = self.size
        new = max(8, 2 * old)
        self._at.resize(new, refcheck=False)
        self._keys.resize(new, refcheck=False)
        for column in self._columns.values():
            column.resize(new, refcheck=False)
        self._free = list(range(new - 1, old - 1, -1))  # the lowest row is taken first
