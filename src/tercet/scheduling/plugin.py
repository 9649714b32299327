"""What a plugin is, a frozen record of its parameters with one method, and what it is given to decide.

In a file parameters are written in camel case (``block_size`` is ``blockSize``); unknown ones are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import ClassVar, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from tercet.protocol import AdapterLoad, EngineView, Request, Role
from tercet.scheduling.hashing import block_hashes

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

    def counted(self, name: str, rows: Integers) -> Floats:
        """``in_flight`` or ``in_flight_tokens``: what this process has the engines in ``rows`` do now."""
        ...

    def adapters(self, rows: Integers) -> Sequence[AdapterLoad | None]:
        """Which LoRA adapters the engines in ``rows`` use; None for one that serves none, or has not said it lately."""
        ...

    def keys(self, rows: Integers) -> NDArray[np.uint64]:
        """Numbers made of the engines' names, the same in every process."""
        ...


def _said(name: str) -> cached_property[Floats]:
    """A column, looked up when it is asked for first."""
    return cached_property(lambda engines: engines._reports.column(name, engines.rows))


class Engines:
    """The candidates of one decision, in one order: ``engines[i]`` belongs to item ``i`` of each column.

    Iterating gives :class:`EngineView` objects. Columns of what engines said have NaN where nothing is known:
    requests ``waiting`` and ``running``, ``tokens`` still to work on, the share (0 to 1) of the KV cache in use
    (``kv_usage``), the seconds of recent steps (``step_time``), and of the last report, however old, its ``age``.
    """

    waiting = _said("waiting")
    running = _said("running")
    tokens = _said("tokens")
    kv_usage = _said("kv_usage")
    step_time = _said("step_time")
    age = _said("age")

    def __init__(
        self, views: Sequence[EngineView], rows: Integers, reports: Reports, places: Integers | None = None
    ) -> None:
        """``places`` are those of ``views`` that are meant, all if not given."""
        self.rows = rows
        self._all = views
        self._places = places
        self._reports = reports
        self._lasting: dict[int, tuple[Filter, Engines]] = {}

    @cached_property
    def views(self) -> Sequence[EngineView]:
        """Each as it is."""
        if self._places is None:
            return self._all
        places: list[int] = self._places.tolist()
        return [self._all[place] for place in places]

    def anew(self) -> Engines:
        """The same engines, for another decision: what they said is looked up again."""
        same = Engines(self._all, self.rows, self._reports, self._places)
        same._lasting = self._lasting
        return same

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[EngineView]:
        return iter(self.views)

    def __getitem__(self, index: int) -> EngineView:
        return self._all[index if self._places is None else self._places[index]]

    def where(self, keep: Sequence[bool] | Booleans) -> Engines:
        """Those for which ``keep`` is true."""
        if isinstance(keep, list) and False not in keep:  # a tenth of what an array of it costs
            return self
        chosen = np.asarray(keep, dtype=np.bool_)
        if chosen.all():
            return self
        places = chosen.nonzero()[0] if self._places is None else self._places[chosen]
        return Engines(self._all, self.rows[chosen], self._reports, places)

    def kept_by(self, plugin: Filter, decision: Decision) -> Engines:
        """Those that a filter keeps; of one that always keeps the same, those that it kept before."""
        if not plugin.lasting:
            return self.where(plugin.keep(decision, self))
        known = self._lasting.get(id(plugin))
        if known is None:  # the filter is kept beside it: so nothing else has its id
            known = self._lasting[id(plugin)] = plugin, self.where(plugin.keep(decision, self))
        return known[1].anew()

    @cached_property
    def in_flight(self) -> Floats:
        """Sequences that this front door runs on each."""
        return self._reports.counted("in_flight", self.rows)

    @cached_property
    def in_flight_tokens(self) -> Floats:
        """Prompt tokens of the sequences that this front door runs on each."""
        return self._reports.counted("in_flight_tokens", self.rows)

    @cached_property
    def adapter_loads(self) -> Sequence[AdapterLoad | None]:
        """Which LoRA adapters each uses; None for one that serves none, or has not said it lately."""
        return self._reports.adapters(self.rows)

    @cached_property
    def keys(self) -> NDArray[np.uint64]:
        """A number made of each engine's name, the same in every process."""
        return self._reports.keys(self.rows)


class PrefixIndex(Protocol):
    """Which engine holds which blocks."""

    def matched(self, hashes: Sequence[int]) -> Integers:
        """By row: how many of the first blocks the engine holds, without a gap."""
        ...


