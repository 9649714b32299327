"""Sends of cached KV while steps are in flight: nothing that a step still computes is sent, and the rest is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs
from vllm.config import VllmConfig
from vllm.v1.request import RequestStatus

from tercet.engine.interface import KeyedPrompt
from tercet.transport import Push
from tercet.vllm_plugin.core import core_methods
from tercet.vllm_plugin.core.cache_groups import NO_BLOCK

from .moving_kv import MODELS, A, NewPair
from .test_table_publisher import WINDOW, Published, PublishedAhead, publishing
from .tiny_engine import BLOCK, FULL, MAX_BATCHED, NUM_BLOCKS, TinyEngine, send_of, tokens_of

# Three prompts that share beginnings: of four blocks, and of one.
SHARED = tokens_of(12 * BLOCK)
PROMPTS = SHARED, [*SHARED[: 4 * BLOCK], *tokens_of(8 * BLOCK, 300)], [*SHARED[:BLOCK], *tokens_of(3 * BLOCK, 500)]


@pytest.fixture
def ahead(config: VllmConfig) -> Iterator[Published]:
    """An engine that plans a step while another one is in flight."""
    with publishing(config, PublishedAhead) as found:
        yield found


def compute(published: Published, number: int, tokens: list[int]) -> None:
    published.add(number, tokens, max_tokens=1)
    while str(number) in published.engine.scheduler.requests:
        published.step()
    published.idle()


def require_computed(published: Published, tokens: list[int], pushes: list[Push], until: int) -> None:
    """Whole blocks that are pushed hold the KV of these tokens: every step that writes there has ended."""
    for push in pushes:
        for slot, block in enumerate(push.blocks, push.slot):
            for at in range(slot * BLOCK, min((slot + 1) * BLOCK, until)):
                assert published.written.get((block, at % BLOCK)) == hash(tuple(tokens[: at + 1])), at


def longest(published: Published, tokens: list[int], begin: int = 0) -> int:
    """How far a send of cached KV comes; all of it has been computed."""
    found = published.engine.push_longest(tokens, send_of("s", begin, len(tokens)))
    require_computed(published, tokens, found.pushes, found.end)
    if found.end > begin:
        assert [len(push.blocks) for push in found.pushes] == [found.end // BLOCK - begin // BLOCK]
        published.engine.end_send("s")
    return found.end


def test_a_busy_engine_sends_what_no_step_in_flight_computes(ahead: Published) -> None:
    compute(ahead, 1, SHARED[: 4 * BLOCK])
    ahead.add(2, tokens_of(40, 700), max_tokens=20)
    for _ in range(3):
        ahead.step()
        push = ahead.engine.push_cached(SHARED[: 4 * BLOCK], send_of("whole", 0, 4 * BLOCK))
        assert push is not None
        ahead.engine.end_send("whole")
        assert longest(ahead, SHARED) == 4 * BLOCK
    assert longest(ahead, SHARED, begin=2 * BLOCK + 3) == 4 * BLOCK
    assert longest(ahead, SHARED, begin=4 * BLOCK) == 4 * BLOCK
    assert longest(ahead, SHARED[: 3 * BLOCK + 5]) == 3 * BLOCK


def test_blocks_that_a_step_in_flight_fills_are_left_out_until_it_ends(ahead: Published) -> None:
    compute(ahead, 1, SHARED[: 2 * BLOCK])
    ahead.add(2, SHARED[: 5 * BLOCK], max_tokens=20)
    ahead.step()
    assert ahead.engine.cached(SHARED[: 5 * BLOCK]) == 5 * BLOCK, "vLLM enters them when it plans the step"
    assert longest(ahead, SHARED[: 5 * BLOCK]) == 2 * BLOCK
    assert ahead.engine.push_cached(SHARED[: 5 * BLOCK], send_of("s", 0, 5 * BLOCK)) is None
    ahead.step()
    assert longest(ahead, SHARED[: 5 * BLOCK]) == 5 * BLOCK


def test_nothing_cached_is_no_send(engine: TinyEngine) -> None:
    for tokens in (tokens_of(5), tokens_of(3 * BLOCK)):
        found = engine.push_longest(tokens, send_of("s", 0, len(tokens)))
        assert (found.end, found.pushes) == (0, [])
    engine.assert_nothing_held()


def test_pins_of_a_send_outlive_what_is_evicted_meanwhile(ahead: Published) -> None:
    compute(ahead, 1, SHARED[: 3 * BLOCK])
    found = ahead.engine.push_longest(SHARED, send_of("s", 0, len(SHARED)))
    for number in range(2, 8):
        compute(ahead, number, tokens_of(100 + number, 100 * number))
    require_computed(ahead, SHARED, found.pushes, found.end)
    ahead.engine.end_send("s")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 2), st.integers(5, 12 * BLOCK)),
        st.tuples(st.just("step"), st.integers(0, 2), st.integers(1, 5)),
        st.tuples(st.just("abort"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("send"), st.integers(0, 2), st.integers(1, 12 * BLOCK)),
    ),
    max_size=25,
)


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW)], ids=["full", "windows"])
@given(steps=STEPS)
def test_whatever_is_in_flight_what_is_sent_is_computed(
    config: VllmConfig, specs: tuple[object, ...], steps: list[tuple[str, int, int]]
) -> None:
    with publishing(config, PublishedAhead, specs) as published:  # pyright: ignore[reportArgumentType]
        number, engine = 0, published.engine
        for what, which, count in steps:
            tokens = PROMPTS[which][:count]
            if what == "add":
                number += 1
                published.add(number, list(tokens), max_tokens=3)
            elif what == "step":
                for _ in range(count):
                    published.step()
                    for each in PROMPTS:
                        pinned = engine.push_longest(each, send_of("s", 0, len(each)))
                        require_computed(published, each, pinned.pushes, pinned.end)
                        if pinned.pushes:
                            engine.end_send("s")
            elif what == "abort":
                for each in list(engine.scheduler.requests)[:1]:
                    engine.scheduler.finish_requests(each, RequestStatus.FINISHED_ABORTED)
            else:
                pinned = engine.push_longest(tokens, send_of("longest", 0, len(tokens)))
                require_computed(published, tokens, pinned.pushes, pinned.end)
                whole = core_methods.push_cached(engine.core, KeyedPrompt(tokens), send_of("whole", 0, len(tokens)))
                assert whole is None or pinned.end == len(tokens) // BLOCK * BLOCK or len(specs) > 1
                require_computed(published, tokens, whole or [], len(tokens))
                for send_id, sent in (("longest", pinned.pushes), ("whole", whole)):
                    if sent:
                        engine.end_send(send_id)
        published.idle()


@settings(max_examples=settings().max_examples * 3 // 5)
@given(
    model=st.sampled_from(list(MODELS)),
    cached=st.integers(1, 150),
    more=st.integers(0, 60),
    begin=st.integers(0, 40),
)
def test_the_receiver_resumes_where_the_cached_part_ends(
    new_pair: NewPair, model: str, cached: int, more: int, begin: int
) -> None:
    pair, tokens = new_pair(model), tokens_of(cached + more)
    assume(begin < len(tokens))
    source, target = pair.source, pair.target
    source.run(source.engine.add("before", tokens[:cached], max_tokens=1))
    if begin:
        target.run(target.engine.add("before", tokens[:begin], max_tokens=1))
    matched = target.engine.reserve(A, tokens)
    grant = target.engine.agent.granted[A]
    begins = tuple(
        grant.begin + BLOCK * sum(block == NO_BLOCK for block in blocks) for blocks in grant.blocks
    )  # fmt: skip
    assume(matched < len(tokens))
    params = structs.replace(send_of("s", matched, len(tokens), base=grant.begin), group_begins=begins)
    found = source.engine.push_longest(tokens, params)
    assert found.end <= cached // BLOCK * BLOCK or found.end == matched
    pair.carry(found.pushes)
    if found.end > matched:
        source.engine.end_send("s")
        target.engine.agent.received[A] = found.end
    request = target.engine.add("goes on", [*tokens, 3], max_tokens=1, lease=A)
    computed = 0
    while not request.is_finished():
        output, _ = target.engine.step(target.compute)
        computed += output.total_num_scheduled_tokens
    assert computed == len(tokens) + 1 - found.end, "what was sent is not computed again"
    for engine in (source.engine, target.engine):
        engine.assert_nothing_held()
    assert NUM_BLOCKS > MAX_BATCHED // BLOCK
