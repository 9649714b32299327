"""The most wanted contexts are beginnings of recent prompts, by their uses, in bounded memory; plans of copies end."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.decisions.contexts import BLOCK, HALF_LIFE_S, LEAST_PATIENCE_S, LONGEST, CopyPlan, WantedContexts
from tercet.protocol import MultiModalFeature, Request

Blocks = tuple[int, ...]
# Few different blocks, so that prompts begin alike.
PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), max_size=30)


def request_of(blocks: Blocks, salt: str | None = None, rest: int = 0) -> Request:
    tokens = tuple(token for block in blocks for token in [block] * BLOCK)
    return Request(seq_id="r", prompt=tokens + (9,) * rest, cache_salt=salt)


def wanted_after(prompts: list[Blocks], most: int = 1000, seconds: float = 0.0) -> WantedContexts:
    """What is wanted after these prompts, one each ``seconds``."""
    wanted = WantedContexts(most * BLOCK)
    for number, blocks in enumerate(prompts):
        wanted.asked(request_of(blocks), number * seconds)
    return wanted


def contexts(wanted: WantedContexts, now: float = 0.0, tokens: int = 10**6) -> list[Blocks]:
    """The contexts as blocks, the most wanted first."""
    found = list[Blocks]()
    for each in wanted.most_wanted(now, tokens):
        request = wanted.request(each, "x")
        assert request is not None
        assert request.num_tokens == each.end
        found.append(request.prompt[::BLOCK])
    return found


def beginnings(blocks: Blocks) -> set[Blocks]:
    return {blocks[:end] for end in range(1, len(blocks) + 1)}


@given(PROMPTS, st.integers(1, 40))
def test_the_most_wanted_blocks_are_those_of_a_count_of_beginnings(prompts: list[Blocks], chosen: int) -> None:
    uses = Counter(each for blocks in prompts for each in beginnings(blocks))
    found = contexts(wanted_after(prompts), tokens=chosen * BLOCK)
    covered = set[Blocks]().union(*map(beginnings, found))
    assert len(covered) == min(chosen, len(uses))
    assert sorted(uses[each] for each in covered) == sorted(uses.values())[len(uses) - len(covered) :]
    before = set[Blocks]()
    most = float("inf")
    for each in found:  # each begins with what is wanted as often as all before, or less
        new = max(uses[part] for part in beginnings(each) - before)
        assert new <= most
        most, before = new, before | beginnings(each)


@given(PROMPTS, st.integers(1, 12))
def test_memory_is_bounded_and_what_is_forgotten_leaves_its_uses_to_its_beginning(
    prompts: list[Blocks], most: int
) -> None:
    wanted, uses = WantedContexts(most * BLOCK), Counter[Blocks]()
    for blocks in prompts:
        wanted.asked(request_of(blocks), 0.0)
        uses.update(beginnings(blocks))
        assert len(wanted) <= most
        for each in contexts(wanted):
            assert uses[each]  # the beginning of a prompt, and all of it is here
    if prompts:
        latest = prompts[-1][:most]
        assert latest in set[Blocks]().union(*map(beginnings, contexts(wanted)))


def test_the_common_beginning_outlives_the_ends_and_keeps_their_number() -> None:
    prompts: list[Blocks] = [(7, number) for number in range(50)]
    wanted = wanted_after([*prompts, (8, 8), (8, 8)], most=5)
    assert len(wanted) == 5
    assert contexts(wanted, tokens=BLOCK) == [(7,)]
    assert contexts(wanted, tokens=3 * BLOCK)[1] == (8, 8)


def test_uses_count_less_with_time() -> None:
    wanted = wanted_after([(1,), (1,), (1,)])
    wanted.asked(request_of((2,)), HALF_LIFE_S)
    assert contexts(wanted, HALF_LIFE_S) == [(1,), (2,)]
    wanted.asked(request_of((2,)), 2 * HALF_LIFE_S)
    assert contexts(wanted, 2 * HALF_LIFE_S) == [(2,), (1,)]


def test_tenants_adapters_and_images_are_kept_apart() -> None:
    wanted, plain = WantedContexts(), request_of((1, 2), rest=3)
    image = MultiModalFeature(modality="image", digest="0" * 64, offset=BLOCK + 1, length=5)
    wanted.asked(plain, 0.0)
    wanted.asked(Request(seq_id="a", prompt=plain.prompt, adapter="l", adapter_digest="d" * 8), 0.0)
    wanted.asked(request_of((1, 2), salt="s"), 0.0)
    assert len(wanted) == 6
    wanted.asked(Request(seq_id="i", prompt=plain.prompt, mm_features=(image,)), 0.0)
    assert len(wanted) == 6  # the block before the image
    found = [wanted.request(each, "x") for each in wanted.most_wanted(0.0)]
    assert {(each.cache_salt, each.adapter, each.adapter_digest) for each in found if each is not None} == {
        (None, None, ""), ("s", None, ""), (None, "l", "d" * 8),
    }  # fmt: skip
    assert contexts(wanted)[0] == (1, 2)


def test_short_prompts_are_not_counted_and_of_long_ones_the_beginning() -> None:
    wanted = WantedContexts()
    wanted.asked(Request(seq_id="r", prompt=(1,) * (BLOCK - 1)), 0.0)
    assert len(wanted) == 0
    wanted.asked(Request(seq_id="r", prompt=tuple(range(LONGEST + 5 * BLOCK))), 0.0)
    assert [each.end for each in wanted.most_wanted(0.0)] == [LONGEST]


def test_a_context_that_was_forgotten_meanwhile_has_no_request() -> None:
    wanted = wanted_after([(1, 2)], most=2)
    (first,) = wanted.most_wanted(0.0)
    wanted.asked(request_of((3, 4)), 0.0)
    assert wanted.request(first, "x") is None


@given(st.lists(st.tuples(st.integers(0, 300), st.floats(0, 3)), max_size=40))
def test_a_plan_ends_by_tokens_and_time_and_one_copy_never_takes_all_the_time(copies: list[tuple[int, float]]) -> None:
    plan, now, tokens = CopyPlan(1000, 10.0), 0.0, 0
    for number, seconds in copies:
        if plan.is_over(now):
            break
        assert tokens <= 1000 - BLOCK
        patience = plan.patience(now)
        assert 0 < patience <= 10.0 - now
        assert patience <= max(LEAST_PATIENCE_S, (10.0 - now) / 2)
        now += min(seconds, patience)
        plan.copied(number)
        tokens += number
    assert plan.tokens == tokens
    assert now <= 10.0
    assert plan.contexts <= len(copies)


@given(
    st.integers(0, 5), st.integers(1, 5), st.dictionaries(st.sampled_from("abst"), st.integers(0, 6)),
    st.sets(st.sampled_from("abst")), st.dictionaries(st.sampled_from("abst"), st.integers(0, 3).map(float)),
)  # fmt: skip
def test_a_source_has_more_has_not_failed_and_is_a_store_if_that_has_as_much(
    own: int, end: int, holders: dict[str, int], failed: set[str], loads: dict[str, float]
) -> None:
    plan, stores = CopyPlan(1000, 10.0), {"s", "t"}
    plan.failed |= dict.fromkeys(failed, "timeout")
    able = {name: min(has, end) for name, has in holders.items() if name not in failed and min(has, end) > own}
    found = plan.source(own, end, holders, stores, loads)
    assert (found is None) == (not able)
    if found is not None:
        most = max(able.values())
        assert able[found] >= own + 0.9 * (most - own)
        if found not in stores:
            assert not any(name in stores and has == most for name, has in able.items())
            assert all(loads.get(found, 0.0) <= loads.get(name, 0.0) for name, has in able.items() if has == most)


@pytest.mark.parametrize(
    ("has", "holders", "failed", "expected"),
    [
        (128, {}, set[str](), "s"), (128, {"s": 64}, set[str](), "s"), (128, {"t": 64}, set[str](), "t"),
        (128, {"t": 128}, set[str](), None),
        (0, {}, set[str](), None), (128, {}, {"s"}, "t"), (128, {"s": 128}, {"s"}, "t"), (128, {}, {"s", "t"}, None),
    ],
)  # fmt: skip
def test_a_destination_is_needed_if_no_candidate_holds_as_much(
    has: int, holders: dict[str, int], failed: set[str], expected: str | None
) -> None:
    plan = CopyPlan(1000, 10.0)
    plan.failed |= dict.fromkeys(failed, "timeout")
    assert plan.destination(has, holders, ["s", "t"]) == expected
