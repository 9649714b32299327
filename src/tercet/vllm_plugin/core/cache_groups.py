"""A model's KV cache groups: layers that share block tables, as vLLM sorts them, and which of them Tercet can move.

The layers of a group look back at all tokens, at a window of them (or at those of their chunk), or keep a state: the
memory of a state-space or linear-attention layer. vLLM keeps blocks for the tokens that they look back at and its null
block for others; a lease has :data:`NO_BLOCK` there.

A state is one block, and changes with every token. vLLM keeps it at the position of the last token that it has seen,
copies it when the next block of tokens begins, and keeps the copy. A block that is full of tokens therefore holds the
state at its end, and the last block holds the present state (vLLM's mode "align").
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheSpecKind,
    MambaSpec,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from tercet.protocol import CacheGroup
from tercet.vllm_plugin.differences import ZEROED_BY_BLOCK, has_mixed_precision
from tercet.vllm_plugin.hooks import UnsupportedVLLM

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

NO_BLOCK = -1
FULL = (KVCacheSpecKind.FULL_ATTENTION, KVCacheSpecKind.MLA_ATTENTION)
SUPPORTED = (
    *FULL, KVCacheSpecKind.SLIDING_WINDOW, KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION, KVCacheSpecKind.MAMBA
)  # fmt: skip


def require_movable_groups(config: KVCacheConfig) -> None:
    """Raise :class:`UnsupportedVLLM`, with the reason, for groups whose KV cannot be moved."""
    kinds = [get_kv_cache_spec_kind(group.kv_cache_spec) for group in config.kv_cache_groups]
    if not kinds:
        raise UnsupportedVLLM("this model has no KV cache, so there is nothing for Tercet to move")
    strange = sorted({kind.value for kind in kinds if kind not in SUPPORTED})
    if strange:
        raise UnsupportedVLLM(
            f"this model has layers of kind {', '.join(strange)}; Tercet moves the KV of full and of sliding-window "
            "attention, and states. Serve it with plain vLLM"
        )
    if all(kind is KVCacheSpecKind.MAMBA for kind in kinds):
        raise UnsupportedVLLM(
            "this model's layers keep states only; Tercet moves states only together with the KV of attention"
        )
    for spec in (group.kv_cache_spec for group in config.kv_cache_groups):
        if not isinstance(spec, MambaSpec):
            continue
        if spec.mamba_cache_mode != "align":
            raise UnsupportedVLLM(
                f"this model's layers keep states, in mamba_cache_mode {spec.mamba_cache_mode!r}, where vLLM does not "
                "report their tokens; Tercet moves states of mode 'align', which --enable-prefix-caching chooses"
            )
        if spec.num_speculative_blocks:
            raise UnsupportedVLLM(
                "this model's layers keep states, and vLLM holds several of them for speculative decoding; Tercet "
                "moves only one: start the engine without --speculative-config"
            )
        if ZEROED_BY_BLOCK.is_here:
            raise UnsupportedVLLM("this model's layers keep states, which Tercet moves from vLLM 0.32 on: install it")
    if len(kinds) > 1 and has_mixed_precision(config):
        raise UnsupportedVLLM("this model's layers keep KV in several precisions; Tercet supports one")
    sizes = sorted({group.kv_cache_spec.block_size for group in config.kv_cache_groups})
    if len(sizes) > 1:
        raise UnsupportedVLLM(
            f"this model's layers have blocks of {sizes} tokens; Tercet supports one size. With "
            "--disable-hybrid-kv-cache-manager vLLM keeps all KV of all layers, in blocks of one size"
        )


def described(config: KVCacheConfig, layers: Sequence[int]) -> tuple[CacheGroup, ...]:
    """Return the groups for layouts, with the number of their ``layers``; empty if all look back at all tokens."""
    groups = list[CacheGroup]()
    for group, num_layers in zip(config.kv_cache_groups, layers, strict=True):
        spec = group.kv_cache_spec
        chunk = spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else 0
        window = get_kv_cache_spec_sliding_window(spec) or chunk
        groups.append(CacheGroup(get_kv_cache_spec_kind(spec).value, num_layers, window))
    return tuple(groups) if len(groups) > 1 or any(group.window for group in groups) else ()


def state_formats(config: KVCacheConfig) -> list[str]:
    """Return the formats of the model's states, by group: shapes, on one rank, and precisions."""
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    return [
        "+".join(f"{dtype}{list(shape)}" for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
        for spec in specs
        if isinstance(spec, MambaSpec)
    ]


def state_layers(config: KVCacheConfig) -> list[str]:
    """Return the names of the layers that keep states."""
    groups = config.kv_cache_groups
    return [name for group in groups if isinstance(group.kv_cache_spec, MambaSpec) for name in group.layer_names]


class GroupTables:
    """The block tables of requests, by group. A decoding sequence needs blocks for ``step_tokens`` in a step."""

    def __init__(self, manager: KVCacheManager, step_tokens: int = 1) -> None:
        self._manager = manager
        self._step_tokens = step_tokens
        self.block_size = self.groups[0].block_size
        self.states = [at for at, group in enumerate(self.groups) if isinstance(group.kv_cache_spec, MambaSpec)]
        """The groups that keep states."""

    @property
    def groups(self) -> tuple[SingleTypeKVCacheManager, ...]:
        return self._manager.coordinator.single_type_managers

    def of(self, request_id: str) -> list[list[KVCacheBlock]]:
        """Return a request's blocks, by group and position; null blocks stand for missing ones."""
        return [list(blocks) for blocks in self._manager.get_blocks(request_id).blocks]

    def leased(self, request_id: str, begin: int, end: int) -> list[list[int]]:
        """Return the blocks of a lease for tokens ``[begin, end)``, by group and position, as a sender sees them.

        A sender needs only two states: the one at the lease's end, and the one where vLLM would resume. It does not
        need older states, from before the lease grew.
        """
        first, until = begin // self.block_size, -(-end // self.block_size)
        tables = [
            [NO_BLOCK if block.is_null else block.block_id for block in blocks[first:until]]
            for blocks in self._manager.get_blocks(request_id).blocks
        ]
        for group in self.states:
            older = max(0, min(self.first_needed(group, self.resumed_at(end)) - first, len(tables[group])))
            tables[group][:older] = [NO_BLOCK] * older
        return tables

    def forget_older_states(self, request_id: str, end: int) -> None:
        """Remove older states in blocks of a lease that grew to ``end`` tokens from the prefix cache.

        These states belong to the position where the lease ended before, but blocks are named by the tokens that fill
        them.
        """
        for group in self.states:
            cached = self.groups[group].num_cached_block
            first = self.first_needed(group, self.resumed_at(end))
            cached[request_id] = max(cached.get(request_id, 0), first)

    def held(self, request_id: str) -> int:
        return sum(not block.is_null for blocks in self.of(request_id) for block in blocks)

    def first_needed(self, group: int, computed: int) -> int:
        """Return the first position in a group's block table that a request needs to continue after ``computed``."""
        return max(0, self.groups[group].get_num_skipped_tokens(computed)) // self.block_size

    def resumed_at(self, end: int) -> int:
        """Return the position where vLLM resumes if ``end`` tokens are in its prefix cache.

        vLLM resumes at a whole block, and before the last token. KV that layers look back at from there must be kept,
        so that other requests can use the prefix.
        """
        return max(0, end - 1) // self.block_size * self.block_size

    def needed(self, end: int) -> int:
        """Return the number of blocks of a lease for ``end`` tokens and one more step, so that decoding can begin."""
        until, resumed = self._until(end), self.resumed_at(end)
        return sum(until - self.first_needed(group, resumed) for group in range(len(self.groups)))

    def missing(self, request_id: str, end: int) -> int:
        """Return the number of blocks that a request needs in addition, for ``end`` tokens and one more step."""
        until = self._until(end)
        return sum(max(0, until - len(blocks)) for blocks in self.of(request_id))

    def _until(self, end: int) -> int:
        return -(-min(end + self._step_tokens, self._manager.max_model_len) // self.block_size)

    def hand_over(self, owner: str, heir: str) -> None:
        """Give a request's blocks to another request, which has none."""
        for group, manager in enumerate(self.groups):
            blocks, cached = manager.req_to_blocks[owner], manager.num_cached_block.get(owner, 0)
            # Blocks change hands without being freed in between: the pool could give a freed one to another request.
            if group in self.states:
                # vLLM's manager removes the last state from the table, as for a request that found a cached state.
                manager.pop_blocks_for_free(owner)
            else:
                del manager.req_to_blocks[owner]
                manager.num_cached_block.pop(owner, None)
            manager.req_to_blocks[heir], manager.num_cached_block[heir] = blocks, cached

    @contextmanager
    def written_by_peers(self) -> Generator[None]:
        """Mark blocks that are taken in this context as written from outside: vLLM must not zero them in a step."""
        # The worker zeroes a step's new blocks when the step begins, which may be after the peer has written.
        lengths = [len(group.new_block_ids) for group in self.groups]
        yield
        for group, length in zip(self.groups, lengths, strict=True):
            del group.new_block_ids[length:]

    def continues(self, request_id: str, computed: int) -> bool:
        """True if a request can continue after ``computed`` tokens: its layers have all blocks that they look back at.

        The next token's KV must not go into a block that the prefix cache shares.
        """
        at, writable = computed // self.block_size, self._manager.block_pool.is_block_writable
        for group, blocks in enumerate(self.of(request_id)):
            if any(block.is_null for block in blocks[self.first_needed(group, computed) : at + 1]):
                return False
            if at < len(blocks) and not writable(blocks[at]):
                return False
        return True
