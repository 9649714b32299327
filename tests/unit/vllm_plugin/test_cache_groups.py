"""Models whose layers look back at all tokens, at a window of them, or both: what is moved, and that nothing is missed.

Two engines without a model; in the place of KV, memory holds at each position which tokens lead up to it.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
)

from tercet.protocol import CacheGroup, NoSpace, UnknownSequence, packed
from tercet.transport import ExtendLease
from tercet.vllm_plugin.core.cache_groups import NO_BLOCK, described, require_movable_groups
from tercet.vllm_plugin.core.reservations import FILLER_TOKEN
from tercet.vllm_plugin.differences import ZEROED_BY_BLOCK
from tercet.vllm_plugin.hooks import UnsupportedVLLM
from tercet.vllm_plugin.start.start_checks import (
    require_generation,
    require_one_rank,
    require_positions_of_the_prompt,
    require_prefill_behind_kv,
)
from tercet.vllm_plugin.worker.kv_layout import require_drafter

from .moving_kv import MODELS, WINDOW, A, NewPair, Pair, state, window
from .tiny_engine import BLOCK, FULL, TinyEngine, tokens_of

# Tokens of a sequence for which 32 blocks are always enough while it moves; more may find no room.
SURE = 90
with_states = pytest.mark.skipif(ZEROED_BY_BLOCK.is_here, reason="this vLLM's models with states are refused")


@pytest.fixture(params=MODELS)
def pair(request: pytest.FixtureRequest, new_pair: NewPair) -> Pair:
    return new_pair(request.param)


def finish(pair: Pair) -> None:
    for each in (pair.source, pair.target):
        each.engine.assert_nothing_held()


@settings(max_examples=settings().max_examples * 2 // 5)
@given(
    model=st.sampled_from(list(MODELS)),
    retention=st.sampled_from([0, None]),
    length=st.integers(1, 220),
    here=st.integers(0, 220),
    there=st.integers(0, 220),
    ahead=st.integers(0, 3),
)
def test_a_request_goes_on_where_its_kv_was_sent(
    new_pair: NewPair, model: str, retention: int | None, length: int, here: int, there: int, ahead: int
) -> None:
    """Whatever either cache has, and wherever the first token was sampled: no step misses what it looks back at."""
    pair, tokens = new_pair(model, retention), tokens_of(length)
    for computing, cached in ((pair.source, here), (pair.target, there)):
        if cached:
            computing.run(computing.engine.add("before", [*tokens[:cached], 5], max_tokens=1))
    matched = pair.target.engine.reserve(A, tokens)
    pair.send(tokens, matched)
    pair.target.engine.commit(A, length)
    request = pair.target.engine.add("goes on", [*tokens, *tokens_of(ahead, 700)], max_tokens=50, lease=A)
    before = pair.target.steps
    pair.target.run(request)
    if matched < length:  # else nothing was sent, and vLLM's own cache may not have what the last token looks back at
        assert pair.target.steps - before <= 51, "what was sent is not computed again"
    finish(pair)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_prompt_of_whole_blocks_is_found_again(pair: Pair, ahead: int) -> None:
    """Its last token is computed anew, so it goes on a block before where one goes on that has a token more."""
    tokens = tokens_of(12 * BLOCK)
    pair.target.engine.reserve(A, tokens)
    pair.send(tokens, 0)
    pair.target.engine.commit(A, len(tokens))
    pair.target.engine.release(A)
    pair.target.run(pair.target.engine.add("goes on", [*tokens, *tokens_of(ahead, 700)], max_tokens=3))
    assert pair.target.steps == 3, "what was sent is not computed again"
    finish(pair)


@settings(max_examples=settings().max_examples * 3 // 5)
@given(
    model=st.sampled_from(list(MODELS)),
    retention=st.sampled_from([0, 6 * BLOCK, None]),
    first=st.integers(1, 100),
    more=st.lists(st.integers(1, 70), max_size=2),
)
def test_a_sequence_that_grows_is_sent_bit_by_bit(
    new_pair: NewPair, model: str, retention: int | None, first: int, more: list[int]
) -> None:
    """A running request moves: its lease is extended while it decodes, and its own blocks are sent."""
    # With more tokens there is no room for what goes on: two windows, full attention, and 32 blocks.
    assume(first + sum(more) <= 140)
    pair, tokens = new_pair(model, retention), tokens_of(first)
    running = pair.source.engine.add("runs", tokens, max_tokens=120)
    begin = 0
    for steps in (1, *more):
        for _ in range(steps + (first // 64)):
            pair.source.step()
        so_far = list(running.all_token_ids)[:-1]
        if not begin:
            begin = pair.target.engine.reserve(A, so_far)
        else:
            try:
                found, end = pair.target.engine.extend(A, so_far), len(so_far)
            except NoSpace:  # the blocks of two windows, of full attention, and those of the next step
                assert len(so_far) > SURE, "there is room for this"
                reject()
            pair.target.engine.agent.do(
                ExtendLease(A, found.blocks, found.matched_len, end, BLOCK, packed(so_far), None)
            )  # fmt: skip
        pair.send(so_far, begin)
        begin = len(so_far) // BLOCK * BLOCK or 1
    now = list(running.all_token_ids)
    pair.source.engine.abort("runs")
    pair.target.run(pair.target.engine.add("goes on", now, max_tokens=30, lease=A))
    finish(pair)


@settings(max_examples=settings().max_examples * 3 // 5)
@given(
    model=st.sampled_from(list(MODELS)),
    retention=st.sampled_from([0, 6 * BLOCK, None]),
    first=st.integers(1, 150),
    portion=st.integers(1, 4).map(lambda blocks: blocks * BLOCK),
    rest=st.integers(0, 20),
)
def test_a_reservation_is_filled_in_portions_while_the_source_decodes(
    new_pair: NewPair, model: str, retention: int | None, first: int, portion: int, rest: int
) -> None:
    pair, tokens = new_pair(model, retention), tokens_of(first)
    running = pair.source.engine.add("runs", tokens, max_tokens=70)
    for _ in range(3 + first // 64):
        pair.source.step()
    context = list(running.all_token_ids)[:-1]
    begin = pair.target.engine.reserve(A, context)
    while begin < len(context):
        end = min(begin + portion, len(context))
        pair.send(context[:end], begin)
        begin = end
        for _ in range(rest):
            pair.source.step()
    now = list(running.all_token_ids)
    pair.source.engine.abort("runs")
    before = pair.target.steps
    pair.target.run(pair.target.engine.add("goes on", now, max_tokens=30, lease=A))
    assert pair.target.steps - before <= 32 + (len(now) - len(context)) // 64, "what was sent is not computed again"
    finish(pair)


@pytest.mark.parametrize("valid", [0, BLOCK, 5 * BLOCK, 9 * BLOCK, 10 * BLOCK - 1])
def test_of_half_a_send_nothing_is_missed(pair: Pair, valid: int) -> None:
    """The sender died: what it has sent may not be enough to go on from, since windows were reserved at the end."""
    tokens = tokens_of(10 * BLOCK)
    pair.target.engine.reserve(A, tokens)
    pair.send(tokens, 0)
    pair.target.memory = {
        (block, offset): found
        for (block, offset), found in pair.target.memory.items()
        if all(
            blocks.index(block) * BLOCK + offset < valid
            for blocks in pair.target.engine.agent.granted[A].blocks
            if block in blocks
        )
    }
    pair.target.engine.agent.received[A] = valid
    request = pair.target.engine.add("goes on", [*tokens, 3], max_tokens=30, lease=A)
    pair.target.run(request)
    finish(pair)


def test_a_block_that_was_sent_in_part_is_found_when_it_is_complete(pair: Pair) -> None:
    tokens = tokens_of(
        2 * BLOCK + 1
    )  # vLLM keeps of a window what is looked back at from the prompt's last whole block
    pair.target.engine.reserve(A, tokens[:-7])
    pair.send(tokens[:-7], 0)
    pair.target.run(pair.target.engine.add("goes on", tokens, max_tokens=12, lease=A))
    assert pair.target.engine.cached([*tokens, *tokens_of(20, 500)]) == 2 * BLOCK
    finish(pair)


def test_of_layers_with_a_window_only_the_window_is_reserved_and_sent(new_pair: NewPair) -> None:
    pair, tokens = new_pair("mixed"), tokens_of(10 * BLOCK)
    pair.target.engine.reserve(A, tokens)
    full, windowed = pair.target.engine.agent.granted[A].blocks
    assert len(full) == len(windowed) == 10
    assert NO_BLOCK not in full
    # vLLM would resume at the last whole block that leaves something to compute, of which 39 tokens look back.
    assert [block == NO_BLOCK for block in windowed] == [True] * 6 + [False] * 4
    pair.send(tokens, 0)
    assert pair.moved == 10 + 4
    assert pair.target.engine.release(A) == 10 * BLOCK
    finish(pair)


def test_blocks_that_leave_a_window_stay_open_while_a_lease_is_extended(config: VllmConfig) -> None:
    """Peers may be writing there, so nobody else may get them."""
    engine = TinyEngine(config, specs=MODELS["mixed"])
    engine.reserve(A, tokens_of(4 * BLOCK))
    before = engine.agent.granted[A].blocks[1]
    after = engine.extend(A, tokens_of(12 * BLOCK)).blocks[1]
    assert after[:4] == before
    assert NO_BLOCK not in after[1:]
    engine.release(A)
    with pytest.raises(UnknownSequence):
        engine.release(A)
    engine.assert_nothing_held()


def test_what_a_running_request_has_left_behind_is_found_in_the_cache(new_pair: NewPair) -> None:
    pair, tokens = new_pair("mixed", retention=None), tokens_of(5 * BLOCK)
    running = pair.source.engine.add("runs", tokens, max_tokens=100)
    for _ in range(4 * BLOCK):
        pair.source.step()
    assert running.num_computed_tokens > 8 * BLOCK
    pair.target.engine.reserve(A, tokens)
    steps = pair.source.steps
    pair.send(tokens, 0)
    assert pair.source.steps == steps, "no forward pass was needed"
    pair.source.engine.abort("runs")
    pair.target.run(pair.target.engine.add("goes on", [*tokens, 3], max_tokens=3, lease=A))
    finish(pair)


def test_what_is_gone_from_a_window_is_computed_again(new_pair: NewPair) -> None:
    pair, tokens = new_pair("mixed"), tokens_of(5 * BLOCK)
    pair.source.engine.add("runs", tokens, max_tokens=100)
    for _ in range(4 * BLOCK):
        pair.source.step()
    pool = pair.source.engine.scheduler.kv_cache_manager.block_pool
    free = pool.get_new_blocks(pool.get_num_free_blocks())  # whoever takes them overwrites what they hold
    pool.free_blocks(free)
    pair.target.engine.reserve(A, tokens)
    steps = pair.source.steps
    pair.send(tokens, 0)
    assert pair.source.steps > steps
    pair.source.engine.abort("runs")
    pair.target.run(pair.target.engine.add("goes on", [*tokens, 3], max_tokens=3, lease=A))
    finish(pair)


def test_what_a_lease_that_grew_by_more_than_a_window_wants_is_computed(new_pair: NewPair) -> None:
    """vLLM keeps of a window what some positions look back at, and would go on behind the last of those."""
    pair, tokens = new_pair("mixed", retention=4 * BLOCK), tokens_of(BLOCK)
    running = pair.source.engine.add("runs", tokens, max_tokens=250)
    pair.source.step()
    pair.target.engine.reserve(A, tokens)
    pair.send(tokens, 0)
    for _ in range(6 * BLOCK - 2):
        pair.source.step()
    grown = list(running.all_token_ids)[:-1]
    assert pair.source.engine.cached(grown) == 4 * BLOCK
    found = pair.target.engine.extend(A, grown)
    pair.target.engine.agent.do(ExtendLease(A, found.blocks, 0, len(grown), BLOCK, packed(grown), None))
    pair.send(grown, BLOCK)
    pair.source.engine.abort("runs")
    pair.target.run(pair.target.engine.add("goes on", [*grown, 3], max_tokens=3, lease=A))
    finish(pair)


@with_states
@pytest.mark.parametrize("model", ["states", "states first", "states with checkpoints"])
def test_a_state_is_of_its_position_and_no_other(new_pair: NewPair, model: str) -> None:
    """The request that names what is sent has a token more, and somebody else's state may be of just that one."""
    pair, tokens = new_pair(model, retention=None), tokens_of(2 * BLOCK - 1)
    pair.source.run(pair.source.engine.add("other", [*tokens, FILLER_TOKEN, 5], max_tokens=1))
    pair.source.engine.add("runs", tokens, max_tokens=100)
    for _ in range(3):
        pair.source.step()
    pair.target.engine.reserve(A, tokens)
    pair.send(tokens, 0)
    pair.source.engine.abort("runs")
    pair.target.run(pair.target.engine.add("goes on", [*tokens, 3], max_tokens=3, lease=A))
    finish(pair)


