"""Leases on vLLM's own scheduler that grew elsewhere, and guessed tokens: blocks are held as by vLLM alone, and what
was guessed is nobody's KV until the model has said the same.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from tercet.engine.block_tables import open_table
from tercet.protocol import packed
from tercet.transport import ExtendLease, KVRegion

from .moving_kv import MODELS, A, Computing, NewPair, Pair
from .tiny_engine import BLOCK, NUM_BLOCKS, TinyEngine, send_of, tiny_config, tokens_of

GUESSES = 3
WRONG = 999


def said(length: int) -> list[int]:
    """A prompt of so many tokens, or what the model says at last behind a shorter one."""
    return tokens_of(length)


class GuessingEngine(TinyEngine):
    """An engine whose model counts on. ``written`` is what each slot of each block holds: the tokens up to there."""

    def __init__(self, config: VllmConfig, region: KVRegion) -> None:
        super().__init__(config, words=(f"/proc/self/fd/{region.fd}", region.shape.words))
        assert self.side.tables is not None
        self.place = self.side.tables.place
        self.tables = open_table(self.place)
        self.written: dict[tuple[int, int], tuple[int, ...]] = {}

    def step_with(self, guessed: Sequence[bool]) -> None:
        """One step for the only request, behind which the next tokens are guessed, each right or wrong."""
        output = self.scheduler.schedule()
        (request,) = (self.scheduler.requests[request_id] for request_id in output.num_scheduled_tokens)
        guesses = output.scheduled_spec_decode_tokens.get(request.request_id, [])
        self._compute(request, output.num_scheduled_tokens[request.request_id], guesses)
        known = request.num_tokens
        right = next((at for at, guess in enumerate(guesses) if guess != said(known + at + 1)[-1]), len(guesses))
        sampled = said(known + right + 1)[known:] if request.num_computed_tokens >= known else []
        ids = {request.request_id: 0}
        self.scheduler.update_from_output(output, ModelRunnerOutput(list(ids), ids, [sampled]))
        if not request.is_finished():
            known = request.num_tokens
            next_ones = [said(known + at + 1)[-1] if good else WRONG for at, good in enumerate(guessed)]
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(ids), [next_ones]))

        assert self.sendable(request.num_tokens - 1) == request.num_tokens - 1

    def _compute(self, request: Request, scheduled: int, guesses: Sequence[int]) -> None:
        tokens, blocks = [*request.all_token_ids, *guesses], self.blocks_of(request.request_id)
        until = request.num_computed_tokens
        self.sendable(until - scheduled)
        for at in range(until - scheduled, until):
            self.written[blocks[at // BLOCK], at % BLOCK] = tuple(tokens[: at + 1])
        self.sendable(until - scheduled)

    def sendable(self, computed: int) -> int:
        """How much a send would take from the request: what is accepted at most, and of the right tokens."""
        most = 0
        for end in range(max(1, computed - 1), computed + GUESSES + 2):
            tokens = said(end)
            pushed = self.push_cached(tokens, send_of("s", 0, end))
            if pushed is not None:
                assert end <= computed
                self._require(pushed.blocks, tokens)
                self.end_send("s")
                most = end
        found = self.tables.find_all(1)
        if found is not None:
            assert found[0].computed <= computed
            self._require(found[0].blocks, said(found[0].computed))
        return most

    def _require(self, blocks: Sequence[int], tokens: list[int]) -> None:
        for at in range(len(tokens)):
            assert self.written[blocks[at // BLOCK], at % BLOCK] == tuple(tokens[: at + 1]), at


@pytest.fixture(scope="module", params=["ngram", "draft_model", "eagle"])
def guessing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """Without KV of the drafter's, and with it: then slots are taken ahead for what it writes."""
    directory = tmp_path_factory.mktemp("guessing")
    config, method = tiny_config(directory), request.param
    how: dict[str, Any] = {"model": str(directory)}
    if method == "ngram":
        how = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    config.speculative_config = SpeculativeConfig(
        method=method, num_speculative_tokens=GUESSES, target_model_config=config.model_config,
        target_parallel_config=config.parallel_config, **how,
    )  # fmt: skip
    return config


@contextmanager
def engine_of(config: VllmConfig) -> Generator[GuessingEngine]:
    region = KVRegion.create(1, NUM_BLOCKS, 64)
    try:
        engine = GuessingEngine(config, region)
        yield engine
        engine.assert_nothing_held()
        os.close(int(engine.place.path.rpartition("/")[2]))
    finally:
        region.close()


