"""What a fleet believes of an engine's cache is what vLLM's own block manager has, after each of its batches of events.

The manager is the real one; it needs no model. Tiers are told of by the real tracker of vLLM's offloading connector.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.distributed.kv_events import KVCacheEvent, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventGroupSpec,
    OffloadingEventsTracker,
)
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_block_hashes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import Medium, OffloadingEvent, OffloadingKVEventsConfig, make_offload_key
from vllm.v1.request import Request as VllmRequest

from tercet.fleet import FleetKnowledge
from tercet.fleet.kv_events import KVInbox
from tercet.protocol import Request

BLOCK, BLOCKS, WINDOW = 4, 14, 8
ADAPTER = LoRARequest("a", 1, "/nowhere")
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
DOUBLE = dataclasses.replace(FULL, block_size=2 * BLOCK)
SLIDING = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=WINDOW)
# A tier whose blocks have twice as many tokens.
IN_PAIRS: Any = SimpleNamespace(
    tokens_per_chunk=2 * BLOCK, hashes_per_chunk=2, tokens_per_block=2 * BLOCK, sliding_window_size_in_chunks=None,
    group_idx=0, kv_event_group_spec=OffloadingEventGroupSpec("full_attention", None),
)  # fmt: skip

init_none_hash(sha256)
hasher = get_request_block_hasher(BLOCK, sha256)


@dataclasses.dataclass(frozen=True)
class Start:
    """A request comes: of the tokens of ``blocks``, and ``tail`` more."""

    blocks: tuple[int, ...]
    tail: int = 0
    salt: str | None = None
    adapter: bool = False
    again: bool = False
    """All is computed anew, as where logprobs of the prompt are asked for: there are second copies."""
    loads: bool = False
    """Its KV comes from elsewhere: the blocks are cached when it is there."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt; a block's tokens are its number's."""
        return tuple(itertools.chain(*([block] * BLOCK for block in self.blocks), [9] * self.tail))


@dataclasses.dataclass(frozen=True)
class Act:
    """Something happens to one that runs: it ``grow``s by a block of output, is ``loaded``, or ``end``s.

    Without one, block ``which`` is taken from the cache, all are, or another ``tier`` tells of blocks.
    """

    what: str
    which: int = 0


starts = st.builds(
    Start, st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple), st.integers(0, 2),
    st.sampled_from([None, None, "salt"]), st.sampled_from([False, False, True]), st.booleans(), st.booleans(),
)  # fmt: skip
acts = st.builds(
    Act,
    st.sampled_from(["grow", "loaded", "end", "end", "evict", "reset", "tier", "named"]),
    st.integers(0, BLOCKS - 1),
)


