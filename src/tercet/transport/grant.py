"""A grant: the blocks that a peer may write under one lease, and the tokens whose KV they get."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tercet.protocol import BadRequest
from tercet.protocol.content import TOKEN_BYTES
from tercet.transport.backends.reading import NOWHERE
from tercet.transport.block_sizes import first_token


class Grant(msgspec.Struct, frozen=True):
    """Permission for a peer to write certain blocks under ``lease``.

    ``blocks`` has the blocks of each group of layers: in one group, block i, at slot i, holds the tokens from ``begin +
    i * block_size`` on. ``begin`` is a multiple of ``block_size``, and the slots reach to ``end``. A group has
    :data:`NOWHERE` for a slot at which its layers do not look back: no KV is written or required there. ``tokens`` are
    the first ``end`` tokens of the lease's sequence, in the form of :func:`~tercet.protocol.packed`, and ``salt`` is
    their cache salt.
    """

    lease: str
    blocks: Sequence[Sequence[int]]
    begin: int
    end: int
    block_size: int
    tokens: bytes
    salt: str | None

    def require_whole(self, groups: int) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` unless tokens, and blocks of ``groups`` groups, reach ``end``."""
        needed = -(-(self.end - self.begin) // self.block_size)
        if {len(blocks) for blocks in self.blocks} != {needed} or self.begin % self.block_size:
            counts = ", ".join(str(len(blocks)) for blocks in self.blocks)
            raise BadRequest(f"blocks: {counts} do not hold [{self.begin}, {self.end})", "blocks")
        if len(self.blocks) != groups:
            raise BadRequest(f"blocks: has {len(self.blocks)} groups, but this rank has {groups} groups", "blocks")
        if len(self.tokens) != self.end * TOKEN_BYTES:
            raise BadRequest(
                f"tokens: has {len(self.tokens)} bytes; {self.end} tokens need {self.end * TOKEN_BYTES}", "tokens"
            )

    def continues(self, old: Grant) -> bool:
        """True if this is ``old`` with more tokens of the same sequence, and more blocks after its blocks.

        A block of ``old`` may be closed here (:data:`NOWHERE`): superseded state blocks are not needed any more.
        """
        return (
            (self.begin, self.block_size, self.salt or None) == (old.begin, old.block_size, old.salt or None)
            and all(_continue(new, had) for new, had in zip(self.blocks, old.blocks, strict=True))
            and self.tokens.startswith(old.tokens)
        )

    def num_slots(self, unit: int) -> int:
        """Return the number of a sender's slots that the blocks touch; a slot has ``unit`` tokens, 0: as the blocks."""
        unit = unit or self.block_size
        end = self.begin + len(self.blocks[0]) * self.block_size
        return -(-(end - first_token(self.begin, unit)) // unit)


def _continue(new: Sequence[int], had: Sequence[int]) -> bool:
    return len(new) >= len(had) and all(one in (other, NOWHERE) for one, other in zip(new, had, strict=False))
