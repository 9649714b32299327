"""Which proposed moves are made: once per sequence and not too often, and within the limits on moves in flight."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec

from tercet.decisions.migration.policies import LoadedEngine, Policy, Wanted
from tercet.protocol import NoSpace
from tercet.settings import MoveSettings

logger = logging.getLogger("tercet.router")
RETRY_DELAY_S = 2.0
"""Time in seconds after the start of a move in which its sequence is not moved again.

Engines' reports are older than the move, and a failed move would fail again.
"""


class CountedMove(msgspec.Struct, frozen=True):
    """A move as limits count it: its ``tokens``, and the ``share`` of the destination's KV cache that they take.

    ``usage`` is the used share of that cache, None if unknown.
    """

    source: str
    destination: str
    tokens: int
    share: float = 0.0
    usage: float | None = None


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
        """Return the moves in flight, in this process and in the others."""
        return [*self._moves.values(), *(self.shared.announced() if self.shared is not None else ())]

    def refusal(self, proposed: CountedMove) -> str | None:
        """Return the reason why a move may not begin now; None if it may."""
        return self._refusal(proposed, self.everywhere())

    @contextmanager
    def counted(self, proposed: CountedMove) -> Generator[None]:
        """Count the move as in flight while entered. Raise :class:`~tercet.protocol.NoSpace` if a limit forbids it."""
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
        groups = (
            (
                f"to {proposed.destination}",
                [each for each in moves if each.destination == proposed.destination],
                of_one,
            ),
            (f"away from {proposed.source}", [each for each in moves if each.source == proposed.source], of_one),
            ("already", moves, (limits.at_once, limits.tokens, limits.kv_usage)),
        )
        reached = (_reached(where, group, proposed, *most) for where, group, most in groups)
        return next((found for found in reached if found is not None), None)


def _reached(
    where: str,
    moves: Sequence[CountedMove],
    proposed: CountedMove,
    most: int,
    most_tokens: int | None,
    most_kv: float | None,
) -> str | None:
    """Return the limit that one more move would exceed, in addition to ``moves``; None if the move is allowed."""
    if len(moves) >= most:
        return f"{len(moves)} sequences move {where}, and at most {most} may"
    if not moves:  # a move that exceeds a limit alone may run alone, else it could never run
        return None
    tokens, share = sum(move.tokens for move in moves), sum(move.share for move in moves)
    if most_tokens is not None and tokens + proposed.tokens > most_tokens:
        return f"{tokens} tokens move {where}; with {proposed.tokens} more they exceed {most_tokens}"
    if most_kv is not None and share + proposed.share > most_kv:
        return f"{share:.1%} of a KV cache move {where}; with {proposed.share:.1%} more they exceed {most_kv:.1%}"
    return None


class Rescheduling:
    """Decisions of the rounds, without I/O. Times are seconds of one monotonic clock."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self._policies = tuple(policies)
        self._not_before: dict[str, float] = {}
        self._failing: set[Policy] = set()

    def leaves_alone(self, seq_id: str) -> bool:
        """Return True if a move of the sequence began recently."""
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
                if not unfit and wanted.seq_id not in seen:
                    seen.add(wanted.seq_id)
                    yield wanted

    def moved(self, seq_id: str, now: float) -> None:
        """Record that a move of the sequence has begun."""
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
            self._failing.add(policy)
        else:
            self._failing.discard(policy)
