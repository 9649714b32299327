"""The block pool: counts, sharing, and the order in which cached blocks go."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.protocol import EngineLoad
from tercet.protocol.content import chain, root_of
from tercet_lab.sim.block_pool import BlockPool, Holding, Prompt, Run


def pool_of(total: int) -> BlockPool:
    """A pool whose blocks have one token each."""
    return BlockPool(total, 1)


def prompt_of(tokens: Sequence[int]) -> Prompt:
    return Prompt(tuple(tokens), None)


def found(pool: BlockPool, *tokens: int) -> int:
    """How many of these blocks are cached."""
    return pool.match(prompt_of(tokens), len(tokens)).blocks


def held(pool: BlockPool, tokens: Sequence[int], plain: int = 0) -> Holding:
    """A holder that computed these blocks, found or not."""
    holding, prompt = Holding(), prompt_of(tokens)
    match = pool.match(prompt, len(tokens))
    pool.pin(holding, match)
    pool.take(holding, len(tokens) - match.blocks + plain)
    pool.publish(holding, prompt, len(tokens))
    return holding


def runs_of(holding: Holding) -> Iterator[Run]:
    """What a holder pins, from its last run on."""
    run = holding.run
    while run is not None and run.blocks:
        yield run
        run = run.parent


def test_blocks_come_back() -> None:
    pool = pool_of(10)
    holding = held(pool, [1, 2, 3], plain=2)
    assert (pool.free, pool.cached) == (5, 3)
    pool.give_back(holding)
    assert (pool.free, pool.cached) == (10, 3)


def test_a_second_holder_shares_and_the_last_one_frees() -> None:
    pool = pool_of(10)
    one, two = held(pool, [1, 2, 3]), held(pool, [1, 2, 9])
    assert pool.free == 6
    pool.give_back(one)
    assert pool.free == 7
    pool.give_back(two)
    assert pool.free == 10


def test_the_tail_of_the_oldest_goes_first() -> None:
    pool = pool_of(6)
    for hashes in ([1, 2, 3], [4, 5, 6]):
        pool.give_back(held(pool, hashes))
    held(pool, [], plain=2)
    assert (found(pool, 1, 2, 3), found(pool, 4, 5, 6)) == (1, 3)
    assert pool.evicted == 2


def test_use_makes_young() -> None:
    pool = pool_of(4)
    pool.give_back(held(pool, [1, 2]))
    pool.give_back(held(pool, [3, 4]))
    pool.give_back(held(pool, [1, 2]))
    held(pool, [], plain=2)
    assert (found(pool, 1, 2), found(pool, 3, 4)) == (2, 0)


def test_a_match_ends_at_the_first_gap() -> None:
    pool = pool_of(10)
    held(pool, [1, 2, 3, 4])
    assert found(pool, 1, 2, 7, 4) == 2
    assert pool.match(prompt_of([1, 2, 3, 4]), 3).blocks == 3


def test_what_two_computed_at_once_is_kept_once() -> None:
    pool = pool_of(10)
    one, two = Holding(), Holding()
    pool.take(one, 2)
    pool.take(two, 2)
    pool.publish(one, prompt_of([1, 2]), 2)
    pool.publish(two, prompt_of([1, 2]), 2)
    assert pool.free == 8
    pool.give_back(one)
    pool.give_back(two)
    assert (pool.free, pool.cached) == (10, 2)


def test_a_block_computed_again_while_its_copy_is_unused() -> None:
    pool = pool_of(10)
    fresh = Holding()
    pool.take(fresh, 1)
    pool.give_back(held(pool, [1]))
    pool.publish(fresh, prompt_of([1]), 1)
    assert (pool.free, pool.cached) == (9, 1)
    pool.give_back(fresh)
    assert pool.free == 10


def test_pinned_blocks_that_are_matched_need_no_room() -> None:
    pool = pool_of(4)
    held(pool, [1, 2, 3])
    match = pool.match(prompt_of([1, 2, 3]), 3)
    assert pool.fits(match, 1)
    assert not pool.fits(match, 2)


def test_idle_blocks_that_are_matched_need_room() -> None:
    pool = pool_of(4)
    pool.give_back(held(pool, [1, 2, 3]))
    match = pool.match(prompt_of([1, 2]), 2)
    assert pool.fits(match, 2)
    assert not pool.fits(match, 3)


def test_a_step_that_ends_after_the_pool_was_closed_still_finds_blocks() -> None:
    pool = pool_of(6)
    pool.give_back(held(pool, [1, 2, 3, 4]))
    running = held(pool, [5])
    pool.close()
    pool.take(running, 5)
    pool.give_back(running)
    assert pool.free == 6
    assert found(pool, 1, 2, 3, 4) == 0


def test_a_salt_shares_nothing() -> None:
    pool = pool_of(10)
    held(pool, [1, 2])
    assert pool.match(Prompt((1, 2), "salt"), 2).blocks == 0
    assert found(pool, 1, 2) == 2


def test_nothing_is_found_without_caching() -> None:
    pool = BlockPool(10, 1, caching=False)
    holding = held(pool, [1, 2])
    assert (found(pool, 1, 2), pool.cached, pool.free) == (0, 0, 8)
    pool.give_back(holding)
    assert pool.free == 10


def test_what_only_begins_alike_shares_its_whole_blocks() -> None:
    pool, size = BlockPool(100, 4), 4
    one = Prompt(tuple(range(30)), None)
    holding = Holding()
    pool.take(holding, 8)
    pool.publish(holding, one, 7)
    for shared in range(28):
        other = Prompt((*range(shared), 99, *range(29)), None)
        assert pool.match(other, 10).blocks == shared // size
    assert pool.cached == 7, "who only looks splits nothing"
    assert pool.match(one, 5).blocks == 5


def test_an_answer_is_found_as_a_part_of_the_next_prompt() -> None:
    pool, first = BlockPool(100, 4), Prompt(tuple(range(30)), None)
    holding = Holding()
    pool.take(holding, 12)
    pool.publish(holding, first, 7)
    pool.publish(holding, first, 11)
    following = Prompt((*first.tokens, *first.output(0, 14), 1, 2, 3, 4), None)
    assert pool.match(following, 12).blocks == 11


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 6), st.integers(0, 3)), max_size=60))
def test_counts_always_add_up(steps: list[tuple[bool, int, int, int]]) -> None:
    """Whatever holders do, nothing is lost: pinned + unused never exceed the pool, and all of it comes back."""
    pool, holders = pool_of(16), list[Holding]()
    for release, family, length, plain in steps:
        if release and holders:
            pool.give_back(holders.pop(family % len(holders)))
            continue
        tokens = [family * 100 + index for index in range(length)]
        if pool.fits(pool.match(prompt_of(tokens), length), length + plain):
            holders.append(held(pool, tokens, plain))
        distinct = {run for holder in holders for run in runs_of(holder)}
        in_use = sum(run.blocks for run in distinct) + sum(holder.plain for holder in holders)
        assert pool.total - pool.free == in_use
        assert all(sum(run.blocks for run in runs_of(holder)) == holder.cached for holder in holders)
        assert pool.cached <= pool.total
    for holder in holders:
        pool.give_back(holder)
    assert pool.free == pool.total


def test_names_cover_all_that_is_before() -> None:
    """Whoever observes from the start and whoever comes late hears of the same blocks, by the hashes of routers."""
    tokens = tuple(range(64))
    names = dict[bool, set[int]]()
    for late in (False, True):
        pool, told = BlockPool(100, 16), Told()
        if not late:
            pool.observe(told)
        for prompt in (Prompt(tokens, None), Prompt((*tokens[:40], *range(40)), None), Prompt(tokens, "salt")):
            holding, match = Holding(), pool.match(prompt, 4)
            pool.pin(holding, match)
            pool.take(holding, 6 - match.blocks)
            pool.publish(holding, prompt, 3)
            pool.publish(holding, prompt, 5)
            pool.give_back(holding)
        if late:
            pool.observe(told)
        names[late] = set(told.stored_names)
        assert len(told.stored_names) == len(names[late]) == pool.cached == 13
    assert names[False] == names[True]
    assert {*chain(0, tokens, 16), *chain(root_of("salt"), tokens, 16)} < names[True]


@pytest.mark.parametrize("begin", [0, 5, 69, 70, 75])
@pytest.mark.parametrize("end", [75, 90])
def test_what_is_known_is_the_prompt_and_its_output(begin: int, end: int) -> None:
    prompt = Prompt(tuple(range(70)), "s")
    whole = (*prompt.tokens, *prompt.output(0, 40))
    assert prompt.known(begin, end) == whole[begin:end]
    assert prompt.known(0, 60) == whole[:60]


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


class Told:
    """Notes what a pool stores and drops, in order."""

    def __init__(self) -> None:
        self.stored_names: list[int] = []
        self.dropped_names: list[int] = []

    def load(self, load: EngineLoad) -> None: ...

    def stored(self, hashes: Sequence[int]) -> None:
        self.stored_names += hashes

    def dropped(self, hashes: Sequence[int]) -> None:
        self.dropped_names += hashes

    def cleared(self) -> None: ...


CHAINS = [list(range(10)), [0, 1, 2, *range(20, 30)], [0, 1, 2, 20, 21, *range(40, 45)], list(range(50, 58)), [60, 61]]


@settings(max_examples=settings().max_examples * 3)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 13), st.booleans()), max_size=60), st.integers(4, 30))
def test_blocks_go_in_the_order_of_their_last_use(steps: list[tuple[int, int, bool]], total: int) -> None:
    """``steps``: which prompt comes, how many blocks of it, and whether the oldest one that runs ends before."""
    pool, plain, told, expected = pool_of(total), PlainPool(total), Told(), list[int]()
    # What each block is called, by its place in a chain: those that chains share are the same.
    called = {name: key for keys in CHAINS for name, key in zip(chain(0, tuple(keys), 1), keys, strict=True)}
    pool.observe(told)
    running: list[tuple[Holding, list[int]]] = []
    for number, length, ends in steps:
        if running and ends:
            holding, keys = running.pop(0)
            plain.give_back(keys)
            pool.give_back(holding)
        keys, holding = CHAINS[number][:length], Holding()
        match = pool.match(prompt_of(keys), length)
        assert match.blocks == plain.match(keys)
        if not pool.fits(match, len(keys) - match.blocks):
            continue
        pool.pin(holding, match)
        plain.pin(keys[: match.blocks])
        pool.take(holding, len(keys) - match.blocks)
        expected += plain.take(len(keys) - match.blocks)
        plain.publish(keys[match.blocks :])
        pool.publish(holding, prompt_of(keys), length)
        running.append((holding, keys))
        dropped = [called[name] for name in told.dropped_names]
        assert (pool.free, dropped, pool.evicted) == (plain.free, expected, len(expected))
