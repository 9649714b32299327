"""Where the KV of a reservation is to be sent, and what it must look like."""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated

import msgspec

from tercet.protocol.call_proofs import secrets_of
from tercet.protocol.errors import LayoutMismatch, Unauthorized

Positive = Annotated[int, msgspec.Meta(ge=1, lt=2**48)]


class CacheGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Layers that share block tables: how many, and of which ``kind``, in vLLM's words (``sliding_window``).

    With a ``window``, they look back at so many tokens, the token itself included, or at those of its chunk of so many;
    0 is all of them.
    """

    kind: str
    num_layers: Positive
    window: Annotated[int, msgspec.Meta(ge=0, lt=2**48)] = 0


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything that two engines must agree on before KV of one has meaning in the other.

    ``block_size`` is in tokens. ``block_bytes`` is the size of one block of one layer on one rank. ``packing`` names
    how keys and values are arranged inside a block; CPU kernels pack them for their instruction set.
    ``splits_by_head``: a block holds its rank's KV heads one after the other, so that blocks of ranks with different
    heads can be cut and joined. ``splits_by_token``: the transport knows how tokens lie in a block, so that blocks of
    another size can be put together. ``groups``: the kinds of layers, where not all of them look back at all tokens.
    ``stages``: for each pipeline stage, how many planes of each group of layers it holds (a plane is the KV of a layer,
    or half of it where keys and values are apart); empty if one stage holds all. ``plane_order`` stands for the layers
    in the order of their planes. Ranks count through the first stage's tensor-parallel ones, then the next one's.
    ``drafter`` stands for what guesses tokens ahead with KV of its own (speculative decoding), whose layers are counted
    with the model's; empty if nothing does.
    """

    model: str
    dtype: str
    num_layers: Positive
    num_kv_heads: Positive
    head_size: Positive
    block_size: Positive
    block_bytes: Positive
    tp_size: Positive
    packing: str
    splits_by_head: bool = False
    splits_by_token: bool = False
    groups: tuple[CacheGroup, ...] = ()
    stages: tuple[tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**32)], ...], ...] = ()
    plane_order: str = ""
    drafter: str = ""

    @property
    def num_ranks(self) -> int:
        """How many workers hold a part of each sequence's KV."""
        return self.tp_size * (len(self.stages) or 1)

    @property
    def heads_per_rank(self) -> int:
        """KV heads on each rank; with more ranks than heads, several ranks hold the same one."""
        return max(1, self.num_kv_heads // self.tp_size)

    @property
    def exchange_key(self) -> str:
        """Equal for all ranks, and all engines, whose KV can be exchanged."""
        head_bytes = self.block_bytes // self.heads_per_rank
        size = ("any", head_bytes // self.block_size) if self.splits_by_token else (self.block_size, head_bytes)
        model = f"{self.model}+{self.drafter}" if self.drafter else self.model
        same = (model, self.dtype, self.num_layers, self.num_kv_heads, self.head_size, self.packing)
        groups = [f"{group.kind}x{group.num_layers}w{group.window}" for group in self.groups]
        return "/".join(map(str, (*same, *size, *groups)))

    def require_mappable(self, other: KVLayout, whose: str) -> None:
        """Raise :class:`LayoutMismatch`, naming what is in the way, unless KV can go from here to ``other``.

        Engines may differ in how layers are split over pipeline stages, in their tensor-parallel degree if blocks can
        be cut between heads and one degree divides the other, and in their block size if blocks can be cut between
        tokens.
        """
        free = {"tp_size", "block_bytes", "splits_by_head"} if self.tp_size != other.tp_size else set[str]()
        if self.splits_by_token and other.splits_by_token:
            free |= {"block_size", "block_bytes"}
        if self._planes(other) == other._planes(self):
            free |= {"stages"}
        differences = [
            f"{name} is {getattr(self, name)!r} here and {getattr(other, name)!r} on {whose}"
            for name in self.__struct_fields__
            if name not in free and getattr(self, name) != getattr(other, name)
        ]
        if self.tp_size != other.tp_size and not differences:
            differences = self._obstacles_to_other_ranks(other, whose)
        if self.exchange_key != other.exchange_key and not differences:
            differences = [f"a token's head takes other bytes: {self._sizes()} here, {other._sizes()} on {whose}"]
        if differences:
            raise LayoutMismatch("the engines cannot exchange KV: " + "; ".join(differences), "kv_addr_info")

    def _planes(self, other: KVLayout) -> list[int]:
        """How many planes of each group all stages hold together; one stage holds what the other engine's do."""
        return [sum(counts) for counts in zip(*(self.stages or other.stages), strict=True)]

    def _sizes(self) -> str:
        return f"block_bytes {self.block_bytes} with block_size {self.block_size} and tp_size {self.tp_size}"

    def _obstacles_to_other_ranks(self, other: KVLayout, whose: str) -> list[str]:
        found: list[str] = []
        degrees = f"tp_size is {self.tp_size} here and {other.tp_size} on {whose}"
        if not (self.splits_by_head and other.splits_by_head):
            found.append(f"{degrees}, and blocks of packing {self.packing!r} cannot be cut between heads")
        if max(self.tp_size, other.tp_size) % min(self.tp_size, other.tp_size):
            found.append(f"{degrees}, and neither divides the other")
        return found


class RankAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One receiving rank (one tensor-parallel worker) and the addresses that its transport listens on."""

    rank: int
    addresses: tuple[str, ...]


class KVAddrInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A reservation, as its sender sees it: the lease to write under, the range it covers, and where to connect.

    ``[begin, end)`` are the token positions that have no KV on the receiver yet; ``begin`` is a multiple of the
    block size and equals the matched length that ``prep_recv`` returned. ``group_begins`` has for each of the layout's
    groups of layers from which token on KV is wanted: what its layers do not look back at is not sent. ``transport``
    names the wire protocol.
    ``proof`` shows that an engine of the fleet has given it out, where the fleet has a secret. ``adapter`` is
    the digest of the receiver's LoRA adapter that the KV is wanted for; empty for the base model.
    """

    lease: str
    engine: str
    begin: int
    end: int
    transport: str
    ranks: tuple[RankAddress, ...]
    layout: KVLayout
    proof: str = ""
    group_begins: tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**48)], ...] = ()
    adapter: str = ""

    def proved(self, secret: str) -> KVAddrInfo:
        """This one with its proof; as it is without a secret."""
        known = secrets_of(secret)
        return msgspec.structs.replace(self, proof=self._proof(known[0])) if known else self

    def require_proof(self, secret: str) -> None:
        """Raise :class:`~tercet.protocol.errors.Unauthorized` unless whoever gave it out knows the ``secret``.

        Without one it is believed as it is.
        """
        fits = [hmac.compare_digest(self.proof.encode(), self._proof(each).encode()) for each in secrets_of(secret)]
        if fits and not any(fits):
            raise Unauthorized(
                f"kv_addr_info: no engine that knows this engine's secret has said this ({self.engine} ought to); "
                "give all engines of the fleet the same TERCET_SECRET",
                "kv_addr_info",
            )

    def _proof(self, secret: str) -> str:
        said = msgspec.json.encode(msgspec.structs.replace(self, proof=""), order="deterministic")
        return hmac.new(secret.encode(), b"tercet kv_addr_info " + said, hashlib.sha256).hexdigest()
