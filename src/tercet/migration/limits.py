"""How many moves may be under way: policies propose, limits dispose."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tercet.settings import MoveSettings


@dataclass(frozen=True)
class Proposal:
    """A sequence of ``tokens`` tokens is to be moved; ``usage`` is the destination's KV usage, if that is known."""

    source: str
    destination: str
    tokens: int
    usage: float | None = None


class MovesUnderWay:
    """The moves of this process that are under way."""

    def __init__(self, limits: MoveSettings) -> None:
        self._limits = limits
        self._moves: dict[object, Proposal] = {}

    def __len__(self) -> int:
        return len(self._moves)

    def __iter__(self) -> Iterator[Proposal]:
        return iter(tuple(self._moves.values()))

    def refusal(self, proposal: Proposal) -> str | None:
        """Why a move may not begin now; None if it may."""
        limits, moves = self._limits, list(self._moves.values())
        if proposal.usage is not None and proposal.usage >= limits.kv_usage:
            return f"{proposal.destination} uses {proposal.usage:.0%} of its KV cache"
        groups = (
            (f"to {proposal.destination}", [move for move in moves if move.destination == proposal.destination]),
            (f"away from {proposal.source}", [move for move in moves if move.source == proposal.source]),
        )
        for where, group in groups:
            reached = _reached(where, group, proposal.tokens, limits.per_engine, limits.tokens_per_engine)
            if reached:
                return reached
        return _reached("in this process", moves, proposal.tokens, limits.at_once, limits.tokens)

    @contextmanager
    def counted(self, proposal: Proposal) -> Generator[None]:
        """While entered, it is one of them."""
        key = object()
        self._moves[key] = proposal
        try:
            yield
        finally:
            del self._moves[key]


def _reached(where: str, moves: list[Proposal], tokens: int, most: int, most_tokens: int | None) -> str | None:
    """Which limit one more move of so many tokens would exceed beside ``moves``; None if none."""
    if len(moves) >= most:
        return f"{len(moves)} sequences move {where}, and at most {most} may"
    under_way = sum(move.tokens for move in moves)
    # A sequence with more tokens than the limit may move alone: else it never could.
    if most_tokens is not None and moves and under_way + tokens > most_tokens:
        return f"{under_way} tokens move {where}; with {tokens} more they exceed {most_tokens}"
    return None
