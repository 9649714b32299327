"""Limits on moves in flight: policies propose moves, limits allow or refuse them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec

from tercet.protocol import NoSpace
from tercet.settings import MoveSettings


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