class Engine:
    """vLLM's block manager with its tiers, and what is believed of it."""

    def __init__(self, specs: Sequence[KVCacheSpec]) -> None:
        groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
        self.specs = specs
        self.manager = KVCacheManager(
            KVCacheConfig(BLOCKS, [], groups), 256, max(spec.block_size for spec in specs), BLOCK,
            enable_kv_cache_events=True, max_in_flight_tokens=256,
        )  # fmt: skip
        self.trackers = [OffloadingEventsTracker(OffloadingKVEventsConfig(True, told)) for told in (False, True)]
        self.running: list[VllmRequest] = []
        self.loading: list[VllmRequest] = []
        self.seen: list[tuple[Start, VllmRequest]] = []
        self.knowledge = FleetKnowledge(lambda: 0.0)
        self.knowledge.add("e")
        self.inbox = KVInbox("e", self.knowledge)
        self._numbers, self._names = itertools.count(), itertools.count()

    def do(self, what: Start | Act) -> None:
        """One step of the engine, with its events."""
        told: Iterable[KVCacheEvent] = ()
        if isinstance(what, Start):
            self.start(what)
        elif what.what in ("tier", "named"):
            told = self.tier(what.what == "tier", what.which)
        elif what.what == "evict":
            self.manager.block_pool.evict_blocks({what.which})
        elif what.what == "reset":
            self.manager.reset_prefix_cache()
        elif self.running:
            self.act(what.what, self.running[what.which % len(self.running)])
        events: list[Any] = [*self.manager.take_events(), *told]
        batch = KVEventBatch(ts=0.0, events=events)
        assert not self.inbox.take(next(self._numbers), msgspec.msgpack.encode(batch))

    def start(self, start: Start) -> None:
        params = SamplingParams(max_tokens=100)
        lora = ADAPTER if start.adapter else None
        request = VllmRequest(
            f"r{next(self._names)}", list(start.tokens), params, None, block_hasher=hasher, cache_salt=start.salt,
            lora_request=lora,
        )  # fmt: skip
        found, computed = self.manager.empty_kv_cache_blocks, 0
        if not start.again:
            found, computed, *_ = self.manager.get_computed_blocks(request)
        allocated = self.manager.allocate_slots(
            request, request.num_tokens - computed, computed, found, delay_cache_blocks=start.loads
        )
        if allocated is None:
            self.manager.free(request)
            return
        request.num_computed_tokens = request.num_tokens
        self.seen.append((start, request))
        self.running.append(request)
        if start.loads:
            self.loading.append(request)

    def act(self, what: str, request: VllmRequest) -> None:
        if what == "loaded" and request in self.loading:
            self.loading.remove(request)
            self.manager.cache_blocks(request, request.num_computed_tokens)
        elif what == "grow" and request not in self.loading:
            for _ in range(BLOCK):
                request.append_output_token_ids(5)
            if self.manager.allocate_slots(request, BLOCK) is not None:
                request.num_computed_tokens += BLOCK
            else:
                self.end(request)
        elif what == "end":
            self.end(request)

    def end(self, request: VllmRequest) -> None:
        self.manager.free(request)
        self.running.remove(request)
        if request in self.loading:
            self.loading.remove(request)

    def tier(self, describes: bool, which: int) -> Iterable[KVCacheEvent]:
        """A lower tier stores a prompt's blocks, or drops them; it tells of hashes alone, or with blocks of two."""
        if not self.seen:
            return []
        request = self.seen[which % len(self.seen)][1]
        tracker = self.trackers[describes]
        size = 2 if describes else 1
        keys = [make_offload_key(block, 0) for block in request.block_hashes[size - 1 :: size]]
        for chunk, key in enumerate(keys):
            tracker.record_store(request, IN_PAIRS, chunk, key)
        medium = Medium.CPU if which % 2 else Medium.STORAGE
        removed = which % 3 == 0
        return tracker.take_events([OffloadingEvent(keys=keys, medium=medium, removed=removed)])

    # ---- what is there, and what is believed -----------------------------------------------------------------

    def held(self, request: VllmRequest, group: int) -> int:
        """How many tokens of a prompt are in the cache from its first one on, in whole blocks of a group of layers."""
        size = self.specs[group].block_size
        blocks = resolve_block_hashes(request.block_hashes, BLOCK, size)
        pool = self.manager.block_pool
        there = itertools.takewhile(lambda block: pool.get_cached_block(block, [group]) is not None, blocks)
        return size * sum(1 for _ in there)

    def believed(self, start: Start, request: VllmRequest) -> int:
        asked = Request(
            seq_id="r", prompt=tuple(request.all_token_ids), cache_salt=start.salt,
            adapter=ADAPTER.name if start.adapter else None,
        )  # fmt: skip
        return self.knowledge.cached_tokens("e", asked)

    def cached(self) -> int:
        """How many blocks of vLLM's pool are in the prefix cache, copies included."""
        return sum(block.block_hash is not None for block in self.manager.block_pool.blocks)

    def believed_blocks(self) -> int:
        held = [held for index in self.knowledge.indexes.values() for held in index._rows_held.values()]
        return sum(len(each.places) + len(each.unplaced) + sum(each.spare.values()) for each in held)


@given(st.lists(starts | acts, min_size=1, max_size=40))
@example([Start((0,)), Act("evict", 1), Act("grow"), Start((0,))])  # a block is stored while its parent is gone
@example([Start((0, 1)), Act("end"), Start((0, 1)), Act("evict", 2)])  # one of two copies goes
@settings(max_examples=settings().max_examples * 3 // 2, deadline=None)
def test_what_is_believed_is_what_vllms_block_manager_has(steps: list[Start | Act]) -> None:
    engine = Engine([FULL])
    for step in steps:
        engine.do(step)
        for start, request in engine.seen:
            assert engine.believed(start, request) == engine.held(request, 0), step
        assert engine.believed_blocks() == engine.cached(), step


@pytest.mark.parametrize("specs", [(SLIDING, FULL), (SLIDING, DOUBLE)], ids=["one size", "two sizes"])
@given(steps=st.lists(starts | acts, min_size=1, max_size=40))
@settings(max_examples=settings().max_examples * 3 // 5, deadline=None)
def test_of_several_kinds_of_layers_those_that_look_back_count(
    specs: Sequence[KVCacheSpec], steps: list[Start | Act]
) -> None:
    """Where blocks have several sizes vLLM finds the last one of a prompt in part, too, which may be believed."""
    engine = Engine(specs)
    for step in steps:
        engine.do(step)
        for start, request in engine.seen:
            believed, held = engine.believed(start, request), engine.held(request, 1)
            assert believed == held or (held < believed < held + specs[1].block_size and specs[1] is DOUBLE), step
