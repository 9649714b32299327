"""Policies: rules for the engine of each sequence. They propose moves from the fleet's state, and change nothing.

A policy is a function from engines, with their sequences, to proposals, the most urgent first. Its earlier proposals
count as done for its next ones: loads are those that the fleet would have then. It sees the fleet as engines with loads
and sequences, and chooses sequences by Llumnix' rules (:class:`Selection`). :func:`policies_of` returns those that the
settings name, from the user's files too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal, Protocol, cast

import msgspec

from tercet.decisions.scheduling.assembly import load_module, user_file
from tercet.protocol import BadRequest, MemberRole, NoSpace, Revision, Role, may_exchange_kv
from tercet.protocol.addresses import UNKNOWN_REVISION
from tercet.protocol.names import STORE
from tercet.settings import MoveSettings, RescheduleSettings

Order = Literal["FIT", "SR", "LR", "FCR", "LCR", "FCW", "FCWSR"]
Measure = Literal["num_req", "num_tokens", "block_ratio"]
FULL = 1.0
FIELD = "reschedule"


@dataclass(frozen=True)
class SequenceView:
    """One sequence on an engine, as policies see it."""

    seq_id: str
    tokens: int  # of its prompt and output
    share: float  # the part of the engine's KV cache (0 to 1) that they take
    running: bool  # it has a token; before, it waits
    age: float  # in seconds


@dataclass(frozen=True)
class Selection:
    """At most ``value`` of an engine's sequences, in an order.

    The unit of ``value`` is the measure: sequences (``num_req``), their total tokens (``num_tokens``), or their total
    share of the KV cache (``block_ratio``). Sequences that no longer fit are skipped.

    | order | |
    | --- | --- |
    | ``FIT`` | running ones, first the one whose share is closest to the share to move |
    | ``SR`` | running ones, the shortest first |
    | ``LR`` | running ones, the longest first |
    | ``FCR`` | running ones, in order of arrival |
    | ``LCR`` | running ones, the latest arrival first |
    | ``FCW`` | waiting ones, in order of arrival |
    | ``FCWSR`` | ``FCW``, then ``SR`` |
    """

    order: Order = "FIT"
    measure: Measure = "num_req"
    value: float = 1.0

    def of(self, sequences: Sequence[SequenceView], wanted: float = 0.0) -> Iterator[SequenceView]:
        """Yield the chosen sequences in order; ``wanted`` is the part of the KV cache that should be moved."""
        taken, size = 0.0, SIZES[self.measure]
        for running, by in ORDERS[self.order]:
            some = [each for each in sequences if each.running is running]
            for sequence in sorted(some, key=partial(by, wanted)):
                # Skip instead of stop: a smaller one behind a large one may still fit.
                if taken + size(sequence) <= self.value:
                    taken += size(sequence)
                    yield sequence


SIZES: Mapping[Measure, Callable[[SequenceView], float]] = {
    "num_req": lambda sequence: 1.0,
    "num_tokens": lambda sequence: float(sequence.tokens),
    "block_ratio": lambda sequence: sequence.share,
}


# For each order, whether running or waiting sequences are chosen, and by which key of the wanted share and a sequence.
ORDERS: Mapping[Order, Sequence[tuple[bool, Callable[[float, SequenceView], float]]]] = {
    "FIT": [(True, lambda wanted, each: abs(each.share - wanted))],
    "SR": [(True, lambda _, each: each.tokens)],
    "LR": [(True, lambda _, each: -each.tokens)],
    "FCR": [(True, lambda _, each: -each.age)],
    "LCR": [(True, lambda _, each: each.age)],
    "FCW": [(False, lambda _, each: -each.age)],
    "FCWSR": [(False, lambda _, each: -each.age), (True, lambda _, each: each.tokens)],
}


@dataclass
class LoadedEngine:
    """One engine and the sequences that may be moved away from it."""

    name: str
    role: MemberRole
    load: float | None  # share of its KV cache in use, 0 to 1; None if it has not reported any
    sequences: Sequence[SequenceView] = ()
    draining: bool = False  # it is to be emptied
    reachable: bool = True
    stale: bool = False  # it has shown no progress for longer than the settings allow
    waiting: int = 0  # requests in its queue
    revision: Revision = UNKNOWN_REVISION  # KV moves between engines whose revisions allow it
    arriving: float = 0.0  # share of the KV cache of moves that will arrive, less those that leave

    @property
    def takes(self) -> bool:
        return self.reachable and not self.draining and not self.stale

    @property
    def believed(self) -> float:
        """The engine's load including the moves that will arrive; an engine without a report counts as idle."""
        return (self.load or 0.0) + self.arriving

    @property
    def demand(self) -> float:
        """The used share if the engine had space for its whole queue; it may exceed 1."""
        return self.believed + sum(each.share for each in self.queue)

    @property
    def free(self) -> float:
        return max(0.0, 1.0 - self.believed)

    def can(self, role: MemberRole) -> bool:
        return self.role != STORE and (role == "both" or self.role in (role, "both"))

    def fits(self, other: LoadedEngine) -> bool:
        """Return True if a sequence of one engine may continue on the other."""
        return may_exchange_kv(self.revision, other.revision)

    @property
    def queue(self) -> list[SequenceView]:
        """The engine's waiting sequences, in order of arrival."""
        if not self.waiting:
            return []
        return sorted((each for each in self.sequences if not each.running), key=lambda each: -each.age)[
            -self.waiting :
        ]