@with_states
def test_of_states_a_lease_wants_the_last_one_and_the_one_before_its_block(new_pair: NewPair) -> None:
    pair, tokens = new_pair("states"), tokens_of(5 * BLOCK + 3)
    pair.target.engine.reserve(A, tokens)
    _, states = pair.target.engine.agent.granted[A].blocks
    assert [block == NO_BLOCK for block in states] == [True] * 4 + [False] * 2
    pair.send(tokens, 0)
    assert pair.moved == 6 + 2
    pair.target.engine.commit(A, len(tokens))
    assert pair.target.engine.release(A) == len(tokens)
    assert pair.target.engine.cached([*tokens, *tokens_of(20, 500)]) == 5 * BLOCK
    finish(pair)


@with_states
def test_states_that_stayed_behind_as_a_lease_grew_are_not_found(new_pair: NewPair) -> None:
    """They are of where the lease ended, in a block of tokens that was not full."""
    pair, tokens = new_pair("states", retention=None), tokens_of(6 * BLOCK)
    pair.target.engine.reserve(A, tokens[: BLOCK + 3])
    pair.send(tokens[: BLOCK + 3], 0)
    found = pair.target.engine.extend(A, tokens)
    assert [block == NO_BLOCK for block in found.blocks[1]] == [True] * 5 + [False]
    pair.target.engine.agent.do(ExtendLease(A, found.blocks, 0, len(tokens), BLOCK, packed(tokens), None))
    pair.send(tokens, BLOCK)
    pair.target.engine.commit(A, len(tokens))
    pair.target.engine.release(A)
    pair.target.run(pair.target.engine.add("later", [*tokens[: 2 * BLOCK], 3], max_tokens=3))
    pair.target.run(pair.target.engine.add("too", [*tokens, 3], max_tokens=3))
    finish(pair)


