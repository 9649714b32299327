"""Speculative decoding on vLLM's own scheduler: what was guessed is nobody's KV until the model has said the same."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from tercet.engine.block_tables import open_table
from tercet.transport import KVRegion

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
