"""What siblings keep outside of the device, as their KV events say it: an answer without asking them for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

MOST_BLOCKS = 1 << 18
"""Blocks that are remembered, the latest ones; one that is forgotten costs a send."""


class TierBlocks:
    """The blocks that siblings have stored and not removed, by hash, with the media that have each.

    A look-up in the siblings would create state there for a request that never comes. Without KV events, or with a
    sibling that publishes none, nothing is known here.
    """

    def __init__(self) -> None:
        self._media: dict[Any, set[str | None]] = {}

    def note(self, events: Iterable[KVCacheEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                for block in event.block_hashes:
                    media = self._media.pop(block, set())
                    self._media[block] = media | {event.medium}
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    left = self._media.get(block, set()) - {event.medium}
                    if left:
                        self._media[block] = left
                    else:
                        self._media.pop(block, None)
            elif isinstance(event, AllBlocksCleared):
                self._media.clear()
        while len(self._media) > MOST_BLOCKS:
            del self._media[next(iter(self._media))]

    def prefix(self, hashes: Sequence[BlockHash], first: int) -> int:
        """Return the number of blocks of a prompt that are here if its ``first`` ones are cached on the device."""
        until = first
        while until < len(hashes) and maybe_convert_block_hash(hashes[until]) in self._media:
            until += 1
        return until
