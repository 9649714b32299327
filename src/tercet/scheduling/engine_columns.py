"""The engines that one decision is between: objects for those who read one, columns for those who compare all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import compress
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tercet.protocol import EngineView

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


class Reports(Protocol):
    """What engines said of themselves, by row; a row is an engine's place in every column, for as long as it is here.

    What was never said, or too long ago, is NaN.
    """

    def column(self, name: str, rows: Integers) -> Floats:
        """``waiting``, ``running``, ``tokens``, ``kv_usage``, ``step_time`` or ``age`` of the engines in ``rows``."""
        ...

    def keys(self, rows: Integers) -> NDArray[np.uint64]:
        """Numbers made of the engines' names, the same in every process."""
        ...


class Engines:
    """The candidates of one decision, in one order: ``engines[i]`` belongs to item ``i`` of each column.

    Iterating gives :class:`EngineView` objects. Columns of what engines report have NaN where nothing is known.
    """

    def __init__(self, views: Sequence[EngineView], rows: Integers, reports: Reports) -> None:
        self.views = views
        self.rows = rows
        self._reports = reports

    def __len__(self) -> int:
        return len(self.views)

    def __iter__(self) -> Iterator[EngineView]:
        return iter(self.views)

    def __getitem__(self, index: int) -> EngineView:
        return self.views[index]

    def where(self, keep: Sequence[bool] | Booleans) -> Engines:
        """Those for which ``keep`` is true."""
        chosen = np.asarray(keep, dtype=np.bool_)
        if chosen.all():
            return self
        return Engines(list(compress(self.views, chosen.tolist())), self.rows[chosen], self._reports)

    @cached_property
    def in_flight(self) -> Floats:
        """Sequences that this front door runs on each."""
        return np.array([view.in_flight for view in self.views], dtype=np.float64)

    @cached_property
    def in_flight_tokens(self) -> Floats:
        """Prompt tokens of the sequences that this front door runs on each."""
        return np.array([view.in_flight_tokens for view in self.views], dtype=np.float64)

    @cached_property
    def waiting(self) -> Floats:
        """Requests in each engine's queue, as it said."""
        return self._reports.column("waiting", self.rows)

    @cached_property
    def running(self) -> Floats:
        """Requests in each engine's batch, as it said."""
        return self._reports.column("running", self.rows)

    @cached_property
    def tokens(self) -> Floats:
        """Tokens that each engine has still to work on, as it said."""
        return self._reports.column("tokens", self.rows)

    @cached_property
    def kv_usage(self) -> Floats:
        """Share of each engine's KV cache that is in use, from 0 to 1, as it said."""
        return self._reports.column("kv_usage", self.rows)

    @cached_property
    def step_time(self) -> Floats:
        """Seconds of each engine's recent steps, as it said."""
        return self._reports.column("step_time", self.rows)

    @cached_property
    def age(self) -> Floats:
        """Seconds since each engine said something, however long ago; NaN if it never did."""
        return self._reports.column("age", self.rows)

    @cached_property
    def keys(self) -> NDArray[np.uint64]:
        """A number made of each engine's name, the same in every process."""
        return self._reports.keys(self.rows)
