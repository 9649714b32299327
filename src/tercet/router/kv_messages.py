"""vLLM's KV events as they are on the wire (``vllm/distributed/kv_events.py``), as far as prefix indexes need them."""

from __future__ import annotations

from typing import Any

import msgspec

BlockName = int | bytes


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Consecutive blocks of ``block_size`` tokens each are in the cache now.

    ``extra_keys`` has, for each block, what beside its tokens names it: the cache salt (first block only), an adapter,
    pictures. ``group_idx`` numbers the kinds of layers of models that have several, ``ownership`` names a lower tier.
    """

    block_hashes: list[BlockName]
    parent_block_hash: BlockName | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    ownership: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """Blocks are in the cache no more."""

    block_hashes: list[BlockName]
    group_idx: int | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The cache is empty."""


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The events of one engine step; ``ts`` is the engine's time."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


decode_batch = msgspec.msgpack.Decoder(EventBatch).decode
