"""Base classes of plugins (a frozen record of parameters with one method) and the data for their decisions.

In a file parameters are written in camel case (``block_size`` is ``blockSize``); unknown ones are refused. Prompts are
compared by the hashes of their blocks, and sessions are spread by consistent hashing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from random import Random
from typing import ClassVar, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from tercet.protocol import AdapterLoad, EngineView, MemberRole, Request
from tercet.protocol.content import chain, extras_of, root_of

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]
Scores = Floats | Sequence[float]


def block_hashes(request: Request, block_size: int, limit: int | None = None) -> list[int]:
    """Return the hashes of a prompt's full blocks, at most ``limit`` of them."""
    # Images are part of a block's hash, as their placeholder tokens are equal for all images.
    extras = extras_of(request.mm_features, block_size) if request.mm_features else None
    return chain(root_of(request.cache_salt, request.adapter), request.prompt, block_size, limit, extras)


def key_of(name: str) -> int:
    """Return a 64-bit hash of a name, equal in every process."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def preference(session: str, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a session's preference for each engine (``keys``, from :func:`key_of`); the highest one wins.

    An engine that joins or leaves does not change the order of the others.
    """
    mixed = keys ^ np.uint64(key_of(session))
    # The finalizer of SplitMix64: each bit of the input changes half of the output's bits.
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class Reports(Protocol):
    """Engines' reports, by row; a row is an engine's index in every column, as long as it is a member.

    A value that was never reported, or too long ago, is NaN.
    """

    def column(self, name: str, rows: Integers) -> Floats:
        """Return column ``name`` of the engines in ``rows``.

        The columns are ``waiting``, ``running``, ``tokens``, ``kv_usage``, ``step_time`` and ``age``.
        """
        ...

    def counted(self, name: str, rows: Integers, background: bool) -> Floats:
        """Return this process's ``in_flight`` or ``in_flight_tokens``, without those in the background or with them."""
        ...

    def adapters(self, rows: Integers) -> Sequence[AdapterLoad | None]:
        """Return LoRA adapters that the engines in ``rows`` use; None for one without adapters or a recent report."""
        ...

    def keys(self, rows: Integers) -> NDArray[np.uint64]:
        """Return hashes of the engines' names, the same in every process."""
        ...


def _reported(name: str) -> cached_property[Floats]:
    """Return a property for a column, which is looked up at its first use."""
    return cached_property(lambda engines: engines._reports.column(name, engines.rows))


class Engines:
    """The candidates of one decision, in one order: ``engines[i]`` belongs to item ``i`` of each column.

    Iterating gives :class:`EngineView` objects. Columns of reports have NaN for unknown values; of this router's own
    sequences there are their numbers, ``in_flight``, and those of their prompt tokens. In these, what runs in the
    background counts only for a decision about another ``background`` request: for clients, engines leave it out.
    """

    waiting = _reported("waiting")  # requests
    running = _reported("running")
    tokens = _reported("tokens")  # still to process
    kv_usage = _reported("kv_usage")  # the share (0 to 1) of the KV cache in use
    step_time = _reported("step_time")  # seconds of recent steps
    age = _reported("age")  # seconds since the last report, however old

    def __init__(
        self, views: Sequence[EngineView], rows: Integers, reports: Reports, places: Integers | None = None,
        background: bool = False,
    ) -> None:  # fmt: skip
        """Select ``places`` of ``views``, or all if ``places`` is None."""
        self.rows = rows
        self._all = views
        self._places = places
        self._reports = reports
        self.background = background
        self._lasting: dict[int, tuple[Filter, Engines]] = {}

    @cached_property
    def views(self) -> Sequence[EngineView]:
        if self._places is None:
            return self._all
        places: list[int] = self._places.tolist()
        return [self._all[place] for place in places]

    def for_another_decision(self, background: bool) -> Engines:
        """Return the same engines for another decision: their reports are looked up again."""
        same = Engines(self._all, self.rows, self._reports, self._places, background)
        # Shared, not copied: what a lasting filter keeps is valid as long as the list of engines is.
        same._lasting = self._lasting
        return same

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[EngineView]:
        return iter(self.views)

    def __getitem__(self, index: int) -> EngineView:
        return self._all[index if self._places is None else self._places[index]]

    def where(self, keep: Sequence[bool] | Booleans) -> Engines:
        if isinstance(keep, list) and False not in keep:  # a tenth of the cost of an array
            return self
        # Filters of users return lists, those of this package arrays.
        chosen = np.asarray(keep, dtype=np.bool_)
        if chosen.all():
            return self
        places = chosen.nonzero()[0] if self._places is None else self._places[chosen]
        return Engines(self._all, self.rows[chosen], self._reports, places, self.background)

    def kept_by(self, plugin: Filter, decision: Decision) -> Engines:
        """Return the engines that a filter keeps; the result of a lasting filter is cached."""
        if not plugin.lasting:
            return self.where(plugin.keep(decision, self))
        known = self._lasting.get(id(plugin))
        if known is None:  # the filter is stored with the result, so its id is not reused
            known = self._lasting[id(plugin)] = plugin, self.where(plugin.keep(decision, self))
        return known[1].for_another_decision(self.background)

    @cached_property
    def in_flight(self) -> Floats:
        return self._reports.counted("in_flight", self.rows, self.background)

    @cached_property
    def in_flight_tokens(self) -> Floats:
        return self._reports.counted("in_flight_tokens", self.rows, self.background)

    @cached_property
    def adapter_loads(self) -> Sequence[AdapterLoad | None]:
        return self._reports.adapters(self.rows)

    @cached_property
    def keys(self) -> NDArray[np.uint64]:
        return self._reports.keys(self.rows)