@dataclass(frozen=True)
class Wanted:
    """Proposal to move one sequence to another engine."""

    seq_id: str
    source: str
    destination: str
    reason: str


Policy = Callable[[Sequence[LoadedEngine]], Iterable[Wanted]]


def move(sequence: SequenceView, source: LoadedEngine, destination: LoadedEngine, reason: str) -> Wanted:
    """Propose a move, and change the loads of both engines to those after it."""
    source.arriving -= sequence.share
    destination.arriving += sequence.share
    return Wanted(sequence.seq_id, source.name, destination.name, reason)


def least_loaded(engines: Iterable[LoadedEngine], role: MemberRole = "both") -> LoadedEngine | None:
    """Return the least loaded engine that accepts sequences and may serve in the role; None without one."""
    able = (each for each in engines if each.takes and each.can(role))
    return min(able, key=lambda each: each.believed, default=None)


def best_fit(engines: Iterable[LoadedEngine], share: float, ceiling: float) -> LoadedEngine | None:
    """Return the fullest engine with space for ``share`` below ``ceiling``; None without one."""
    able = (each for each in engines if each.takes and each.load is not None and each.believed + share <= ceiling)
    return max(able, key=lambda each: each.believed, default=None)


def drain(engines: Sequence[LoadedEngine]) -> Iterator[Wanted]:
    """Yield moves of every sequence away from an engine that is to be emptied."""
    for source in engines:
        if source.draining:
            yield from _emptied(source, engines, "drain")


def failover(engines: Sequence[LoadedEngine]) -> Iterator[Wanted]:
    """Yield moves of every sequence away from an engine without progress, before the engine is removed.

    Its KV is readable as long as its memory is. Llumnix calls this pre-stop migration of stale instances.
    """
    for source in engines:
        if source.stale and not source.draining:
            yield from _emptied(source, engines, "failover")


def prefill_to_decode(engines: Sequence[LoadedEngine]) -> Iterator[Wanted]:
    """Yield moves of sequences with a first token from prefill engines to the least loaded decode engine.

    Together with a program that sends requests to prefill engines only, this is prefill-decode disaggregation as in
    Llumnix: one rule for dispatching and one for moving. While no engine decodes, sequences stay.
    """
    for source in engines:
        if source.role == "prefill" and source.takes:
            for sequence in source.sequences:
                able = [each for each in engines if each.fits(source)]
                destination = least_loaded(able, "decode") if sequence.running else None
                if destination is not None:
                    yield move(sequence, source, destination, "prefill_to_decode")


