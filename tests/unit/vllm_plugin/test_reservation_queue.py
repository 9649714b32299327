"""One order of arrival for reservations and vLLM's own requests, on vLLM's scheduler and a pool of 32 blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tercet.engine.interface import KeyedPrompt
from tercet.protocol import NoSpace, UnknownSequence
from tercet.vllm_plugin.core import core_methods

from .tiny_engine import BLOCK, TinyEngine, tokens_of

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


def test_of_requests_that_wait_on_blocks_of_their_own_the_last_one_gives_way(engine: TinyEngine) -> None:
    """Each lease is for a part of a prompt, and the rest of none of them fits while the others hold theirs."""
    requests = list[Any]()
    for number in range(2):
        tokens = tokens_of(24 * BLOCK, start=500 * (number + 1))
        waits = Waits(engine, f"{number:032x}", tokens[: 12 * BLOCK])
        waits.open()
        engine.agent.received[waits.lease] = 12 * BLOCK
        requests.append((waits, tokens))
    first, second = (engine.add(waits.lease, tokens, max_tokens=2, lease=waits.lease) for waits, tokens in requests)
    run_until(engine, first.is_finished)
    assert not second.is_finished()
    run_until(engine, second.is_finished)


def test_nobody_gives_way_while_somebody_runs(engine: TinyEngine) -> None:
    runs = engine.add("runs", tokens_of(2 * BLOCK), max_tokens=40)
    engine.step()
    reserved = list[tuple[Waits, list[int]]]()
    for number in range(2):
        tokens = tokens_of(22 * BLOCK, start=500 * (number + 1))
        waits = Waits(engine, f"{number:032x}", tokens[: 11 * BLOCK])
        waits.open()
        engine.agent.received[waits.lease] = 11 * BLOCK
        reserved.append((waits, tokens))
    requests = [engine.add(waits.lease, tokens, max_tokens=2, lease=waits.lease) for waits, tokens in reserved]
    for _ in steps(engine):
        if runs.is_finished():
            break
        assert all(request.num_computed_tokens for request in requests), "each holds its blocks"
    for request in requests:
        run_until(engine, request.is_finished)
