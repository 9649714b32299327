"""Engines that split layers and heads differently: every plane and head of every receiver comes from one sender."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol import CacheGroup, KVLayout, LayoutMismatch
from tercet.transport import KVRegion, PlaneRun, RankRoute, SendReport
from tercet.transport.region import routes, runs
from tests.unit.transport.models import a_grant
from tests.unit.transport.ranks import TOKENS, Send, filled, new_lease, rank
from tests.unit.transport.test_rank import BACKENDS, SCATTERED, settings

HEADS, HEAD_BYTES = 8, 64
DEGREES = (1, 2, 4, 8)


def layout(tp_size: int, stages: tuple[tuple[int, ...], ...], groups: int, layers: int) -> KVLayout:
    return KVLayout(
        "m", "bf16", layers, HEADS, 1, TOKENS, max(1, HEADS // tp_size) * HEAD_BYTES, tp_size, "plain", True,
        groups=tuple(CacheGroup("full_attention", 1) for _ in range(groups)) if groups > 1 else (),
        stages=stages if len(stages) > 1 else (),
    )  # fmt: skip


@st.composite
def staged(draw: st.DrawFn, kinds: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Layers of these kinds, cut into stages; how many of each kind each stage has."""
    cuts = sorted(draw(st.sets(st.integers(1, len(kinds) - 1), max_size=5))) if len(kinds) > 1 else []
    parts = [kinds[first:last] for first, last in itertools.pairwise([0, *cuts, len(kinds)])]
    return tuple(tuple(part.count(kind) for kind in range(max(kinds) + 1)) for part in map(list, parts))


def planes_of(kinds: Sequence[int], stages: tuple[tuple[int, ...], ...], stage: int) -> list[int]:
    """Naively: the model's layers that a stage holds, in the order of its planes, group by group."""
    first = sum(map(sum, stages[:stage]))
    held = range(first, first + sum(stages[stage]))
    return sorted(held, key=lambda layer: (kinds[layer], layer))


@given(st.data())
def test_every_head_of_every_layer_is_sent_once_to_where_it_is_held(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=12))
    kinds = [sorted(set(kinds)).index(kind) for kind in kinds]
    ours, theirs = data.draw(staged(kinds)), data.draw(staged(kinds))
    source = layout(data.draw(st.sampled_from(DEGREES)), ours, max(kinds) + 1, len(kinds))
    target = layout(data.draw(st.sampled_from(DEGREES)), theirs, max(kinds) + 1, len(kinds))
    source.require_mappable(target, "the other")
    got = [Counter[tuple[int, int]]() for _ in range(target.num_ranks)]
    for sender in range(source.num_ranks):
        stage, tensor_parallel = divmod(sender, source.tp_size)
        held = planes_of(kinds, ours, stage)
        for receiver, head_slice, planes in routes(source, target, sender):
            at_stage, at_rank = divmod(receiver, target.tp_size)
            count = head_slice.size // HEAD_BYTES
            first = tensor_parallel * HEADS // source.tp_size + head_slice.source_offset // HEAD_BYTES
            assert at_rank * HEADS // target.tp_size + head_slice.part * count == first
            for run in planes or (PlaneRun(0, 0, len(kinds)),):
                for at in range(run.length):
                    layer = held[run.source + at]
                    assert planes_of(kinds, theirs, at_stage)[run.target + at] == layer
                    got[receiver].update((layer, head) for head in range(first, first + count))
    for receiver, sent in enumerate(got):
        at_stage, at_rank = divmod(receiver, target.tp_size)
        first = at_rank * HEADS // target.tp_size
        wanted = {
            (layer, head)
            for layer in planes_of(kinds, theirs, at_stage)
            for head in range(first, first + target.heads_per_rank)
        }
        assert sent == Counter(dict.fromkeys(wanted, 1))


def test_two_stages_to_one_and_back() -> None:
    one, two = layout(1, ((4,),), 1, 4), layout(1, ((1,), (3,)), 1, 4)
    assert runs(one, two, 0, 1) == (PlaneRun(1, 0, 3),)
    assert [planes for each in range(2) for *_, planes in routes(two, one, each)] == [
        (PlaneRun(0, 0, 1),), (PlaneRun(0, 1, 3),),
    ]  # fmt: skip
    assert [route.receiver for route in routes(one, two, 0)] == [0, 1]