DEVICE = "gpu"
TIER_WEIGHTS: Mapping[str, float] = {DEVICE: 1.0, "cpu": 0.8, "storage": 0.3}
"""Worth of a cached block by its tier, the highest first: a block on a lower tier is loaded before it is used.

The names are those of vLLM's events, and the weights llm-d's.
"""


class PrefixIndex(Protocol):
    """Index of engines by the blocks that they hold."""

    def matched(self, hashes: Sequence[int]) -> Integers:
        """Return the number of the first blocks that each engine (by row) holds, without a gap."""
        ...


class RoutedPrefixes(PrefixIndex, Protocol):
    """An index of routed prompts only."""

    def note(self, row: int, hashes: Sequence[int]) -> None:
        """Record that these blocks will be on the engine in ``row``."""
        ...


class Knowledge(Protocol):
    """Knowledge of a fleet in addition to its engines' reports.

    It belongs to the fleet, not to plugins: it is kept when a scheduling file is reloaded.
    """

    def routed(self, block_size: int, capacity: int) -> RoutedPrefixes:
        """Return the index of routed prompts: blocks of ``block_size`` tokens, at most ``capacity`` per engine."""
        ...

    def start_kv_events(self) -> Mapping[int, PrefixIndex]:
        """Start engines' reports of the blocks that they hold; return the indexes, by block size in tokens."""
        ...

    def matched_by_tier(self, block_size: int, hashes: Sequence[int]) -> Mapping[str, Integers]:
        """Return by tier, the highest first, the number of the first blocks that each engine (by row) holds there.

        A block counts at its highest tier. Only the device is there if no engine reports a lower tier.
        """
        ...

    def cold_turns(self, rows: Integers, size: int) -> Floats:
        """Return the turn in which each engine last got a prompt that no engine had cached.

        A larger number is later, 0 is never. Only the ``size`` latest engines are remembered.
        """
        ...

    def note_cold(self, row: int) -> None:
        """Record that the engine in ``row`` gets a prompt that no engine had cached."""
        ...


@dataclass
class Decision:
    """One pick: its request and role, and the matches that scorers found."""

    request: Request | None
    role: MemberRole
    knowledge: Knowledge
    random: Random
    # The estimated number of the prompt's tokens in each engine's cache, by row; None before a scorer estimated it.
    matched: Integers | None = None
    tiers: Mapping[str, Integers] = field(default_factory=dict[str, Integers])  # the same by tier, if reported
    partner: EngineView | None = None  # the picked decode engine, for a pick of one that prefills for it
    scored: tuple[Engines, Floats] | None = None  # the engines that filters left, and their weighted scores by scorer
    _hashes: dict[tuple[int, int | None], list[int]] = field(default_factory=dict[tuple[int, "int | None"], list[int]])

    def hashes(self, block_size: int, limit: int | None = None) -> list[int]:
        """Return the prompt's block hashes, computed once per decision; empty without a request."""
        if self.request is None:
            return []
        key = block_size, limit
        if key not in self._hashes:
            self._hashes[key] = block_hashes(self.request, block_size, limit)
        return self._hashes[key]

    def note_match(self, tokens: Integers) -> None:
        # The best estimate counts: an engine holds at least what any of its indexes says.
        self.matched = tokens if self.matched is None else np.maximum(self.matched, tokens)


class Plugin(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Base of all plugins; its fields are the parameters."""

    def picked(self, decision: Decision, row: int) -> None:
        """Record the decision for the engine in ``row``; called after it.

        For plugins that record in :class:`Knowledge`.
        """


class Filter(Plugin, frozen=True, kw_only=True):
    """Base of filters, which leave engines out.

    If a filter that is not ``strict`` leaves out all, its result is ignored; a strict one then fails the pick. A
    ``lasting`` filter depends only on names, roles and labels of engines, so its result is the same for every request:
    it runs again only when those have changed.
    """

    strict: bool = True
    lasting: ClassVar[bool] = False

    def keep(self, decision: Decision, engines: Engines) -> Booleans | Sequence[bool]:
        """Return True for each engine that stays."""
        raise NotImplementedError(f"{type(self).__name__} has no keep()")


class Scorer(Plugin, frozen=True):
    """Base of scorers, which give each engine a score from 0 to 1; pickers get the weighted sum of scores."""

    runs_last: ClassVar[bool] = False

    def score(self, decision: Decision, engines: Engines) -> Scores:
        """Return a score for each engine, 1 for the best. Scores are clipped to 0 to 1; NaN counts as 0."""
        raise NotImplementedError(f"{type(self).__name__} has no score()")


class Picker(Plugin, frozen=True):
    """Base of pickers, which pick one of the engines that filters left, by their scores."""

    def pick(self, decision: Decision, engines: Engines, scores: Floats) -> int:
        """Return the index of the engine to pick; ``engines`` is never empty."""
        raise NotImplementedError(f"{type(self).__name__} has no pick()")


class Decider(Plugin, frozen=True):
    """Base of deciders, which decide whether a second engine prefills for the picked decode engine."""

    def disaggregates(self, request: Request, cached: int, prefill: Engines) -> bool:
        """Return True if a second engine should prefill. ``cached``: estimated prompt tokens on the decode engine.

        ``prefill`` are the candidates: it does not contain the decode engine, and is never empty.
        """
        raise NotImplementedError(f"{type(self).__name__} has no disaggregates()")
