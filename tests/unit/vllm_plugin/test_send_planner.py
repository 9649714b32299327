"""Sends on vLLM's own scheduler: what each step pushes, what stays pinned, and that every pin ends."""

from __future__ import annotations

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from tercet.protocol import UnknownSequence
from tercet.transport import Push, SendComplete
from tercet.vllm_plugin.core.connector_messages import StepMetadata
from tercet.vllm_plugin.core.scheduler_side import Sending

from .tiny_engine import BLOCK, MAX_BATCHED, NUM_BLOCKS, TinyEngine, send_of, tokens_of


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