# ---- what is refused -----------------------------------------------------------------------------------------------


def caches(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer.{number}.{at}" for at in range(2)], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(8, kv_cache_tensors=[], kv_cache_groups=groups)


STATE = MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,))
HALF = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
LATENT = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.float32)


@pytest.mark.parametrize(
    ("specs", "why"),
    [
        ((FULL, STATE), "states, in mamba_cache_mode 'none'"),
        ((FULL, replace(state(), num_speculative_blocks=2)), "several of them for speculative decoding"),
        ((state(),), "states only"),
        ((FULL, window(WINDOW, 2 * BLOCK)), r"blocks of \[16, 32\] tokens"),
        ((FULL, HALF), "several precisions"),
        ((), "no KV cache"),
    ],
)
def test_other_kinds_are_refused_with_the_reason(specs: tuple[KVCacheSpec, ...], why: str) -> None:
    with pytest.raises(UnsupportedVLLM, match=why):
        require_movable_groups(caches(*specs))


def test_latent_kv_is_refused_where_vllm_computes_nothing_behind_it() -> None:
    def config(use_mla: bool, chunked: bool) -> Any:
        return SimpleNamespace(
            model_config=SimpleNamespace(use_mla=use_mla),
            scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked),
        )

    with pytest.raises(UnsupportedVLLM, match="after existing KV"):
        require_prefill_behind_kv(config(use_mla=True, chunked=False))
    require_prefill_behind_kv(config(use_mla=True, chunked=True))  # as with AMX
    require_prefill_behind_kv(config(use_mla=False, chunked=False))


