"""The block pool: counts, sharing, and the order in which cached blocks go."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.protocol import EngineLoad
from tercet.sim.block_pool import BlockPool, Holding
from tercet.sim.prompts import Prompt


def held(pool: BlockPool, hashes: list[int], plain: int = 0) -> Holding:
    """A holder that computed blocks with these hashes, found or not."""
    holding = Holding()
    matched = pool.match(hashes, len(hashes))
    pool.pin(holding, hashes, matched)
    pool.take(holding, len(hashes) - matched + plain)
    pool.publish(holding, hashes)
    return holding


def test_blocks_come_back() -> None:
    pool = BlockPool(10)
    holding = held(pool, [1, 2, 3], plain=2)
    assert (pool.free, len(pool._cached)) == (5, 3)
    pool.give_back(holding)
    assert (pool.free, len(pool._cached)) == (10, 3)


def test_a_second_holder_shares_and_the_last_one_frees() -> None:
    pool = BlockPool(10)
    one, two = held(pool, [1, 2, 3]), held(pool, [1, 2, 9])
    assert pool.free == 6
    pool.give_back(one)
    assert pool.free == 7
    pool.give_back(two)
    assert pool.free == 10


def test_the_tail_of_the_oldest_goes_first() -> None:
    pool = BlockPool(6)
    for hashes in ([1, 2, 3], [4, 5, 6]):
        pool.give_back(held(pool, hashes))
    held(pool, [], plain=2)
    assert [pool.match([key], 1) for key in (1, 2, 3, 4, 5, 6)] == [1, 0, 0, 1, 1, 1]
    assert pool.evicted == 2


def test_use_makes_young() -> None:
    pool = BlockPool(4)
    pool.give_back(held(pool, [1, 2]))
    pool.give_back(held(pool, [3, 4]))
    pool.give_back(held(pool, [1, 2]))
    held(pool, [], plain=2)
    assert (pool.match([1, 2], 2), pool.match([3, 4], 2)) == (2, 0)


def test_a_match_ends_at_the_first_gap() -> None:
    pool = BlockPool(10)
    held(pool, [1, 2, 3, 4])
    assert pool.match([1, 2, 7, 4], 4) == 2
    assert pool.match([1, 2, 3, 4], 3) == 3


def test_what_two_computed_at_once_is_kept_once() -> None:
    pool = BlockPool(10)
    one, two = Holding(), Holding()
    pool.take(one, 2)
    pool.take(two, 2)
    pool.publish(one, [1, 2])
    pool.publish(two, [1, 2])
    assert pool.free == 8
    pool.give_back(one)
    pool.give_back(two)
    assert (pool.free, len(pool._cached)) == (10, 2)


def test_a_block_computed_again_while_its_copy_is_unused() -> None:
    pool = BlockPool(10)
    fresh = Holding()
    pool.take(fresh, 1)
    pool.give_back(held(pool, [1]))
    pool.publish(fresh, [1])
    assert (pool.free, len(pool._cached)) == (9, 1)
    pool.give_back(fresh)
    assert pool.free == 10


def test_pinned_blocks_that_are_matched_need_no_room() -> None:
    pool = BlockPool(4)
    held(pool, [1, 2, 3])
    assert pool.fits([1, 2, 3], 3, 1)
    assert not pool.fits([1, 2, 3], 3, 2)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 6), st.integers(0, 3)), max_size=60),
)
def test_counts_always_add_up(steps: list[tuple[bool, int, int, int]]) -> None:
    """Whatever holders do, nothing is lost: pinned + unused never exceed the pool, and all of it comes back."""
    pool, holders = BlockPool(16), list[Holding]()
    for release, family, length, plain in steps:
        if release and holders:
            pool.give_back(holders.pop(family % len(holders)))
            continue
        hashes = [family * 100 + index for index in range(length)]
        if pool.fits(hashes, pool.match(hashes, length), length + plain):
            holders.append(held(pool, hashes, plain))
        distinct = {key for holder in holders for key in holder.hashes}
        assert pool.total - pool.free == len(distinct) + sum(holder.plain for holder in holders)
        assert len(pool._cached) <= pool.total
    for holder in holders:
        pool.give_back(holder)
    assert pool.free == pool.total


def test_hashes_cover_all_that_is_before() -> None:
    one, two = Prompt(tuple(range(64)), None), Prompt((9, *range(1, 64)), None)
    assert len(one.hashes(16)) == 4
    assert not set(one.hashes(16)) & set(two.hashes(16))
    assert Prompt(tuple(range(70)), None).hashes(16) == one.hashes(16)
    assert Prompt(tuple(range(64)), "salt").hashes(16) != one.hashes(16)


@pytest.mark.parametrize("after", [0, 1, 15, 16, 40])
def test_hashes_with_output_are_those_of_the_longer_prompt(after: int) -> None:
    prompt = Prompt(tuple(range(70)), "s")
    output = prompt.output(0, after)
    assert prompt.hashes_with(output, 16) == Prompt((*prompt.tokens, *output), "s").hashes(16)


def test_output_is_the_same_in_one_piece_or_many() -> None:
    prompt = Prompt((1, 2, 3), None)
    whole = prompt.output(0, 20_000)
    assert len(whole) == 20_000
    assert whole[100:200] == prompt.output(100, 200)
    assert whole != Prompt((1, 2, 4), None).output(0, 20_000)


class PlainPool:
    """The same cache block by block: what was used least recently goes first, a prompt from its end on."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.pins = Counter[int]()
        self.unused = OrderedDict[int, None]()
        self.plain = 0

    def match(self, hashes: list[int]) -> int:
        return next((i for i, key in enumerate(hashes) if key not in self.unused and not self.pins[key]), len(hashes))

    @property
    def free(self) -> int:
        return self.total - self.plain - sum(1 for count in self.pins.values() if count)

    def pin(self, keys: list[int]) -> None:
        for key in keys:
            self.unused.pop(key, None)
            self.pins[key] += 1

    def take(self, count: int) -> list[int]:
        self.plain += count
        excess = len(self.unused) - self.free
        return [self.unused.popitem(last=False)[0] for _ in range(excess)]

    def publish(self, keys: list[int]) -> None:
        self.plain -= len(keys)
        self.pin(keys)

    def give_back(self, keys: list[int]) -> None:
        for key in reversed(keys):
            self.pins[key] -= 1
            if not self.pins[key]:
                self.unused[key] = None