def test_guesses_that_the_model_does_not_say_are_in_no_send(guessing: VllmConfig) -> None:
    with engine_of(guessing) as engine:
        request = engine.add("r", said(20), max_tokens=40, number=1, ignore_eos=True)
        engine.step_with([True, True, False])
        assert (request.num_tokens, request.num_computed_tokens) == (21, 20)
        engine.step_with([False, True, True])
        assert (request.num_tokens, request.num_computed_tokens) == (24, 23), "two guesses and a token"
        engine.step_with([])
        assert (request.num_tokens, request.num_computed_tokens) == (25, 24), "what follows a wrong guess is wrong"
        found = engine.tables.find_all(1)
        assert found is not None
        assert found[0].computed == 24
        engine.abort("r")


@given(
    prompt=st.integers(1, 3 * BLOCK), steps=st.lists(st.lists(st.booleans(), max_size=GUESSES), min_size=1, max_size=10)
)
@settings(max_examples=15)
def test_what_is_sent_is_what_was_accepted(
    guessing: VllmConfig, prompt: int, steps: list[list[bool]]
) -> None:  # fmt: skip
    with engine_of(guessing) as engine:
        request = engine.add("r", said(prompt), max_tokens=100, number=1, ignore_eos=True)
        for guessed in steps:
            engine.step_with(guessed)
        assert list(request.all_token_ids) == said(request.num_tokens)
        engine.abort("r")


@pytest.mark.parametrize("there", [20, 24, 2 * BLOCK])
def test_a_sequence_goes_on_from_an_engine_that_guesses(guessing: VllmConfig, there: int) -> None:
    """Prompt and output of elsewhere, KV of all but the last token: a step computes that one alone."""
    with engine_of(guessing) as engine:
        tokens = said(there)
        engine.reserve("a" * 32, tokens)
        engine.agent.received["a" * 32] = there - 1
        engine.commit("a" * 32, there - 1)
        request = engine.add("r", tokens[:15], max_tokens=100, lease="a" * 32, output=tokens[15:], number=1)
        for at, block in enumerate(engine.blocks_of("r")):
            for slot in range(BLOCK):
                engine.written[block, slot] = tuple(said(at * BLOCK + slot + 1))
        engine.step_with([True, False, True])
        assert (request.num_tokens, request.num_computed_tokens) == (there + 1, there)
        engine.step_with([True, True, True])
        assert (request.num_tokens, request.num_computed_tokens) == (there + 3, there + 2)
        engine.abort("r")


@pytest.mark.parametrize("end", range(BLOCK - 2 * GUESSES - 2, BLOCK + 2))
def test_a_lease_has_room_for_the_step_that_decodes_on_it(guessing: VllmConfig, end: int) -> None:
    """Nobody who holds blocks waits for one: not even when all others are taken, and guesses need room, too."""
    with engine_of(guessing) as engine:
        tokens = said(end + 1)
        engine.reserve("a" * 32, tokens[:end])
        pool = engine.scheduler.kv_cache_manager.block_pool
        taken = pool.get_new_blocks(pool.get_num_free_blocks())
        engine.agent.received["a" * 32] = end
        request = engine.add("r", tokens, max_tokens=100, lease="a" * 32, ignore_eos=True)
        for at, block in enumerate(engine.blocks_of("r")):
            for slot in range(BLOCK):
                engine.written[block, slot] = tuple(said(at * BLOCK + slot + 1))
        engine.step_with([True] * GUESSES)
        assert (request.num_computed_tokens, request.num_preemptions) == (end + 1, 0)
        pool.free_blocks(taken)
        engine.abort("r")


def assert_pool_adds_up(engine: TinyEngine) -> None:
    """A block is free, once, if no block table has it; else it is held as often as tables have it."""
    manager = engine.scheduler.kv_cache_manager
    pool, groups = manager.block_pool, manager.coordinator.single_type_managers
    tables = [blocks for group in groups for blocks in group.req_to_blocks.values()]
    held = Counter(block.block_id for blocks in tables for block in blocks if not block.is_null)
    assert {block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt and not block.is_null} == held
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert len(free) == len({*free}) == pool.get_num_free_blocks()
    assert {*free} == {block.block_id for block in pool.blocks if not block.is_null} - held.keys()


