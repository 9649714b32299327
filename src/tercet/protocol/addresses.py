"""Where the KV of a reservation is to be sent, and what it must look like."""

from __future__ import annotations

import msgspec

from tercet.protocol.errors import LayoutMismatch


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that two engines must agree on before KV of one has meaning in the other.

    ``block_size`` is in tokens. ``block_bytes`` is the size of one block of one layer on one rank. ``packing`` names
    how keys and values are arranged inside a block; CPU kernels pack them for their instruction set.
    """

    model: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int
    block_bytes: int
    tp_size: int
    packing: str

    def require_same(self, other: KVLayout, whose: str) -> None:
        """Raise :class:`LayoutMismatch` naming every field in which ``other`` differs."""
        differences = [
            f"{name} is {getattr(self, name)!r} here and {getattr(other, name)!r} on {whose}"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]
        if differences:
            raise LayoutMismatch("the engines cannot exchange KV: " + "; ".join(differences), "kv_addr_info")


class RankAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One receiving rank (one tensor-parallel worker) and the addresses that its transport listens on."""

    rank: int
    addresses: tuple[str, ...]


class KVAddrInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reservation, as its sender sees it: the lease to write under, the range it covers, and where to connect.

    ``[begin, end)`` are the token positions that have no KV on the receiver yet; ``begin`` is a multiple of the
    block size and equals the matched length that ``prep_recv`` returned. ``transport`` names the wire protocol.
    """

    lease: str
    engine: str
    begin: int
    end: int
    transport: str
    ranks: tuple[RankAddress, ...]
    layout: KVLayout