class Dropped:
    """Notes what a pool drops, in order."""

    def __init__(self) -> None:
        self.keys: list[int] = []

    def load(self, load: EngineLoad) -> None: ...

    def stored(self, hashes: Sequence[int]) -> None: ...

    def dropped(self, hashes: Sequence[int]) -> None:
        self.keys += hashes

    def cleared(self) -> None: ...


CHAINS = [list(range(10)), [0, 1, 2, *range(20, 30)], [0, 1, 2, 20, 21, *range(40, 45)], list(range(50, 58)), [60, 61]]


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 13), st.booleans()), max_size=60), st.integers(4, 30))
def test_blocks_go_in_the_order_of_their_last_use(steps: list[tuple[int, int, bool]], total: int) -> None:
    """``steps``: which prompt comes, how many blocks of it, and whether the oldest one that runs ends before."""
    pool, plain, dropped, expected = BlockPool(total), PlainPool(total), Dropped(), list[int]()
    pool.observe(dropped)
    running: list[Holding] = []
    for chain, length, ends in steps:
        if running and ends:
            holding = running.pop(0)
            plain.give_back(list(holding.hashes))
            pool.give_back(holding)
        hashes, holding = CHAINS[chain][:length], Holding()
        matched = pool.match(hashes, length)
        assert matched == plain.match(hashes)
        if not pool.fits(hashes, matched, len(hashes) - matched):
            continue
        pool.pin(holding, hashes, matched)
        plain.pin(hashes[:matched])
        pool.take(holding, len(hashes) - matched)
        expected += plain.take(len(hashes) - matched)
        plain.publish(hashes[matched:])
        pool.publish(holding, hashes)
        running.append(holding)
        assert (pool.free, dropped.keys, pool.evicted) == (plain.free, expected, len(expected))