def held_by(computing: Computing, request: Request) -> dict[int, list[list[bool]]]:
    """Run a request; by how many tokens were computed: which positions of its block tables have a block, by group.

    That is after steps that computed one token: vLLM frees what the tokens before a step do not need any more.
    """
    found: dict[int, list[list[bool]]] = {}
    manager = computing.engine.scheduler.kv_cache_manager
    while not request.is_finished():
        before = request.num_computed_tokens
        computing.step()
        assert_pool_adds_up(computing.engine)
        if not request.is_finished() and request.num_computed_tokens == before + 1:
            tables = manager.get_blocks(request.request_id).blocks
            found[request.num_computed_tokens] = [[not block.is_null for block in blocks] for blocks in tables]
    return found


def move_on(pair: Pair, running: Request, steps: int, begin: int | None) -> int:
    """Let the sequence run at its source, and send what is new into a lease that grows; the next portion's begin."""
    for _ in range(steps):
        pair.source.step()
    so_far = list(running.all_token_ids)[: running.num_computed_tokens]
    target = pair.target.engine
    if begin is None:
        begin = target.reserve(A, so_far)
    else:
        found = target.extend(A, so_far)
        target.agent.do(ExtendLease(A, found.blocks, found.matched_len, len(so_far), BLOCK, packed(so_far), None))
    assert_pool_adds_up(target)
    pair.send(so_far, begin)
    target.commit(A, len(so_far))
    return len(so_far) // BLOCK * BLOCK


@settings(max_examples=settings().max_examples * 4 // 5)
@given(
    model=st.sampled_from(list(MODELS)),
    retention=st.sampled_from([0, 6 * BLOCK, None]),
    first=st.integers(1, 90),
    here=st.integers(0, 90),
    more=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    after=st.integers(1, 90),
)
def test_an_adopted_lease_frees_what_leaves_a_window_as_vllm_does(
    new_pair: NewPair, model: str, retention: int | None, first: int, here: int, more: list[int], after: int
) -> None:
    # With more tokens there is no room for what goes on: two windows, full attention, and 32 blocks.
    assume(first + sum(more) + after <= 220)
    assume(not (len(MODELS[model]) > 2 and first + sum(more) > 100))
    pair, alone, tokens = new_pair(model, retention), new_pair(model, retention).source, tokens_of(first)
    if here:
        pair.target.run(pair.target.engine.add("before", [*tokens[:here], 5], max_tokens=1))
    running = pair.source.engine.add("runs", tokens, max_tokens=250)
    begin = move_on(pair, running, 1 + first // 64, None)
    for steps in more:
        begin = move_on(pair, running, steps, begin)
    now = list(running.all_token_ids)
    pair.source.engine.abort("runs")
    adopted = pair.target.engine.add("goes on", now, max_tokens=after, lease=A)
    assert adopted.num_computed_tokens > 0, "it was adopted"
    found = held_by(pair.target, adopted)
    expected = held_by(alone, alone.engine.add("alone", now, max_tokens=after))
    assert found.keys() & expected.keys() or after <= 2
    for computed in found.keys() & expected.keys():
        for spec, mine, vllms in zip(MODELS[model], found[computed], expected[computed], strict=True):
            if isinstance(spec, MambaSpec):  # of states vLLM keeps the one before, too, until a step is over
                assert len(mine) == len(vllms)
                assert all(theirs for own, theirs in zip(mine, vllms, strict=True) if own)
            else:
                assert mine == vllms, computed
    for each in (pair.source, pair.target, alone):
        each.engine.assert_nothing_held()
        assert_pool_adds_up(each.engine)


@pytest.mark.parametrize("model", ["windows", "mixed", "windows first", "chunks"])
@pytest.mark.parametrize("ends_by", ["abort", "release"])
def test_a_grown_lease_that_is_not_adopted_is_given_back_whole(new_pair: NewPair, model: str, ends_by: str) -> None:
    pair = new_pair(model)
    running = pair.source.engine.add("runs", tokens_of(BLOCK), max_tokens=250)
    begin = move_on(pair, running, 1, None)
    for steps in (20, 30):
        begin = move_on(pair, running, steps, begin)
    now = list(running.all_token_ids)
    pair.source.engine.abort("runs")
    if ends_by == "release":
        pair.target.engine.release(A)
    else:
        pair.target.engine.add("goes on", now, max_tokens=50, lease=A)
        for _ in range(10):
            pair.target.step()
            assert_pool_adds_up(pair.target.engine)
        pair.target.engine.abort("goes on")
    for each in (pair.source, pair.target):
        each.engine.assert_nothing_held()
        assert_pool_adds_up(each.engine)
