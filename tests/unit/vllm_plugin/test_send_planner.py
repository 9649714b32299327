"""Sends on vLLM's own scheduler: what each step pushes, what stays pinned, that every pin ends; and which layers a
worker tells of, and when.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from tercet.engine.interface import KeyedPrompt
from tercet.protocol import UnknownSequence
from tercet.transport import Push, SendComplete
from tercet.vllm_plugin.core import core_methods
from tercet.vllm_plugin.core.cache_groups import NO_BLOCK
from tercet.vllm_plugin.core.connector_messages import StepMetadata
from tercet.vllm_plugin.core.scheduler_side import Sending
from tercet.vllm_plugin.worker.kv_planes import NOTE_BYTES, StepLayers

from .moving_kv import MODELS, A, NewPair
from .test_table_publisher import WINDOW, Published, PublishedAhead, publishing
from .tiny_engine import BLOCK, FULL, MAX_BATCHED, NUM_BLOCKS, TinyEngine, send_of, tokens_of


def pushed(steps: list[StepMetadata]) -> list[int]:
    return [block for step in steps for push in step.pushes for block in push.blocks]


def run_steps(engine: TinyEngine, request_id: str) -> list[StepMetadata]:
    steps: list[StepMetadata] = []
    while request_id in engine.scheduler.requests:
        steps.append(engine.step()[1])
    return steps


def test_each_step_pushes_the_blocks_that_it_completes(engine: TinyEngine) -> None:
    engine.add("r", tokens_of(100), max_tokens=1, send=send_of("s", 0, 100))
    _, first = engine.step()
    blocks = engine.blocks_of("r")
    _, second = engine.step()
    assert [opened.send_id for opened in first.opened] == ["s"]
    assert first.pushes == [Push("s", 0, tuple(blocks[:4]))]
    assert MAX_BATCHED == 4 * BLOCK
    assert (first.finish, second.opened) == ([], [])
    assert second.pushes[0].slot == 4
    assert len(second.pushes[0].blocks) == 3, "the last one, partly filled, goes with its last token"
    assert second.finish == [SendComplete("s", 0, 100)]
    engine.end_send("s")


def test_a_partial_block_goes_once_when_its_last_token_is_there(engine: TinyEngine) -> None:
    engine.add("r", tokens_of(90), max_tokens=1, send=send_of("s", 0, 70))
    steps = run_steps(engine, "r")
    assert [push.slot for step in steps for push in step.pushes] == [0, 4]
    assert len(pushed(steps)) == len(set(pushed(steps))) == 5
    engine.end_send("s")


def test_slots_are_counted_from_the_reservations_base(engine: TinyEngine) -> None:
    engine.add("r", tokens_of(60), max_tokens=1, send=send_of("s", 2 * BLOCK, 50, base=BLOCK))
    steps = run_steps(engine, "r")
    assert [push.slot for step in steps for push in step.pushes] == [1]
    assert len(pushed(steps)) == 2
    engine.end_send("s")


@pytest.mark.parametrize(("gone", "slot", "left"), [((), 0, [0, 1, 2, 3]), ((0, 1), 2, [2, 3]), ((1,), 2, [2, 3])])
def test_blocks_keep_their_slots_where_others_are_gone(
    engine: TinyEngine, gone: tuple[int, ...], slot: int, left: list[int]
) -> None:
    pool = engine.scheduler.kv_cache_manager.block_pool
    held = pool.get_new_blocks(4)
    table = [pool.null_block if at in gone else block for at, block in enumerate(held)]
    sending = Sending(send_of("s", 0, 4 * BLOCK), [0])
    assert engine.side.sends._push(sending, [table], 4) == [Push("s", slot, tuple(held[at].block_id for at in left))]
    last_gone = [*table[:3], pool.null_block]
    assert engine.side.sends._push(Sending(send_of("t", 0, 4 * BLOCK), [0]), [last_gone], 4) == []
    pool.free_blocks([*held, *sending.pins])
    engine.assert_nothing_held()


def test_what_is_cached_is_pushed_with_the_first_step(engine: TinyEngine) -> None:
    tokens = tokens_of(100)
    engine.run(engine.add("before", tokens[: 5 * BLOCK], max_tokens=1))
    engine.add("r", tokens, max_tokens=1, send=send_of("s", 0, 100))
    _, metadata = engine.step()
    assert [len(push.blocks) for push in metadata.pushes] == [7]
    assert metadata.finish == [SendComplete("s", 0, 100)]
    engine.end_send("s")


def test_pins_outlive_the_request_until_the_send_ends(engine: TinyEngine) -> None:
    engine.add("r", tokens_of(3 * BLOCK), max_tokens=1, send=send_of("s", 0, 3 * BLOCK))
    blocks = pushed(run_steps(engine, "r"))
    assert engine.free_blocks == NUM_BLOCKS - 1 - 3
    other = engine.add("other", tokens_of(400, start=300), max_tokens=2)
    while not other.is_finished():
        engine.step()
        if "other" in engine.scheduler.requests:
            assert set(blocks).isdisjoint(engine.blocks_of("other"))
    engine.end_send("s")


def test_an_abort_half_way_stops_at_what_was_planned(engine: TinyEngine) -> None:
    engine.add("r", tokens_of(200), max_tokens=1, send=send_of("s", 0, 200))
    _, metadata = engine.step()
    engine.abort("r")
    assert len(pushed([metadata])) == 4
    assert engine.free_blocks == NUM_BLOCKS - 1 - 4
    engine.end_send("s")


def test_an_end_before_the_last_step_plans_nothing_more(engine: TinyEngine) -> None:
    request = engine.add("r", tokens_of(100), max_tokens=1, send=send_of("s", 0, 100))
    engine.step()
    engine.end_send("s")
    _, metadata = engine.step()
    assert (metadata.pushes, metadata.finish) == ([], [])
    assert request.is_finished()


def test_an_end_that_overtakes_its_request_wins(engine: TinyEngine) -> None:
    with pytest.raises(UnknownSequence):
        engine.end_send("s")
    engine.add("r", tokens_of(40), max_tokens=1, send=send_of("s", 0, 40))
    steps = run_steps(engine, "r")
    assert pushed(steps) == []
    assert engine.status()["sends"] == 0


def test_two_sends_of_one_prefix_pin_a_block_twice(engine: TinyEngine) -> None:
    tokens = tokens_of(2 * BLOCK)
    for name in ("one", "two"):
        engine.add(name, [*tokens, 5], max_tokens=1, send=send_of(name, 0, 2 * BLOCK))
        run_steps(engine, name)
    engine.end_send("one")
    assert engine.free_blocks == NUM_BLOCKS - 1 - 2
    engine.end_send("two")


# ---- with no forward pass ------------------------------------------------------------------------------------------


def test_what_is_cached_in_full_needs_no_step(engine: TinyEngine) -> None:
    tokens = tokens_of(3 * BLOCK)
    engine.run(engine.add("before", [*tokens, 5], max_tokens=1))
    push = engine.push_cached(tokens, send_of("s", BLOCK, 3 * BLOCK))
    assert push is not None
    assert (push.slot, len(push.blocks)) == (1, 2)
    assert engine.free_blocks == NUM_BLOCKS - 1 - 2
    engine.end_send("s")


def test_what_is_not_all_cached_needs_a_step(engine: TinyEngine) -> None:
    tokens = tokens_of(3 * BLOCK)
    engine.run(engine.add("before", tokens[: 2 * BLOCK + 1], max_tokens=1))
    assert engine.push_cached(tokens, send_of("s", 0, 3 * BLOCK)) is None
    assert engine.free_blocks == NUM_BLOCKS - 1


def decoding(engine: TinyEngine, tokens: list[int], outputs: int) -> list[int]:
    """A request that has run until it had so many output tokens; all its tokens."""
    request = engine.add("r", tokens, max_tokens=100)
    while request.num_output_tokens < outputs:
        engine.step()
    return list(request.all_token_ids)


def test_what_a_running_request_has_computed_needs_no_step(engine: TinyEngine) -> None:
    tokens = decoding(engine, tokens_of(2 * BLOCK), outputs=5)
    blocks = engine.blocks_of("r")
    push = engine.push_cached(tokens[:-1], send_of("s", BLOCK, len(tokens) - 1))
    assert push == Push("s", 1, tuple(blocks[1:3])), "the block that it is still filling included"
    engine.abort("r")
    assert engine.free_blocks == NUM_BLOCKS - 1 - 2, "the send's pins outlive the request"
    engine.end_send("s")
    assert engine.free_blocks == NUM_BLOCKS - 1


def test_a_running_request_goes_on_in_a_block_that_is_on_its_way(engine: TinyEngine) -> None:
    tokens = decoding(engine, tokens_of(2 * BLOCK), outputs=5)
    first = engine.push_cached(tokens[:-1], send_of("one", 0, len(tokens) - 1))
    for _ in range(4):
        engine.step()
    tokens = list(engine.scheduler.requests["r"].all_token_ids)
    second = engine.push_cached(tokens[:-1], send_of("two", 2 * BLOCK, len(tokens) - 1))
    assert first is not None
    assert second is not None
    assert second.blocks[0] == first.blocks[-1]
    engine.end_send("one")
    engine.end_send("two")
    engine.abort("r")
    assert engine.free_blocks == NUM_BLOCKS - 1


def test_the_last_token_of_a_running_request_is_not_computed_yet(engine: TinyEngine) -> None:
    tokens = decoding(engine, tokens_of(2 * BLOCK), outputs=5)
    assert engine.push_cached(tokens, send_of("s", 0, len(tokens))) is None
    engine.abort("r")


def test_blocks_of_a_running_request_are_not_sent_for_other_tokens_or_another_salt(engine: TinyEngine) -> None:
    tokens = decoding(engine, tokens_of(2 * BLOCK + 3), outputs=5)
    other = [*tokens[:-2], tokens[-2] + 1]
    assert engine.push_cached(other, send_of("s", 0, len(other))) is None
    assert engine.push_cached(tokens[:-1], send_of("s", 0, len(tokens) - 1), salt="another") is None
    engine.abort("r")


def test_blocks_of_a_step_that_is_under_way_are_not_sent(engine: TinyEngine) -> None:
    tokens = decoding(engine, tokens_of(2 * BLOCK), outputs=5)
    request = engine.scheduler.requests["r"]
    request.num_in_flight_tokens = 2
    assert engine.push_cached(tokens[:-1], send_of("s", 0, len(tokens) - 1)) is None
    assert engine.push_cached(tokens[:-3], send_of("s", 0, len(tokens) - 3)) is not None
    request.num_in_flight_tokens = 0
    engine.end_send("s")
    engine.abort("r")


def test_blocks_of_a_step_that_is_under_way_are_not_sent_though_its_request_was_aborted(engine: TinyEngine) -> None:
    """vLLM enters blocks into the prefix cache when it plans their step, and leaves them there."""
    tokens = tokens_of(2 * BLOCK)
    engine.add("r", [*tokens, 3])

    def aborted(output: SchedulerOutput) -> None:
        assert engine.cached(tokens) == 2 * BLOCK
        engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
        assert engine.push_cached(tokens, send_of("s", 0, 2 * BLOCK)) is None
        output.num_scheduled_tokens.clear()

    engine.step(aborted)
    assert engine.push_cached(tokens, send_of("s", 0, 2 * BLOCK)) is not None
    engine.end_send("s")
    engine.assert_nothing_held()


def test_a_request_in_its_first_step_sends_nothing(engine: TinyEngine) -> None:
    tokens = tokens_of(MAX_BATCHED + 10)
    request = engine.add("r", tokens, max_tokens=5)
    engine.step()
    assert request.num_computed_tokens == MAX_BATCHED
    assert engine.push_cached(tokens[: MAX_BATCHED - 1], send_of("s", 0, MAX_BATCHED - 1)) is None
    engine.abort("r")


# Sends of cached KV while steps are in flight: nothing that a step still computes is sent, and the rest is.

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
    model=st.sampled_from(list(MODELS)), cached=st.integers(1, 150), more=st.integers(0, 60), begin=st.integers(0, 40)
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


LARGE = NOTE_BYTES


def test_a_step_that_runs_layer_by_layer_tells_each_when_it_is_done() -> None:
    step = StepLayers(3)
    step.begin(LARGE)
    assert [step.saved((layer,)) for layer in range(3)] == [(0,), (1,), (2,)]
    assert step.ended() == ()


def test_little_kv_goes_together_at_the_end() -> None:
    step = StepLayers(3)
    step.begin(NOTE_BYTES // 2)
    assert [step.saved((layer,)) for layer in range(3)] == [(), (0, 1), ()]
    assert step.ended() == (2,)


def test_what_a_full_graph_computed_is_told_when_its_step_ends() -> None:
    step = StepLayers(3)
    step.begin(LARGE)
    assert step.ended() == (0, 1, 2)


def test_a_step_that_pushes_nothing_tells_nothing() -> None:
    step = StepLayers(3)
    step.begin(0)
    assert step.saved((0,)) == ()
    assert step.ended() == ()


def test_after_a_step_nothing_of_it_is_left() -> None:
    step = StepLayers(2)
    step.begin(LARGE)
    step.saved((0,))
    assert step.ended() == (1,)
    assert step.ended() == ()
    step.begin(LARGE)
    assert step.ended() == (0, 1)


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.sampled_from((0, 1, LARGE // 3, LARGE)), st.lists(st.integers(0, 11), max_size=20))),
)
def test_each_plane_is_told_once_in_every_step_that_pushes(planes: int, steps: list[tuple[int, list[int]]]) -> None:
    """Whatever hooks run, in whatever order, also twice, or not at all (a full graph)."""
    step = StepLayers(planes)
    for plane_bytes, hooks in steps:
        step.begin(plane_bytes)
        told = [step.saved((plane,)) for plane in hooks if plane < planes]
        told.append(step.ended())
        found = [plane for some in told for plane in some]
        assert sorted(found) == (list(range(planes)) if plane_bytes else [])


@pytest.mark.parametrize("twice", [True, False])
def test_a_plane_is_never_told_before_its_hook_while_the_step_runs(twice: bool) -> None:
    step = StepLayers(3)
    step.begin(LARGE)
    assert step.saved((1,)) == (1,)
    assert step.saved((1,) if twice else (2,)) == (() if twice else (2,))
