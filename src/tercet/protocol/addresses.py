"""Between which engines KV may move: the address and layout of a reservation, and the revision of an engine. Pure."""

from __future__ import annotations

import hashlib
import hmac
import re
from functools import lru_cache
from typing import Annotated, Literal

import msgspec

from tercet.protocol.access import secrets_of
from tercet.protocol.errors import BadRequest, LayoutMismatch, Unauthorized

Positive = Annotated[int, msgspec.Meta(ge=1, lt=2**48)]


class CacheGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A group of layers that share block tables: the number of layers, and vLLM's name for their ``kind``.

    An example of a kind is ``sliding_window``. ``window`` is the number of tokens at which these layers look back, the
    current one included, or the size in tokens of the chunk that they look at; 0 means all tokens.
    """

    kind: str
    num_layers: Positive
    window: Annotated[int, msgspec.Meta(ge=0, lt=2**48)] = 0


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything that two engines must agree on before one can use the KV of the other.

    ``block_size`` is in tokens. ``block_bytes`` is the size of one block of one layer on one rank. ``packing`` names
    how keys and values are arranged inside a block; CPU kernels pack them for their instruction set.
    ``splits_by_head``: a block holds its rank's KV heads one after the other, so that blocks of ranks with different
    heads can be cut and joined. ``splits_by_token``: the transport knows how tokens lie in a block, so that blocks of
    another size can be put together. ``groups``: the kinds of layers, given if some of them do not look back at all
    tokens. ``stages``: for each pipeline stage, how many planes of each group of layers it holds (a plane is the KV of
    a layer, or half of it where keys and values are apart); empty if one stage holds all. ``plane_order`` identifies
    the layers in the order of their planes. Ranks are numbered through the tensor-parallel ranks of the first stage,
    then those of the next stage. ``drafter`` identifies the speculative decoding model that has its own KV; its layers
    are counted with the model's. It is empty without such a drafter.
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
        """Number of workers that each hold a part of every sequence's KV."""
        return self.tp_size * (len(self.stages) or 1)

    @property
    def heads_per_rank(self) -> int:
        """Number of KV heads on each rank. With more ranks than heads, several ranks hold the same head."""
        return max(1, self.num_kv_heads // self.tp_size)

    @property
    def exchange_key(self) -> str:
        """Key that is equal for all ranks and engines that can exchange KV."""
        head_bytes = self.block_bytes // self.heads_per_rank
        size = ("any", head_bytes // self.block_size) if self.splits_by_token else (self.block_size, head_bytes)
        model = f"{self.model}+{self.drafter}" if self.drafter else self.model
        same = (model, self.dtype, self.num_layers, self.num_kv_heads, self.head_size, self.packing)
        groups = [f"{group.kind}x{group.num_layers}w{group.window}" for group in self.groups]
        return "/".join(map(str, (*same, *size, *groups)))

    def require_mappable(self, other: KVLayout, whose: str) -> None:
        """Raise :class:`LayoutMismatch`, which names the differences, unless KV of this layout can go to ``other``."""
        # What may differ: blocks of ranks with other heads, of another size, or of other stages are cut and joined on
        # the way.
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
        # Only if nothing else differs: these would follow from the differences that were named.
        if self.tp_size != other.tp_size and not differences:
            differences: list[str] = []
            degrees = f"tp_size is {self.tp_size} here and {other.tp_size} on {whose}"
            if not (self.splits_by_head and other.splits_by_head):
                differences.append(f"{degrees}, and blocks of packing {self.packing!r} cannot be cut between heads")
            if max(self.tp_size, other.tp_size) % min(self.tp_size, other.tp_size):
                differences.append(f"{degrees}, and neither divides the other")
        if self.exchange_key != other.exchange_key and not differences:
            differences = [f"the bytes of a token's head differ: {self._sizes()} here, {other._sizes()} on {whose}"]
        if differences:
            raise LayoutMismatch("the engines cannot exchange KV: " + "; ".join(differences), "kv_addr_info")

    def _planes(self, other: KVLayout) -> list[int]:
        """Return the number of planes of each group, over all stages.

        An engine with one stage has the counts of ``other``.
        """
        return [sum(counts) for counts in zip(*(self.stages or other.stages), strict=True)]

    def _sizes(self) -> str:
        return f"block_bytes {self.block_bytes} with block_size {self.block_size} and tp_size {self.tp_size}"


class RankRegion(msgspec.Struct, frozen=True, omit_defaults=True):
    """The memory of one rank's KV: its number of planes, by group of layers, and the order of a block's items.

    The order is the outermost dimension (``HN``: heads, ``NH``: tokens), heads, tokens, and bytes of an item; None if
    blocks are exchanged as they are.
    """

    planes: tuple[Positive, ...]
    order: tuple[Literal["HN", "NH"], int, int, int] | None = None


class RankAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One receiving rank (one tensor-parallel worker), with the addresses on which its transport listens."""

    rank: int
    addresses: tuple[str, ...]


class KVAddrInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A reservation as its sender sees it: the lease to write under, its token range, and the addresses to connect to.

    ``[begin, end)`` are the token positions whose KV the receiver lacks; ``begin`` is a multiple of the block size and
    equals the matched length that ``prep_recv`` returned. ``group_begins`` has, for each group of layers of the layout,
    the first token whose KV is needed: tokens at which its layers do not look back are not sent. ``transport`` names
    the wire protocol. If the fleet has a secret, ``proof`` shows that an engine of the fleet issued this address.
    ``adapter`` is the digest of the LoRA adapter for which the receiver needs the KV; empty for the base model.
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

    def require_covers(self, begin: int, end: int) -> None:
        """Raise :class:`~tercet.protocol.errors.BadRequest` unless the reservation has the tokens ``[begin, end)``."""
        if begin < self.begin:
            raise BadRequest(f"begin: {begin} is before {self.begin}, where the reservation starts", "begin")
        if end > self.end:
            raise BadRequest(f"end: {end} is past {self.end}, where the reservation ends", "end")

    def proved(self, secret: str) -> KVAddrInfo:
        """Return a copy with a proof of ``secret``, or the address unchanged if ``secret`` is empty."""
        known = secrets_of(secret)
        return msgspec.structs.replace(self, proof=self._proof(known[0])) if known else self

    def require_proof(self, secret: str) -> None:
        """Raise :class:`~tercet.protocol.errors.Unauthorized` unless the issuer of this address knows the ``secret``.

        Nothing is checked if ``secret`` is empty.
        """
        fits = [hmac.compare_digest(self.proof.encode(), self._proof(each).encode()) for each in secrets_of(secret)]
        if fits and not any(fits):
            raise Unauthorized(
                f"kv_addr_info: the proof of {self.engine} was not made with this engine's secret; "
                "give all engines of the fleet the same TERCET_SECRET",
                "kv_addr_info",
            )

    def _proof(self, secret: str) -> str:
        # Deterministic: both ends must sign the same bytes.
        said = msgspec.json.encode(msgspec.structs.replace(self, proof=""), order="deterministic")
        return hmac.new(secret.encode(), b"tercet kv_addr_info " + said, hashlib.sha256).hexdigest()


class Reservation(msgspec.Struct, frozen=True):
    """Result of ``prep_recv``: the address to send KV to, and the number of tokens that the receiver has already.

    ``tier_len`` counts also those that other KV connectors of the receiver have; 0 if they have none after the former.

    0              matched_len                end            num_tokens
    | in its cache | reserved under the lease | not reserved |
    """

    kv_addr_info: KVAddrInfo
    matched_len: int
    tier_len: int = 0

    @property
    def lease(self) -> str:
        return self.kv_addr_info.lease

    @property
    def end(self) -> int:
        return self.kv_addr_info.end

    @property
    def missing(self) -> int:
        """Tokens that are not in the receiver's prefix cache yet."""
        return self.end - self.matched_len

    @property
    def to_send(self) -> int:
        """Tokens that the receiver has neither in its prefix cache nor in a tier from which it loads them itself."""
        return self.end - max(self.matched_len, self.tier_len)


class TextFingerprint(msgspec.Struct, frozen=True):
    """Digests of a model's ``tokenizer``, including its vocabulary, and of its ``chat_template``; empty if unknown."""

    tokenizer: str = ""
    chat_template: str = ""


class Revision(msgspec.Struct, frozen=True):
    """Versions of Tercet and vLLM, the digest of a model's config and weights, its text, and the layout of its KV.

    Engines of one fleet may differ in it while they are replaced one by one. An empty field, or None, is not reported.
    """

    tercet: str = ""
    vllm: str = ""
    weights: str = ""
    text: TextFingerprint = TextFingerprint()
    layout: KVLayout | None = None


UNKNOWN_REVISION = Revision()


@lru_cache(maxsize=4096)
def kv_obstacle(sender: Revision, receiver: Revision) -> str:
    """Return the reason why KV of ``sender`` must not go to ``receiver``; empty if it may.

    Minor versions of Tercet may change its transport, and those of vLLM the bytes in a block, which a layout cannot
    show. A chat template does not matter: the same token ids have the same KV.
    """
    compared = (
        ("versions of Tercet", minor_version(sender.tercet), minor_version(receiver.tercet)),
        ("versions of vLLM", minor_version(sender.vllm), minor_version(receiver.vllm)),
        ("weights", sender.weights, receiver.weights),
    )
    for what, theirs, ours in compared:
        if theirs != ours:
            return f"their {what} differ: {theirs or 'not reported'} and {ours or 'not reported'}"
    theirs, ours = sender.text.tokenizer, receiver.text.tokenizer
    if theirs and ours and theirs != ours:
        return f"their tokenizers differ: {theirs} and {ours}"
    if sender.layout is not None and receiver.layout is not None:
        try:
            sender.layout.require_mappable(receiver.layout, "the receiver")
        except LayoutMismatch as error:
            return error.message
    return ""


def may_exchange_kv(one: Revision, other: Revision) -> bool:
    """Return True if two engines may work on one sequence: KV may go from each to the other."""
    return one is other or (not kv_obstacle(one, other) and not kv_obstacle(other, one))


def minor_version(version: str) -> str:
    """Return the major and minor version, or the first word of another version, such as a simulated engine's."""
    found = re.match(r"[0-9]+\.[0-9]+|\S+", version)
    return found[0] if found else ""
