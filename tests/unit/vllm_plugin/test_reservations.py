"""Leases on vLLM's own block pool: reserved, filled, adopted, always given back; and one order of arrival for
reservations and vLLM's own requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig

from tercet.engine.interface import KeyedPrompt
from tercet.protocol import BadRequest, Conflict, EngineError, NoSpace, UnknownSequence, packed
from tercet.vllm_plugin.core import core_methods

from .tiny_engine import BLOCK, NEXT_TOKEN, NUM_BLOCKS, TinyEngine, send_of, tokens_of

A, B = "a" * 32, "b" * 32


# ---- reserve -------------------------------------------------------------------------------------------------------


def test_a_reservation_opens_its_blocks_for_writing(engine: TinyEngine) -> None:
    assert engine.reserve(A, tokens_of(3 * BLOCK)) == 0
    grant = engine.agent.granted[A]
    assert (grant.begin, grant.end, grant.block_size, len(grant.blocks[0])) == (0, 3 * BLOCK, BLOCK, 3)
    assert engine.status()["leases"] == 1
    assert engine.free_blocks == NUM_BLOCKS - 1 - 4, "one more than is received, so that decoding can begin"
    engine.release(A)


def test_a_partial_last_block_is_open_too(engine: TinyEngine) -> None:
    engine.reserve(A, tokens_of(2 * BLOCK + 5))
    assert len(engine.agent.granted[A].blocks[0]) == 3
    assert engine.free_blocks == NUM_BLOCKS - 1 - 3
    engine.release(A)


def test_what_is_cached_is_matched_and_not_open(engine: TinyEngine) -> None:
    tokens = tokens_of(4 * BLOCK)
    engine.run(engine.add("before", tokens[: 2 * BLOCK + 3]))
    assert engine.reserve(A, tokens) == 2 * BLOCK
    grant = engine.agent.granted[A]
    assert (grant.begin, len(grant.blocks[0])) == (2 * BLOCK, 2)
    engine.release(A)


def test_what_is_cached_in_full_needs_no_writing(engine: TinyEngine) -> None:
    tokens = tokens_of(2 * BLOCK)
    engine.run(engine.add("before", [*tokens, 5]))
    assert engine.reserve(A, tokens) == 2 * BLOCK
    assert engine.agent.granted[A].blocks[0] == []
    assert engine.release(A) == 2 * BLOCK


def test_a_salt_keeps_caches_apart(engine: TinyEngine) -> None:
    tokens = tokens_of(2 * BLOCK)
    engine.run(engine.add("before", [*tokens, 5], salt="mine"))
    assert engine.reserve(A, tokens) == 0
    assert engine.reserve(B, tokens, salt="mine") == 2 * BLOCK
    engine.release(A)
    engine.release(B)


def test_a_lease_exists_once(engine: TinyEngine) -> None:
    engine.reserve(A, tokens_of(5))
    with pytest.raises(Conflict):
        engine.reserve(A, tokens_of(5))
    engine.release(A)


def test_pinned_blocks_are_not_given_to_others(engine: TinyEngine) -> None:
    engine.reserve(A, tokens_of(6 * BLOCK))
    pinned = set(engine.agent.granted[A].blocks[0])
    request = engine.add("other", tokens_of(200, start=400), max_tokens=50)
    while not request.is_finished():
        engine.step()
        if request.request_id in engine.scheduler.requests:
            assert pinned.isdisjoint(engine.blocks_of("other"))
    engine.release(A)


def test_leases_pin_no_more_than_their_share_together(config: VllmConfig) -> None:
    engine = TinyEngine(config, {"max_lease_share": 0.25})  # 8 of 33 blocks
    engine.reserve(A, tokens_of(4 * BLOCK - 1))
    with pytest.raises(NoSpace, match=r"max_lease_share \(8 blocks\)"):
        engine.reserve(B, tokens_of(5 * BLOCK - 1, start=500))
    engine.reserve(B, tokens_of(4 * BLOCK - 1, start=500))
    engine.release(A)
    engine.release(B)
    engine.assert_nothing_held()


def test_no_space_takes_nothing(engine: TinyEngine) -> None:
    request = engine.add("large", tokens_of(300), max_tokens=20)
    while request.num_computed_tokens < 300:
        engine.step()
    free = engine.free_blocks
    with pytest.raises(NoSpace, match="are free"):
        engine.reserve(A, tokens_of(20 * BLOCK, start=500))
    assert engine.free_blocks == free
    engine.run(request)


def test_prompts_under_way_keep_the_blocks_that_they_will_need(engine: TinyEngine) -> None:
    """A reservation that took them would leave both waiting for ever."""
    request = engine.add("large", tokens_of(20 * BLOCK), max_tokens=2)
    engine.step()  # a chunk of four blocks; sixteen are still to come
    with pytest.raises(NoSpace, match="promised"):
        engine.reserve(A, tokens_of(20 * BLOCK, start=500))
    engine.run(request)


# ---- extend --------------------------------------------------------------------------------------------------------


@settings(max_examples=settings().max_examples * 3 // 10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 15 * BLOCK), min_size=1, max_size=5), st.integers(0, 3))
def test_extended_step_by_step_a_lease_is_as_one_reservation(engine: TinyEngine, ends: list[int], cached: int) -> None:
    steps, salt = sorted(set(ends)), f"{ends} {cached}"
    tokens = tokens_of(steps[-1])
    if cached:
        engine.run(engine.add("before", [*tokens_of(cached * BLOCK), 5], max_tokens=1, salt=salt))
    free = engine.free_blocks
    matched = engine.reserve(A, tokens[: steps[0]], salt)
    found, before = engine.agent.granted[A].blocks[0], list[int]()
    for end in steps[1:]:
        before = list(found)
        extended = engine.extend(A, tokens[:end], salt)
        found = extended.blocks[0]
        assert (extended.matched_len, found[: len(before)]) == (matched, before), "no block is given back or moved"
    assert len(set(found)) == len(found) == -(-(steps[-1] - matched) // BLOCK)
    assert free - engine.free_blocks == -(-(steps[-1] + 1) // BLOCK)
    engine.commit(A, steps[-1], tokens)
    assert engine.cached(tokens, salt) == steps[-1] // BLOCK * BLOCK
    engine.agent.received[A] = steps[-1]
    assert engine.release(A) == steps[-1]
    engine.agent.ended.clear()
    engine.agent.received.clear()
    engine.assert_nothing_held()


def test_a_lease_that_cannot_be_extended_is_as_it_was(config: VllmConfig) -> None:
    engine = TinyEngine(config, {"max_lease_share": 0.25})  # 8 of 33 blocks
    tokens = tokens_of(12 * BLOCK)
    engine.reserve(A, tokens[:40])
    free, grant = engine.free_blocks, engine.agent.granted[A]
    with pytest.raises(NoSpace, match="max_lease_share"):
        engine.extend(A, tokens)
    others = [[*tokens[:39], 1, 2], tokens[:30]]
    for wrong in others:
        with pytest.raises(BadRequest, match="begin with"):
            engine.extend(A, wrong)
    with pytest.raises(BadRequest, match="begin with"):
        engine.extend(A, tokens[:60], "salt")
    with pytest.raises(UnknownSequence):
        engine.extend(B, tokens[:60])
    assert (engine.free_blocks, engine.agent.granted[A]) == (free, grant)
    assert engine.extend(A, tokens[:41]).blocks[0] == grant.blocks[0]
    assert engine.extend(A, tokens[:100]).blocks[0][:3] == grant.blocks[0]
    engine.release(A)
    engine.assert_nothing_held()


def test_an_extended_lease_is_adopted_as_any(engine: TinyEngine) -> None:
    tokens = tokens_of(4 * BLOCK + 5)
    engine.reserve(A, tokens[: BLOCK + 3])
    engine.extend(A, tokens)
    engine.agent.received[A] = 4 * BLOCK
    request = engine.add("r", tokens, lease=A, valid_end=4 * BLOCK)
    output, _ = engine.step()
    assert output.num_scheduled_tokens == {"r": 5}
    engine.run(request)
    engine.agent.granted.clear()
    engine.assert_nothing_held()


# ---- commit and release --------------------------------------------------------------------------------------------


def test_kv_of_other_tokens_is_never_found_under_the_leases_hashes(engine: TinyEngine) -> None:
    tokens = tokens_of(3 * BLOCK)
    engine.reserve(A, tokens, salt="mine")
    grant = engine.agent.granted[A]
    assert (grant.tokens, grant.salt) == (packed(tokens), "mine")
    with pytest.raises(EngineError, match="KV of other tokens"):
        engine.commit(A, 2 * BLOCK, tokens_of(3 * BLOCK, start=11))
    assert engine.cached(tokens, salt="mine") == 0
    engine.commit(A, 2 * BLOCK)
    assert engine.cached(tokens, salt="mine") == 2 * BLOCK
    engine.agent.received[A] = 2 * BLOCK
    engine.release(A)
    engine.assert_nothing_held()


def test_received_kv_is_found_by_others_while_the_lease_is_open(engine: TinyEngine) -> None:
    tokens = tokens_of(3 * BLOCK)
    engine.reserve(A, tokens)
    assert engine.cached(tokens) == 0, "nothing has arrived"
    engine.commit(A, 2 * BLOCK + 3)
    assert engine.cached(tokens) == 2 * BLOCK
    engine.agent.received[A] = 2 * BLOCK + 3
    engine.release(A)


def test_release_keeps_what_arrived_as_prefix_cache(engine: TinyEngine) -> None:
    tokens = tokens_of(3 * BLOCK)
    engine.reserve(A, tokens)
    engine.agent.received[A] = BLOCK
    assert engine.release(A) == BLOCK
    assert engine.cached(tokens) == BLOCK


@pytest.mark.parametrize("lease", [A, ""])
def test_what_is_not_held_cannot_be_released(engine: TinyEngine, lease: str) -> None:
    with pytest.raises(UnknownSequence, match="not held here"):
        engine.release(lease)


def test_a_lease_ends_once(engine: TinyEngine) -> None:
    engine.reserve(A, tokens_of(5))
    engine.release(A)
    with pytest.raises(UnknownSequence):
        engine.release(A)
    engine.commit(A, 5)  # a report that came late is nobody's


# ---- adoption ------------------------------------------------------------------------------------------------------


def fill(engine: TinyEngine, lease: str, tokens: list[int], valid_end: int | None = None) -> list[int]:
    """A reservation for ``tokens`` into which a peer has written; the blocks that it wrote to."""
    engine.reserve(lease, tokens)
    engine.agent.received[lease] = len(tokens) if valid_end is None else valid_end
    return list(engine.agent.granted[lease].blocks[0])


@pytest.mark.parametrize("received", [2 * BLOCK, 2 * BLOCK + 5, 3 * BLOCK - 1])
def test_a_request_decodes_in_the_reserved_blocks(engine: TinyEngine, received: int) -> None:
    tokens = tokens_of(received + 1)
    blocks = fill(engine, A, tokens[:received])
    request = engine.add("here", tokens, lease=A)
    assert engine.blocks_of("here")[: len(blocks)] == blocks
    output, _ = engine.step()
    assert output.num_scheduled_tokens == {"here": 1}, "only the last token of the prompt is computed here"
    assert engine.run(request) == [NEXT_TOKEN] * 3


def test_what_has_not_arrived_is_computed(engine: TinyEngine) -> None:
    tokens = tokens_of(3 * BLOCK)
    fill(engine, A, tokens[:-1], valid_end=BLOCK + 4)
    engine.add("here", tokens, lease=A)
    output, _ = engine.step()
    assert output.num_scheduled_tokens == {"here": 3 * BLOCK - (BLOCK + 4)}
    engine.abort("here")


def test_a_partial_block_that_others_share_is_computed_anew(engine: TinyEngine) -> None:
    """All tokens are there, so the last one is computed again: not into a block that the prefix cache has."""
    tokens = tokens_of(2 * BLOCK)
    fill(engine, A, tokens)
    engine.commit(A, 2 * BLOCK)
    request = engine.add("here", tokens, lease=A)
    output, _ = engine.step()
    assert output.num_scheduled_tokens == {"here": BLOCK}, "vLLM's own rule for a prompt that is cached in full"
    assert engine.run(request) == [NEXT_TOKEN] * 3


def test_usage_tells_what_was_cached_from_what_was_received(engine: TinyEngine) -> None:
    tokens = tokens_of(4 * BLOCK)
    engine.run(engine.add("before", [*tokens[:BLOCK], 5]))
    fill(engine, A, tokens[: 3 * BLOCK])
    request = engine.add("here", tokens, lease=A)
    stats = request.prefill_stats
    assert stats is not None
    assert (stats.num_local_cached_tokens, stats.num_external_cached_tokens) == (BLOCK, 2 * BLOCK)
    engine.run(request)


def test_an_adopted_lease_is_over(engine: TinyEngine) -> None:
    tokens = tokens_of(40)
    fill(engine, A, tokens[:32])
    request = engine.add("here", tokens, lease=A)
    assert A not in engine.agent.granted, "no byte is written under it any more"
    with pytest.raises(UnknownSequence):
        engine.release(A)
    engine.run(request)


def test_other_tokens_than_were_reserved_are_computed(engine: TinyEngine) -> None:
    fill(engine, A, tokens_of(32))
    engine.add("here", tokens_of(40, start=500), lease=A)
    output, _ = engine.step()
    assert output.num_scheduled_tokens == {"here": 40}
    engine.abort("here")


def test_prompt_logprobs_need_every_position_computed_here(engine: TinyEngine) -> None:
    tokens = tokens_of(40)
    fill(engine, A, tokens[:32])
    request = engine.add("here", tokens, lease=A, prompt_logprobs=1)
    output, _ = engine.step()
    assert output.num_scheduled_tokens == {"here": 40}
    engine.abort(request.request_id)


def test_a_lease_that_ended_meanwhile_is_no_error(engine: TinyEngine) -> None:
    request = engine.add("here", tokens_of(40), lease=A)
    assert engine.run(request) == [NEXT_TOKEN] * 3


def test_what_holds_blocks_goes_first(engine: TinyEngine) -> None:
    """Behind a request that waits for blocks, one that holds them would wait for ever."""
    tokens = tokens_of(20 * BLOCK)
    fill(engine, A, tokens[:-1])
    engine.add("waits", tokens_of(300, start=400), max_tokens=1)
    engine.add("holds", tokens, lease=A, max_tokens=1)
    output, _ = engine.step()
    assert "holds" in output.num_scheduled_tokens
    for request_id in ("holds", "waits"):
        request = engine.scheduler.requests.get(request_id)
        if request is not None:
            engine.run(request)


def test_an_abort_gives_adopted_blocks_back(engine: TinyEngine) -> None:
    tokens = tokens_of(100)
    fill(engine, A, tokens[:90])
    engine.add("here", tokens, lease=A, max_tokens=50)
    engine.step()
    engine.abort("here")


def test_only_the_engines_own_edge_may_name_a_lease(engine: TinyEngine) -> None:
    """vLLM lets any client set kv_transfer_params."""
    fill(engine, A, tokens_of(32))
    request = engine.add("stranger", tokens_of(40), lease=A, token="another")
    assert engine.status()["leases"] == 1
    engine.run(request)
    engine.release(A)


# vLLM's reset of the prefix cache while blocks are held for others: it is refused, and nothing is lost.

LEASE = "a" * 32


def test_a_reset_is_refused_while_a_lease_is_open(engine: TinyEngine) -> None:
    before = tokens_of(2 * BLOCK + 1, start=500)
    engine.run(engine.add("before", before, max_tokens=1))
    tokens = tokens_of(2 * BLOCK)
    engine.reserve(LEASE, tokens)
    assert engine.scheduler.reset_prefix_cache() is False
    assert engine.cached(before) == 2 * BLOCK
    assert engine.status()["leases"] == 1
    engine.agent.received[LEASE] = 2 * BLOCK  # what arrives afterwards is taken as ever
    engine.commit(LEASE, 2 * BLOCK)
    assert engine.release(LEASE) == 2 * BLOCK
    assert engine.cached(tokens) == 2 * BLOCK
    assert engine.scheduler.reset_prefix_cache() is True
    assert engine.cached(tokens) == engine.cached(before) == 0


def test_a_reset_is_refused_while_a_send_is_under_way(engine: TinyEngine) -> None:
    tokens = tokens_of(2 * BLOCK)
    engine.run(engine.add("before", [*tokens, 1], max_tokens=1))
    assert engine.push_cached(tokens, send_of("s", 0, 2 * BLOCK))
    assert engine.scheduler.reset_prefix_cache() is False
    assert engine.cached(tokens) == 2 * BLOCK
    engine.end_send("s")
    assert engine.scheduler.reset_prefix_cache() is True
    assert engine.cached(tokens) == 0


def test_a_reset_that_preempts_requests_says_that_leases_are_in_the_way(engine: TinyEngine) -> None:
    engine.reserve(LEASE, tokens_of(BLOCK))
    request = engine.add("r", tokens_of(20, start=700), max_tokens=3)
    engine.step()
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert engine.status()["leases"] == 1
    engine.release(LEASE)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True) is True
    assert len(engine.run(request)) == 3


def test_a_reset_with_the_connector_is_refused_as_well(engine: TinyEngine) -> None:
    engine.reserve(LEASE, tokens_of(BLOCK))
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is False
    engine.release(LEASE)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is True


MOST_STEPS = 5000


class Waits:
    """A reservation that has been asked for."""

    def __init__(self, engine: TinyEngine, lease: str, tokens: list[int]) -> None:
        self.engine, self.lease, self.tokens = engine, lease, tokens
        self.answer = core_methods.reserve(engine.core, lease, KeyedPrompt(tokens))

    @property
    def ready(self) -> bool:
        return self.answer.done()

    def open(self) -> None:
        self.engine.granted(self.lease, self.tokens, self.answer)

    def release(self) -> None:
        self.open()
        self.engine.release(self.lease)

    def refused(self) -> str:
        with pytest.raises(NoSpace) as caught:
            self.open()
        return caught.value.message


def steps(engine: TinyEngine) -> Iterator[int]:
    for number in range(MOST_STEPS):
        engine.step()
        yield number
    raise AssertionError("it does not end")


def run_until(engine: TinyEngine, done: Any) -> None:
    for _ in steps(engine):
        if done():
            return


def test_a_reservation_gets_its_blocks_when_a_request_has_ended(engine: TinyEngine) -> None:
    request = engine.add("large", tokens_of(20 * BLOCK), max_tokens=4)
    engine.step()
    later = Waits(engine, "a" * 32, tokens_of(20 * BLOCK, start=500))
    assert not later.ready
    run_until(engine, lambda: later.ready)
    assert request.is_finished()
    later.release()


def test_a_reservation_does_not_overtake_a_request_that_waits_for_blocks(engine: TinyEngine) -> None:
    first = engine.add("first", tokens_of(20 * BLOCK), max_tokens=8)
    run_until(engine, lambda: first.num_computed_tokens >= 20 * BLOCK)
    waits = engine.add("waits", tokens_of(20 * BLOCK, start=400), max_tokens=8)
    engine.step()
    assert not waits.num_computed_tokens
    small = Waits(engine, "a" * 32, tokens_of(5 * BLOCK, start=800))
    assert not small.ready, "eleven blocks are free, and somebody who came before needs them"
    run_until(engine, lambda: small.ready)
    assert waits.num_computed_tokens
    small.release()
    engine.run(waits)


def test_a_request_does_not_overtake_a_reservation_that_waits(engine: TinyEngine) -> None:
    first = engine.add("first", tokens_of(20 * BLOCK), max_tokens=8)
    run_until(engine, lambda: first.num_computed_tokens >= 20 * BLOCK)
    reservation = Waits(engine, "a" * 32, tokens_of(20 * BLOCK, start=400))
    after = engine.add("after", tokens_of(8 * BLOCK, start=800), max_tokens=60)
    for _ in steps(engine):
        assert reservation.ready or not after.num_computed_tokens
        if reservation.ready:
            break
    run_until(engine, lambda: after.num_computed_tokens)
    reservation.release()
    engine.run(after)


def test_a_reservation_that_waits_for_leases_holds_nobody_back(engine: TinyEngine) -> None:
    engine.reserve("a" * 32, tokens_of(24 * BLOCK - 1))
    reservation = Waits(engine, "b" * 32, tokens_of(6 * BLOCK, start=500))
    engine.run(engine.add("after", tokens_of(4 * BLOCK, start=800)))
    assert not reservation.ready
    engine.release("a" * 32)
    assert reservation.ready, "with no step"
    reservation.release()


def test_who_gives_up_is_told_why_and_lets_the_next_one_in(engine: TinyEngine) -> None:
    engine.reserve("a" * 32, tokens_of(20 * BLOCK - 1))
    large, small = (
        Waits(engine, name * 32, tokens_of(blocks * BLOCK - 1, start=500)) for name, blocks in (("b", 10), ("c", 2))
    )
    assert not small.ready, "in the order of arrival"
    core_methods.give_up(engine.core, large.lease)
    assert "max_lease_share" in large.refused()
    small.release()
    engine.release("a" * 32)


def test_a_release_ends_the_wait(engine: TinyEngine) -> None:
    engine.reserve("a" * 32, tokens_of(20 * BLOCK - 1))
    waits = Waits(engine, "b" * 32, tokens_of(10 * BLOCK, start=500))
    with pytest.raises(UnknownSequence):
        core_methods.release(engine.core, waits.lease, 0)
    assert waits.refused()
    engine.release("a" * 32)


def test_what_never_fits_is_refused_at_once(engine: TinyEngine) -> None:
    with pytest.raises(NoSpace, match="exceed max_lease_share"):
        engine.reserve("a" * 32, tokens_of(30 * BLOCK))


def test_of_fifty_requests_in_a_tiny_pool_none_starves(engine: TinyEngine) -> None:
    """Every other one stands on a reservation. All come at once, and need eight times the blocks that there are."""
    begun: list[int] = []
    alone = {}
    reserved: dict[int, Waits] = {}
    for number in range(50):
        tokens = tokens_of((2 + number * 7 % 9) * BLOCK, start=300 + number)
        if number % 2:
            reserved[number] = Waits(engine, f"{number:032x}", tokens)
        else:
            alone[number] = engine.add(str(number), tokens, max_tokens=1 + number % 20)
    running: dict[int, Any] = {}
    finished: set[int] = set()
    for _ in steps(engine):
        for number, waits in list(reserved.items()):
            if waits.ready:
                # A peer fills it meanwhile; then the sequence decodes on it.
                del reserved[number]
                waits.open()
                engine.agent.received[waits.lease] = len(waits.tokens)
                begun.append(number)
                running[number] = engine.add(str(number), [*waits.tokens, 3], max_tokens=5, lease=waits.lease)
        finished |= {number for number, request in {**alone, **running}.items() if request.is_finished()}
        if len(finished) == 50:
            break
    assert len(begun) == 25
    assert begun == sorted(begun), "in the order of arrival"


def both_halves_leased(engine: TinyEngine, blocks: int) -> list[Any]:
    """Two requests for prompts of ``blocks``, of which a lease each holds the first half, filled."""
    leased = list[tuple[Waits, list[int]]]()
    for number in range(2):
        tokens = tokens_of(blocks * BLOCK, start=500 * (number + 1))
        waits = Waits(engine, f"{number:032x}", tokens[: blocks // 2 * BLOCK])
        waits.open()
        engine.agent.received[waits.lease] = blocks // 2 * BLOCK
        leased.append((waits, tokens))
    return [engine.add(waits.lease, tokens, max_tokens=2, lease=waits.lease) for waits, tokens in leased]


def test_of_requests_that_wait_on_blocks_of_their_own_the_last_one_gives_way(engine: TinyEngine) -> None:
    """Each lease is for a part of a prompt, and the rest of none of them fits while the others hold theirs."""
    first, second = both_halves_leased(engine, 24)
    run_until(engine, first.is_finished)
    assert not second.is_finished()
    run_until(engine, second.is_finished)


def test_nobody_gives_way_while_somebody_runs(engine: TinyEngine) -> None:
    runs = engine.add("runs", tokens_of(2 * BLOCK), max_tokens=40)
    engine.step()
    requests = both_halves_leased(engine, 22)
    for _ in steps(engine):
        if runs.is_finished():
            break
        assert all(request.num_computed_tokens for request in requests), "each holds its blocks"
    for request in requests:
        run_until(engine, request.is_finished)