def test_positions_that_go_by_what_an_encoder_makes_are_refused() -> None:
    def config(rate: float | None, uses_mrope: bool = True) -> Any:
        multimodal = SimpleNamespace(video_pruning_rate=rate)
        return SimpleNamespace(model_config=SimpleNamespace(multimodal_config=multimodal, uses_mrope=uses_mrope))

    with pytest.raises(UnsupportedVLLM, match="--video-pruning-rate"):
        require_positions_of_the_prompt(config(0.5))
    require_positions_of_the_prompt(config(0.5, uses_mrope=False))
    for none in (0.0, None):
        require_positions_of_the_prompt(config(none))
    text: Any = SimpleNamespace(model_config=SimpleNamespace(multimodal_config=None, uses_mrope=True))
    require_positions_of_the_prompt(text)


@pytest.mark.parametrize("method", ["ngram", "eagle", "eagle3", "mtp", "draft_model", "custom_class", None])
def test_a_connector_for_hidden_states_is_not_what_drafters_need(method: str | None) -> None:
    def config(speculative: Any) -> Any:
        return SimpleNamespace(speculative_config=speculative)

    require_drafter(config(method and SimpleNamespace(method=method)))
    with pytest.raises(UnsupportedVLLM, match="one connector"):
        require_drafter(config(SimpleNamespace(method="extract_hidden_states")))