def test_a_stage_without_layers_of_a_kind_sends_none() -> None:
    here, there = layout(1, ((1, 1), (2, 0)), 2, 4), layout(1, ((2, 0), (1, 1)), 2, 4)
    assert routes(here, there, 1) == [
        RankRoute(0, routes(here, there, 1)[0].head_slice, (PlaneRun(0, 1, 1),)),
        RankRoute(1, routes(here, there, 1)[1].head_slice, (PlaneRun(1, 0, 1),)),
    ]
    assert runs(here, there, 0, 1) == (PlaneRun(1, 1, 1),)


@pytest.mark.parametrize("stages", [((2,), (3,)), ((1,), (2,)), ((2, 2), (2, 0))], ids=str)
def test_stages_that_hold_other_layers_are_refused(stages: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(LayoutMismatch, match="stages is"):
        layout(1, ((2,), (2,)), 1, 4).require_mappable(layout(1, stages, 1, 4), "the other")


WAYS = [((1, (4,)), (1, (1, 3))), ((1, (1, 3)), (1, (4,))), ((2, (3, 1)), (1, (2, 2))), ((1, (2, 2)), (2, (1, 3)))]


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_layer_and_head_finds_its_rank(
    backend: str, way: tuple[tuple[int, tuple[int, ...]], tuple[int, tuple[int, ...]]], one_by_one: bool
) -> None:
    """Bytes, through each transport, whether layers are pushed together or as they are computed.

    And a lease is valid only where all layers have come.
    """
    source, target = (layout(tp, tuple((count,) for count in counts), 1, 4) for tp, counts in way)
    sources, targets = SCATTERED
    held = [
        [range(sum(counts[:stage]), sum(counts[: stage + 1])) for stage in range(len(counts)) for _ in range(tp)]
        for tp, counts in way
    ]

    def layers_of(number: int) -> Sequence[int]:
        layers = range(len(held[0][number]))
        return [*layers] if one_by_one else layers

    ours = [filled(len(layers), 40, source.block_bytes, 10 + each) for each, layers in enumerate(held[0])]
    theirs = [filled(len(layers), 40, target.block_bytes, 50 + each) for each, layers in enumerate(held[1])]
    end, lease = len(targets) * TOKENS, new_lease(len(targets) * TOKENS)
    senders, receivers = (
        [rank(region, settings(backend)) for region in regions] for regions in (ours, theirs)
    )  # fmt: skip
    sending, receiving = ([each.__enter__() for each in ranks] for ranks in (senders, receivers))
    try:
        for receiver in receiving:
            receiver.grants.grant(a_grant(lease, targets, 0, end, TOKENS))
        sends = [
            (number, Send(sender, receiving[route.receiver].addresses, lease, route.head_slice, planes=route.planes))
            for number, sender in enumerate(sending)
            for route in routes(source, target, number)
        ]
        *most, (last, send) = sends
        for number, each in most:
            each.push(layers_of(number), sources)
            each.finish(end)
        assert all(isinstance(each.wait(), SendReport) for _, each in most)
        assert 0 in [each.grants._open[lease].valid.end for each in receiving]
        send.push(layers_of(last), sources)
        send.finish(end)
        assert isinstance(send.wait(), SendReport)
        assert [receiver.grants.revoke(lease) for receiver in receiving] == [end] * len(receiving)
    finally:
        for each in (*senders, *receivers):
            each.__exit__(None, None, None)
    assert _heads(target, held[1], theirs, targets) == _heads(source, held[0], ours, sources)


def _heads(of: KVLayout, held: list[range], regions: list[KVRegion], blocks: Sequence[int]) -> dict[object, bytes]:
    found: dict[object, bytes] = {}
    for number, (layers, region) in enumerate(zip(held, regions, strict=True)):
        first = number % of.tp_size * HEADS // of.tp_size
        for at, layer in enumerate(layers):
            for index, block in enumerate(blocks):
                data = bytes(region.blocks(at, block))
                for head in range(of.heads_per_rank):
                    found[layer, index, first + head] = data[head * HEAD_BYTES : (head + 1) * HEAD_BYTES]
    return found
