"""Two engines without a model, of which one sends to the other; in the place of KV, memory holds what it is of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import torch
from msgspec import structs
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.request import Request

from tercet.engine.interface import KeyedPrompt
from tercet.transport import Push
from tercet.vllm_plugin.core import core_methods
from tercet.vllm_plugin.core.cache_groups import NO_BLOCK
from tercet.vllm_plugin.differences import ZEROED_BY_BLOCK
from tercet.vllm_plugin.start import start_checks

from .tiny_engine import BLOCK, FULL, TinyEngine, send_of

A = "a" * 32
WINDOW = 40


def window(tokens: int, block_size: int = BLOCK) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=16, dtype=torch.float32, sliding_window=tokens
    )


def chunk(tokens: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32, attention_chunk_size=tokens
    )


def state(checkpoints: int = 0) -> MambaSpec:
    """With ``checkpoints``, a step writes the state at the last block's beginning, too, if it began before it."""
    spec = MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")
    if checkpoints:
        spec = replace(spec, num_prefill_checkpoint_blocks=checkpoints, prefill_checkpoint_alignment=checkpoints)
    return spec


MODELS: dict[str, tuple[KVCacheSpec, ...]] = {
    "full": (FULL,),
    "windows": (window(WINDOW),),
    "mixed": (FULL, window(WINDOW)),
    "windows first": (window(WINDOW), window(WINDOW), FULL),
    "a window of a block": (FULL, window(BLOCK)),
    "a window of one token more": (FULL, window(BLOCK + 1)),
    "chunks": (FULL, chunk(2 * BLOCK)),
}
if not ZEROED_BY_BLOCK.is_here:  # else models with states are refused
    MODELS["states"] = FULL, state()
    MODELS["states first"] = state(), state(), FULL
    MODELS["states with checkpoints"] = FULL, state(1)


@dataclass
class Computing:
    """An engine whose steps write into memory, and look back at what the model's layers would look back at."""

    engine: TinyEngine
    specs: tuple[KVCacheSpec, ...]
    memory: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    steps: int = 0

    def compute(self, output: SchedulerOutput) -> None:
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request = self.engine.scheduler.requests[request_id]
            tables = self.engine.scheduler.kv_cache_manager.get_block_ids(request_id)
            first = request.num_computed_tokens - scheduled
            for table, spec in zip(tables, self.specs, strict=True):
                if isinstance(spec, MambaSpec):
                    self._compute_state(request, table, spec, first)
                    continue
                for at in range(first, request.num_computed_tokens):
                    assert table[at // BLOCK] != 0, "vLLM's null block is nobody's to write"
                    self.memory[table[at // BLOCK], at % BLOCK] = meaning(request, at)
                    for back in range(looks_back_to(spec, at), at):
                        found = self.memory.get((table[back // BLOCK], back % BLOCK))
                        assert found == meaning(request, back), (at, back)

    def _compute_state(self, request: Request, table: list[int], spec: MambaSpec, first: int) -> None:
        """As vLLM's model runner: the last state is copied if another block begins, and then goes on from there."""
        end = request.num_computed_tokens
        if first:
            assert table[(first - 1) // BLOCK] != 0, "vLLM's null block is nobody's"
            assert self.memory.get((table[(first - 1) // BLOCK], 0)) == meaning(request, first - 1), (first, end)
        # Not in vLLM 0.31, whose models with states are refused.
        from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints

        offsets, columns = compute_mamba_prefill_checkpoints(
            [end], [end - first], BLOCK, BLOCK, spec.prefill_checkpoint_alignment, False, BLOCK
        )
        for offset, column in zip(offsets, columns, strict=True):
            if offset and spec.num_prefill_checkpoint_blocks and table[column] != 0:
                self.memory[table[column], 0] = meaning(request, first + offset - 1)
        assert table[(end - 1) // BLOCK] != 0, "vLLM's null block is nobody's to write"
        self.memory[table[(end - 1) // BLOCK], 0] = meaning(request, end - 1)

    def step(self) -> list[Push]:
        """One engine step; what it pushes."""
        self.steps += 1
        return self.engine.step(self.compute)[1].pushes

    def run(self, request: Request) -> None:
        for _ in range(1000):
            if request.is_finished():
                return
            self.step()
        raise AssertionError("the request does not end")


def looks_back_to(spec: KVCacheSpec, at: int) -> int:
    """The first position that a token's layer looks at."""
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return at // spec.attention_chunk_size * spec.attention_chunk_size
    return max(0, at - spec.sliding_window + 1) if isinstance(spec, SlidingWindowSpec) else 0


def meaning(request: Request, at: int) -> int:
    """What KV at a position is of: the tokens up to it."""
    return hash(tuple(request.all_token_ids[: at + 1]))


@dataclass
class Pair:
    """A sender, and a receiver that reads what is pushed as soon as the step that computed it is over."""

    source: Computing
    target: Computing
    moved: int = 0
    arrived: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])

    def carry(self, pushes: list[Push]) -> None:
        for push in pushes:
            blocks = self.target.engine.agent.granted[A].blocks[push.group]
            for slot, block in enumerate(push.blocks, push.slot):
                assert blocks[slot] != NO_BLOCK, "nobody asked for it"
                self.moved += 1
                self.arrived.add((push.group, slot))
                for offset in range(BLOCK):
                    found = self.source.memory.get((block, offset))
                    if found is not None:
                        self.target.memory[blocks[slot], offset] = found

    def send(self, tokens: list[int], begin: int) -> None:
        """Have the KV from ``begin`` on pushed into the reservation, by a forward pass if that is needed."""
        grant = self.target.engine.agent.granted[A]
        self.arrived.clear()
        begins = tuple(
            grant.begin + BLOCK * sum(block == NO_BLOCK for block in blocks) for blocks in grant.blocks
        )  # fmt: skip
        params = structs.replace(send_of("s", begin, len(tokens), base=grant.begin), group_begins=begins)
        found = core_methods.push_cached(self.source.engine.core, KeyedPrompt(tokens), params)
        if found is not None:
            self.carry(found)
        else:
            request = self.source.engine.add("sends", tokens, max_tokens=1, send=params)
            while not request.is_finished():
                self.carry(self.source.step())
        self.source.engine.end_send("s")
        slots = range((begin - grant.begin) // BLOCK, -(-(len(tokens) - grant.begin) // BLOCK))
        wanted = {
            (group, slot) for group, blocks in enumerate(grant.blocks) for slot in slots if blocks[slot] != NO_BLOCK
        }
        assert self.arrived == wanted, "a receiver refuses what is not all there"
        self.target.engine.agent.received[A] = len(tokens)


NewPair = Callable[..., Pair]


def pairs_of(config: VllmConfig) -> NewPair:
    """What makes pairs of engines of a model, by its name."""

    def make(model: str, retention: int | None = 0) -> Pair:
        if model in ("full", "chunks") and retention:
            retention = None  # vLLM refuses it for what it keeps all of
        specs, settings = MODELS[model], {"max_lease_share": 1}
        # Steps that compute more than a block are refused on a CPU, and this engine has no kernels.
        with patch.object(start_checks, "require_states_to_be_kept"):
            source, target = (
                Computing(TinyEngine(config, settings, specs=specs, retention=retention), specs) for _ in range(2)
            )
        return Pair(source, target)

    return make
