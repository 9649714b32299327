"""Keeps what a fleet knows of one engine's cache in step with the engine's KV events. Decides without I/O.

The messages are vLLM's as they are on the wire (``vllm/distributed/kv_events.py``), as far as prefix indexes need them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, cast

import msgspec

from tercet.fleet.knowledge import FleetKnowledge
from tercet.protocol.block_hashes import extra_of

BlockName = int | bytes
WINDOWED = "sliding_window"
DIGEST = re.compile(r"[0-9a-f]{64}")


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Consecutive blocks of ``block_size`` tokens each are in the cache now.

    ``extra_keys`` has, for each block, what beside its tokens names it: the cache salt (first block only), an adapter,
    pictures. ``group_idx`` numbers the groups of layers of models that have several, ``kv_cache_spec_kind`` is
    their kind. ``ownership`` names a lower tier.
    """

    block_hashes: list[BlockName]
    parent_block_hash: BlockName | None
    token_ids: list[int]
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
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


class KVInbox:
    """Applies each numbered batch once and in order.

    vLLM numbers batches from 0 at each start of an engine, publishes without waiting for anybody, and repeats the last
    ones when asked. ``name`` is the engine's in the fleet. ``expected`` is the number of the batch that is due, where a
    replay must begin.
    """

    def __init__(self, name: str, knowledge: FleetKnowledge) -> None:
        self._name = name
        self._knowledge = knowledge
        self.expected = 0
        self._last_live = -1
        self._block_size: int | None = None
        self._group, self._looks_back = 0, False

    def reset(self) -> None:
        """The engine was started anew: nothing that was known of its cache holds."""
        self._knowledge.cleared(self._name)
        self.expected, self._last_live, self._block_size = 0, -1, None
        self._group, self._looks_back = 0, False

    def take(self, number: int, payload: bytes) -> bool:
        """A batch as it was published; whether batches before it are missing, so that a replay is needed.

        Raises one of ``UNREADABLE`` for what is no batch, ``ValueError`` for what no engine says.
        """
        batch = decode_batch(payload)
        if number <= self._last_live:
            self.reset()  # a publisher's numbers only grow, so this is another one
        self._last_live = number
        if number > self.expected:
            return True
        self._apply(number, batch)
        return False

    def take_replayed(self, number: int, payload: bytes) -> None:
        """A batch as it was repeated, or one that had to wait for those before it.

        If even the replay lacks batches, blocks may have been dropped unheard: then nothing of before is believed.
        """
        batch = decode_batch(payload)
        if number > self.expected:
            self._knowledge.cleared(self._name)
            self.expected = number
        self._apply(number, batch)

    def _apply(self, number: int, batch: EventBatch) -> None:
        if number != self.expected:
            return  # it was applied already
        self.expected += 1
        self._choose_group(batch)
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                if event.group_idx in (None, self._group) and event.ownership is None:
                    self._knowledge.unstore(self._name, event.block_hashes)
            else:
                self._knowledge.cleared(self._name)

    def _choose_group(self, batch: EventBatch) -> None:
        """Follow layers that look back at all tokens, if there are any: others drop what has left their window.

        Those of a step are told of together, so nothing has been missed when the first of them are.
        """
        for event in batch.events:
            kind = event.kv_cache_spec_kind if isinstance(event, BlockStored) else None
            if isinstance(event, BlockStored) and kind not in (None, WINDOWED) and not self._looks_back:
                self._group, self._looks_back = event.group_idx or 0, True

    def _store(self, event: BlockStored) -> None:
        if event.group_idx not in (None, self._group) or event.ownership is not None:
            return
        keys = [_beside_adapter(block or (), event.lora_name) for block in event.extra_keys or ()]
        extras, salt = None, None
        if any(keys):
            extras, keys = _features_of(keys)
        if any(keys):
            # Only a salt is a single word in a chain's first block; other keys are no prompt's that is named here.
            first = keys[0]
            if event.parent_block_hash is not None or any(keys[1:]) or len(first) != 1 or not isinstance(first[0], str):
                return
            salt = first[0]
        if self._block_size not in (None, event.block_size):
            raise ValueError(f"block_size {event.block_size} after {self._block_size}: an engine has one")
        self._block_size = event.block_size
        self._knowledge.store(
            self._name, event.block_size, event.block_hashes, event.parent_block_hash, event.token_ids, salt,
            event.lora_name, extras,
        )  # fmt: skip


def _features_of(keys: Sequence[Sequence[Any]]) -> tuple[dict[int, tuple[int, ...]], list[list[Any]]]:
    """What images and the like are in which block, by vLLM's pairs of name and place; and the other keys.

    What we name is a digest. A picture that came by the engine's own API has a name of vLLM's, which no prompt of ours
    has.
    """
    extras, others = dict[int, tuple[int, ...]](), list[list[Any]]()
    for block, of_block in enumerate(keys):
        pairs = [key for key in of_block if _is_feature(key)]
        if pairs:
            extras[block] = tuple(number for digest, offset in pairs for number in extra_of(digest, offset))
        others.append([key for key in of_block if not _is_feature(key)])
    return extras, others


def _is_feature(key: Any) -> bool:
    if not isinstance(key, list):
        return False
    pair = cast(list[object], key)
    if len(pair) != 2 or not isinstance(pair[1], int):
        return False
    return isinstance(pair[0], str) and DIGEST.fullmatch(pair[0]) is not None


def _beside_adapter(keys: Sequence[Any], adapter: str | None) -> Sequence[Any]:
    """A block's keys without its adapter's name, which comes first in each block."""
    return keys[1:] if adapter is not None and keys and keys[0] == adapter else keys