def balance(
    engines: Sequence[LoadedEngine], roles: Sequence[Role], threshold: float, selection: Selection, reason: str
) -> Iterator[Wanted]:
    """Yield moves from the most to the least loaded engine of these roles, from the second to the last but one, etc.

    Each pair moves sequences while its demands differ by more than ``threshold``. A sequence is moved only if that
    brings the demands closer together, and only if the destination has space. Groups of engines that exchange no KV
    with each other are balanced separately.
    """
    groups = list[list[LoadedEngine]]()
    for engine in engines:
        if engine.role in roles and engine.takes and engine.load is not None:
            group = next((group for group in groups if group[0].fits(engine)), None)
            if group is None:
                groups.append([engine])
            else:
                group.append(engine)
    for group in groups:
        group.sort(key=lambda each: each.demand)
        # The emptiest with the fullest, the second with the second: with one partner each, no load counts twice.
        for destination, source in islice(zip(group, reversed(group), strict=True), len(group) // 2):
            gap = source.demand - destination.demand
            if gap <= threshold:
                break
            for sequence in selection.of(source.sequences, gap / 2):
                gap = source.demand - destination.demand
                if gap <= threshold:
                    break
                # A move changes the gap by twice the share. If the gap would be as large the other way round, the
                # next round would move the sequence back.
                if abs(gap - 2 * sequence.share) < gap and sequence.share <= destination.free:
                    yield move(sequence, source, destination, reason)


def _emptied(source: LoadedEngine, engines: Sequence[LoadedEngine], reason: str) -> Iterator[Wanted]:
    able = [each for each in engines if each.fits(source)]
    for sequence in source.sequences:
        # A running sequence needs decoding; a waiting one waits again, at an engine of the same role, or of any.
        destination = least_loaded(able, "decode" if sequence.running else source.role) or least_loaded(able)
        if destination is not None:
            yield move(sequence, source, destination, reason)


Placed = tuple[SequenceView, LoadedEngine]


# ---- policies that make space: each plans all of its moves first, and proposes none if they do not reach its goal ----


def mitigate(engines: Sequence[LoadedEngine], ceiling: float, selection: Selection) -> Iterator[Wanted]:
    """Yield moves away from each engine above ``ceiling`` until it is below.

    Each sequence moves to the fullest engine that may serve in the same role and stays below ``ceiling``.
    """
    for source in engines:
        for sequence in selection.of(source.sequences, source.believed - ceiling):
            if not source.takes or source.believed <= ceiling:
                break
            destination = best_fit(_others(source, engines), sequence.share, ceiling)
            if destination is not None:
                yield move(sequence, source, destination, "binpack_mitigation")


def consolidate(engines: Sequence[LoadedEngine], ceiling: float) -> Iterator[Wanted]:
    """Yield moves that empty the least loaded engine with work, if other engines with work have space for all of it.

    Each sequence, the largest first, moves to the fullest engine that may serve in the same role and stays below
    ``ceiling``.
    """
    busy = [each for each in engines if each.takes and each.load is not None and each.believed > 0]
    for source in sorted(busy, key=lambda each: each.believed):
        # Only fuller ones: an emptier engine would be emptied in the next round, and the sequences moved twice.
        others = [each for each in _others(source, busy) if each.believed >= source.believed]
        largest_first = sorted(source.sequences, key=lambda each: -each.share)
        # The largest first, as in bin packing: small ones fit into what remains.
        placed = _place(largest_first, others, ceiling)
        if largest_first and len(placed) == len(largest_first):
            yield from _moved(placed, source, "binpack_consolidation")
            return


def defragment(engines: Sequence[LoadedEngine]) -> Iterator[Wanted]:
    """Yield moves that make space for a waiting request that fits on no engine, although the fleet has the space.

    The first request in an engine's queue moves to the fullest engine without a queue that has space for it. Without
    such an engine, the engine with the most space moves running sequences away, the shortest first, each to the fullest
    other engine that it fits into, until the space is enough; the next round then moves the request there. Until then
    the space is reserved: no space is made for a second request.
    """
    fitting_nowhere = list[tuple[SequenceView, list[LoadedEngine]]]()
    for source in engines:
        head = next(iter(source.queue), None)
        if head is None or not source.takes or source.load is None or head.share <= source.free:
            continue
        others = [each for each in _others(source, engines) if not each.waiting]
        destination = best_fit(others, head.share, FULL)
        if destination is not None:
            yield move(head, source, destination, "defragment")
        else:
            fitting_nowhere.append((head, [source, *others]))
    for head, engines_that_fit in fitting_nowhere:
        able = [each for each in engines_that_fit if each.load is not None]
        target = max(able, key=lambda each: each.free)
        needed, leaving = head.share - target.free, list[SequenceView]()
        for sequence in Selection("SR", "block_ratio", FULL).of(target.sequences):
            if needed <= 0:
                break
            leaving.append(sequence)
            needed -= sequence.share
        placed = _place(leaving, [each for each in able if each is not target], FULL)
        # A part of the moves would cost their pauses, and make no space for the request.
        if needed <= 0 and placed and len(placed) == len(leaving):
            yield from _moved(placed, target, "defragment")
            return


def _others(source: LoadedEngine, engines: Iterable[LoadedEngine]) -> list[LoadedEngine]:
    return [each for each in engines if each is not source and each.can(source.role) and each.fits(source)]


def _place(sequences: Iterable[SequenceView], engines: Sequence[LoadedEngine], ceiling: float) -> list[Placed]:
    """Return destinations for the sequences, up to the first that fits nowhere; loads are restored."""
    placed: list[Placed] = []
    for sequence in sequences:
        destination = best_fit(engines, sequence.share, ceiling)
        if destination is None:
            break
        # So that the next sequence is placed with this one already there.
        destination.arriving += sequence.share
        placed.append((sequence, destination))
    for sequence, destination in placed:
        destination.arriving -= sequence.share
    return placed


def _moved(placed: Iterable[Placed], source: LoadedEngine, reason: str) -> Iterator[Wanted]:
    for sequence, destination in placed:
        yield move(sequence, source, destination, reason)


def policies_of(settings: RescheduleSettings) -> tuple[Policy, ...]:
    """Return the policies in the settings, in order; raise :class:`~tercet.protocol.BadRequest` for an unknown one."""
    policies = list[Policy]()
    for name in settings.policies:
        if name in BUILT_IN:
            policies.append(BUILT_IN[name](settings))
            continue
        path, colon, function_name = name.rpartition(":")
        if not colon:
            known = ", ".join(BUILT_IN)
            raise BadRequest(f"{FIELD}: there is no policy {name!r}; choose one of {known}, or file.py:function", FIELD)
        function = getattr(load_module(user_file(path, FIELD, Path()), FIELD), function_name, None)
        if not callable(function):
            raise BadRequest(f"{FIELD}: {path} has no function {function_name}", FIELD)
        policies.append(cast("Policy", function))  # its results are checked when it is called
    return tuple(policies)


def _selection(settings: RescheduleSettings) -> Selection:
    return Selection(settings.order, settings.measure, settings.value)


def _balancing(settings: RescheduleSettings, role: Role, reason: str) -> Policy:
    return partial(balance, roles=(role,), threshold=settings.threshold, selection=_selection(settings), reason=reason)


BUILT_IN: Mapping[str, Callable[[RescheduleSettings], Policy]] = {
    "prefill_to_decode": lambda settings: prefill_to_decode,
    "decode_load": lambda settings: _balancing(settings, "decode", "decode_load"),
    "neutral_load": lambda settings: _balancing(settings, "both", "neutral_load"),
    "binpack_mitigation": lambda settings: partial(mitigate, ceiling=settings.ceiling, selection=_selection(settings)),
    "binpack_consolidation": lambda settings: partial(consolidate, ceiling=settings.ceiling),
    "defragment": lambda settings: defragment,
}


logger = logging.getLogger("tercet.router")
RETRY_DELAY_S = 2.0
"""Time in seconds after the start of a move in which its sequence is not moved again.

Engines' reports are older than the move, and a failed move would fail again.
"""


class CountedMove(msgspec.Struct, frozen=True):
    """A move as limits count it."""

    source: str
    destination: str
    tokens: int
    share: float = 0.0  # of the destination's KV cache, which the tokens take
    usage: float | None = None  # the used share of that cache; None if unknown


class Announcements(Protocol):
    """Shared record of moves in flight, so that limits apply across worker processes."""

    def announce(self, moves: Sequence[CountedMove]) -> None:
        """Publish the moves of this process, replacing its earlier ones."""
        ...

    def announced(self) -> Sequence[CountedMove]:
        """Return the moves of all other processes."""
        ...


class MovesUnderWay:
    """The moves of this process that are in flight.

    Limits apply to them together with those of the other processes in ``shared``, if that is not None.
    """

    def __init__(self, limits: MoveSettings, shared: Announcements | None = None) -> None:
        self._limits = limits
        self.shared = shared
        self._moves: dict[object, CountedMove] = {}

    def __len__(self) -> int:
        return len(self._moves)

    def everywhere(self) -> list[CountedMove]:
        return [*self._moves.values(), *(self.shared.announced() if self.shared is not None else ())]

    def refusal(self, proposed: CountedMove) -> str | None:
        """Return the reason why a move may not begin now; None if it may."""
        return self._refusal(proposed, self.everywhere())

    @contextmanager
    def counted(self, proposed: CountedMove) -> Generator[None]:
        """Count the move as in flight while entered. Raise :class:`~tercet.protocol.NoSpace` if a limit forbids it."""
        # A new object: two equal moves are two entries.
        key = object()
        try:
            # Announce first, then check the others: of two moves that exceed a limit together, at least one process
            # sees the other.
            self._moves[key] = proposed
            self._announce()
            others = self.everywhere()
            others.remove(proposed)
            refusal = self._refusal(proposed, others)
            if refusal is not None:
                raise NoSpace(f"destination: {refusal}", "destination")
            yield
        finally:
            del self._moves[key]
            self._announce()

    def _announce(self) -> None:
        if self.shared is not None:
            self.shared.announce(list(self._moves.values()))

    def _refusal(self, proposed: CountedMove, moves: Sequence[CountedMove]) -> str | None:
        limits = self._limits
        if proposed.usage is not None and proposed.usage >= limits.ceiling:
            return f"{proposed.destination} uses {proposed.usage:.0%} of its KV cache"
        of_one = limits.per_engine, limits.tokens_per_engine, limits.kv_usage_per_engine
        to = [each for each in moves if each.destination == proposed.destination]
        away = [each for each in moves if each.source == proposed.source]
        for where, group, (most, most_tokens, most_kv) in (
            (f"to {proposed.destination}", to, of_one),
            (f"away from {proposed.source}", away, of_one),
            ("already", moves, (limits.at_once, limits.tokens, limits.kv_usage)),
        ):
            if len(group) >= most:
                return f"{len(group)} sequences move {where}, and at most {most} may"
            if not group:  # a move that exceeds a limit alone may run alone, else it could never run
                continue
            tokens, share = sum(each.tokens for each in group), sum(each.share for each in group)
            if most_tokens is not None and tokens + proposed.tokens > most_tokens:
                return f"{tokens} tokens move {where}; with {proposed.tokens} more they exceed {most_tokens}"
            if most_kv is not None and share + proposed.share > most_kv:
                return (
                    f"{share:.1%} of a KV cache move {where}; with {proposed.share:.1%} more they exceed {most_kv:.1%}"
                )
        return None


class Rescheduling:
    """Decisions of the rounds, without I/O. Times are seconds of one monotonic clock."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self._policies = tuple(policies)
        self._not_before: dict[str, float] = {}
        self._failing: set[Policy] = set()

    def leaves_alone(self, seq_id: str) -> bool:
        return seq_id in self._not_before

    def begins(self, now: float) -> None:
        """Begin a round: sequences whose pause has ended may be moved again."""
        self._not_before = {seq_id: at for seq_id, at in self._not_before.items() if at > now}

    def wanted(self, engines: Sequence[LoadedEngine]) -> Iterator[Wanted]:
        """Yield the moves to make, each sequence at most once, and only between engines that may exchange KV.

        ``engines`` have only sequences that may be moved.
        """
        seen, by_name = set[str](), {engine.name: engine for engine in engines}
        for policy in self._policies:
            for wanted in self._proposals(policy, engines):
                source, destination = by_name.get(wanted.source), by_name.get(wanted.destination)
                unfit = source is not None and destination is not None and not source.fits(destination)
                # The policies are in the operator's order: the first that wants a sequence elsewhere gets it.
                if not unfit and wanted.seq_id not in seen:
                    seen.add(wanted.seq_id)
                    yield wanted

    def moved(self, seq_id: str, now: float) -> None:
        self._not_before[seq_id] = now + RETRY_DELAY_S

    def _proposals(self, policy: Policy, engines: Sequence[LoadedEngine]) -> Iterator[Wanted]:
        """Yield a policy's proposals; if a user's policy raises an error, its proposals end and the others continue."""
        try:
            for wanted in policy(engines):
                if not isinstance(wanted, Wanted):  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise TypeError(f"it proposes {wanted!r}; yield results of tercet.decisions.migration.move()")
                yield wanted
        except Exception:
            if policy not in self._failing:
                logger.exception("moves: a policy failed and is ignored in this round: %s", policy)
            # Logged once, until it works again: rounds come each second.
            self._failing.add(policy)
        else:
            self._failing.discard(policy)
