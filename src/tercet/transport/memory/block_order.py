"""Order of a block's items: attention backends differ only in the order of heads and tokens.

An item is the data of one token and one head: keys and values together, or the single latent of MLA, or fp8 numbers
with their scales. Its bytes are not changed. Two engines whose blocks have the same items in another order can exchange
them; all other differences are refused, with an error that names them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tercet.protocol import TransferFailed

Order = Literal["HN", "NH"]


class BlockOrder(msgspec.Struct, frozen=True, array_like=True):
    """Order of a block of ``heads`` times ``tokens`` items.

    ``order`` names the outermost dimension first: heads (``HN``) or tokens (``NH``).
    """

    order: Order
    heads: int
    tokens: int
    item_bytes: int

    @property
    def block_bytes(self) -> int:
        """Size of all items in bytes."""
        return self.heads * self.tokens * self.item_bytes

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of outer and of inner items."""
        return (self.heads, self.tokens) if self.order == "HN" else (self.tokens, self.heads)


def rearranged(theirs: BlockOrder | None, ours: BlockOrder | None) -> BlockOrder | None:
    """Return the sender's order if a block's items must be reordered; None if the bytes can stay as they are.

    Raises :class:`~tercet.protocol.TransferFailed`, with the difference, for blocks that have other items.
    """
    if theirs is None and ours is None:
        return None
    if theirs is None or ours is None:
        raise TransferFailed(f"blocks: one side has {theirs or ours}, but the other side does not describe its blocks")
    for name in ("heads", "tokens", "item_bytes"):
        if getattr(theirs, name) != getattr(ours, name):
            raise TransferFailed(f"blocks: {name} is {getattr(theirs, name)} there and {getattr(ours, name)} here")
    one_order = theirs.order == ours.order or 1 in ours.sizes
    return None if one_order else theirs