class RoutedPrefixes(PrefixIndex, Protocol):
    """An index that knows only what was routed where."""

    def note(self, row: int, hashes: Sequence[int]) -> None:
        """These blocks are on their way to the engine in ``row``."""
        ...


class Knowledge(Protocol):
    """What a fleet remembers beyond its engines' reports.

    It belongs to the fleet, not to plugins: a scheduling file that is loaded anew finds it as it was.
    """

    def routed(self, block_size: int, capacity: int) -> RoutedPrefixes:
        """The index of what was routed, in blocks of ``block_size`` tokens, at most ``capacity`` blocks per engine."""
        ...

    @property
    def stored(self) -> Mapping[int, PrefixIndex]:
        """The indexes of what engines say they hold, by the block size (tokens) that they use."""
        ...

    def cold_turns(self, rows: Integers, size: int) -> Floats:
        """When each engine last took a prompt that nobody had cached: larger is later, 0 is never.

        Only the ``size`` latest engines are remembered.
        """
        ...

    def note_cold(self, row: int) -> None:
        """The engine in ``row`` takes a prompt that nobody had cached."""
        ...


@dataclass
class Decision:
    """One pick: for whom, in which role, and what scorers found out on the way.

    ``matched`` are the tokens of the prompt that each engine (by row) is believed to hold; None while no scorer looked.
    ``partner`` is the engine that was picked to decode, where one that prefills for it is picked, if that is known.
    """

    request: Request | None
    role: Role
    knowledge: Knowledge
    random: Random
    matched: Integers | None = None
    partner: EngineView | None = None
    _hashes: dict[tuple[int, int | None], list[int]] = field(default_factory=dict[tuple[int, "int | None"], list[int]])

    def hashes(self, block_size: int, limit: int | None = None) -> list[int]:
        """The prompt's block hashes, computed once per decision; none without a request."""
        if self.request is None:
            return []
        key = block_size, limit
        if key not in self._hashes:
            self._hashes[key] = block_hashes(self.request, block_size, limit)
        return self._hashes[key]

    def note_match(self, tokens: Integers) -> None:
        """A scorer believes that engines hold so many tokens, by row; the largest belief counts."""
        self.matched = tokens if self.matched is None else np.maximum(self.matched, tokens)


Scores = Floats | Sequence[float]


class Plugin(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Base of all plugins; its fields are the parameters."""

    def picked(self, decision: Decision, row: int) -> None:
        """The decision fell on the engine in ``row``. For plugins that tell :class:`Knowledge` what happened."""


class Filter(Plugin, frozen=True, kw_only=True):
    """Leaves out engines.

    If a filter that is not ``strict`` leaves out all, it is passed over; a strict one then fails the pick. One that is
    ``lasting`` goes by names, roles and labels of engines alone, and keeps the same for every request: it is asked when
    those have changed.
    """

    strict: bool = True
    lasting: ClassVar[bool] = False

    def keep(self, decision: Decision, engines: Engines) -> Booleans | Sequence[bool]:
        """For each engine, whether it stays."""
        raise NotImplementedError(f"{type(self).__name__} has no keep()")


class Scorer(Plugin, frozen=True):
    """Gives each engine a score from 0 to 1; the sum of scores times weights is what pickers see."""

    runs_last: ClassVar[bool] = False

    def score(self, decision: Decision, engines: Engines) -> Scores:
        """A score for each engine, 1 for the best. What is outside of 0 to 1 is cut off there; NaN counts as 0."""
        raise NotImplementedError(f"{type(self).__name__} has no score()")


class Picker(Plugin, frozen=True):
    """Picks one of the engines that filters left, by their scores."""

    def pick(self, decision: Decision, engines: Engines, scores: Floats) -> int:
        """The index of the engine to take; there is at least one."""
        raise NotImplementedError(f"{type(self).__name__} has no pick()")


class Decider(Plugin, frozen=True):
    """Decides whether a second engine shall prefill for the decode engine that was picked."""

    def disaggregates(self, request: Request, cached: int, prefill: Engines) -> bool:
        """``cached`` tokens of the prompt are believed to be on the decode engine; ``prefill`` could compute the rest.

        ``prefill`` leaves the decode engine out, and is never empty.
        """
        raise NotImplementedError(f"{type(self).__name__} has no disaggregates()")