def parallel(**sizes: int | bool) -> VllmConfig:
    given = {
        "data_parallel_size": 1, "data_parallel_external_lb": False, "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1, "pipeline_parallel_size": 2, "_api_process_count": 1, **sizes,
    }  # fmt: skip
    return cast("VllmConfig", SimpleNamespace(parallel_config=SimpleNamespace(**given)))


@pytest.mark.parametrize("size", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_tokens_of_a_block_spread_over_ranks_are_refused(size: str) -> None:
    require_one_rank(parallel())
    with pytest.raises(UnsupportedVLLM, match="context parallelism"):
        require_one_rank(parallel(**{size: 2}))


def test_pooling_models_have_nothing_to_be_moved() -> None:
    def config(runner: str) -> VllmConfig:
        return cast("VllmConfig", SimpleNamespace(model_config=SimpleNamespace(runner_type=runner)))

    require_generation(config("generate"))
    with pytest.raises(UnsupportedVLLM, match="--pooling-server"):
        require_generation(config("pooling"))


def test_a_server_has_one_data_parallel_rank() -> None:
    require_one_rank(parallel(data_parallel_size=2, data_parallel_external_lb=True))
    with pytest.raises(UnsupportedVLLM, match="with its --data-parallel-rank"):
        require_one_rank(parallel(data_parallel_size=2))


def test_kinds_are_named_for_other_engines() -> None:
    assert described(caches(FULL), [2]) == ()
    assert described(caches(LATENT), [2]) == ()
    assert described(caches(window(WINDOW)), [2]) == (CacheGroup("sliding_window", 2, WINDOW),)
    assert described(caches(FULL, window(WINDOW)), [2, 2]) == (
        CacheGroup("full_attention", 2), CacheGroup("sliding_window", 2, WINDOW)
    )  # fmt: skip
    for specs in MODELS.values():
        require_movable_groups(caches(*specs))
