"""A model's KV cache groups: layers that share block tables, as vLLM sorts them, and which of them Tercet can move.

The layers of a group look back at all tokens, or at a window of them. vLLM keeps blocks for what they look back at and
puts its null block where a request has none; a lease has :data:`NO_BLOCK` there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheSpec,
    KVCacheSpecKind,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from tercet.protocol import CacheGroup
from tercet.vllm_plugin.hooks import UnsupportedVLLM

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

NO_BLOCK = -1
FULL = (KVCacheSpecKind.FULL_ATTENTION, KVCacheSpecKind.MLA_ATTENTION)
SUPPORTED = (*FULL, KVCacheSpecKind.SLIDING_WINDOW)


def require_movable_groups(config: KVCacheConfig) -> None:
    """Raise :class:`UnsupportedVLLM`, saying why, for groups whose KV cannot be moved."""
    kinds = [get_kv_cache_spec_kind(group.kv_cache_spec) for group in config.kv_cache_groups]
    if not kinds:
        raise UnsupportedVLLM("this model has no KV cache, and so nothing that Tercet could move")
    strange = sorted({kind.value for kind in kinds if kind not in SUPPORTED})
    if strange:
        raise UnsupportedVLLM(
            f"this model has layers of kind {', '.join(strange)}; Tercet moves the KV of full and of sliding-window "
            "attention. Serve it with plain vLLM"
        )
    if len(kinds) > 1 and config.needs_kv_cache_zeroing:
        raise UnsupportedVLLM("this model's layers keep KV in several precisions; Tercet supports one")
    sizes = sorted({group.kv_cache_spec.block_size for group in config.kv_cache_groups})
    if len(sizes) > 1:
        raise UnsupportedVLLM(
            f"this model's layers have blocks of {sizes} tokens; Tercet supports one size. With "
            "--disable-hybrid-kv-cache-manager vLLM keeps all KV of all layers, in blocks of one size"
        )


def described(config: KVCacheConfig) -> tuple[CacheGroup, ...]:
    """The groups, as layouts name them; empty if all layers look back at all tokens."""
    groups = [_described(group.kv_cache_spec, len(group.layer_names)) for group in config.kv_cache_groups]
    return tuple(groups) if len(groups) > 1 or any(group.window for group in groups) else ()


def _described(spec: KVCacheSpec, num_layers: int) -> CacheGroup:
    return CacheGroup(get_kv_cache_spec_kind(spec).value, num_layers, get_kv_cache_spec_sliding_window(spec) or 0)


class GroupTables:
    """The block tables of requests, by group, as vLLM's manager keeps them."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self.block_size = self.groups[0].block_size

    @property
    def groups(self) -> tuple[SingleTypeKVCacheManager, ...]:
        """vLLM's manager of each group."""
        return self._manager.coordinator.single_type_managers

    def of(self, request_id: str) -> list[list[KVCacheBlock]]:
        """A request's blocks, by group and position; null blocks stand for none."""
        return [list(blocks) for blocks in self._manager.get_blocks(request_id).blocks]

    def held(self, request_id: str) -> int:
        """How many blocks a request holds."""
        return sum(not block.is_null for blocks in self.of(request_id) for block in blocks)

    def first_needed(self, group: int, computed: int) -> int:
        """The first position in a group's block table that a request needs which goes on behind ``computed`` tokens."""
        return self.groups[group].get_num_skipped_tokens(computed) // self.block_size

    def resumed_at(self, end: int) -> int:
        """Where vLLM resumes that finds ``end`` tokens in its prefix cache, which is in whole blocks, and not the last.

        What layers look back at from there must be kept of KV that others shall find.
        """
        return max(0, end - 1) // self.block_size * self.block_size

    def needed(self, end: int) -> int:
        """How many blocks a lease for ``end`` tokens holds, from which a request can be resumed.

        One token more fits, so that decoding can begin: whoever holds blocks must not wait for another.
        """
        until, resumed = -(-(end + 1) // self.block_size), self.resumed_at(end)
        return sum(until - self.first_needed(group, resumed) for group in range(len(self.groups)))

    def missing(self, request_id: str, end: int) -> int:
        """How many blocks a request that has some needs beside them, so as to have ``end`` tokens and one more."""
        until = -(-(end + 1) // self.block_size)
        return sum(max(0, until - len(blocks)) for blocks in self.of(request_id))

    def continues(self, request_id: str, computed: int) -> bool:
        """Whether a request can go on behind ``computed`` tokens: all that it looks back at from there has blocks.

        The next token's KV must not go into a block that the prefix cache shares.
        """
        at, writable = computed // self.block_size, self._manager.block_pool.is_block_writable
        for group, blocks in enumerate(self.of(request_id)):
            if any(block.is_null for block in blocks[self.first_needed(group, computed) : at + 1]):
                return False
            if at < len(blocks) and not writable(blocks[at]):
                return False
        return True
