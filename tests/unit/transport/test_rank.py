"""KV from rank to rank, byte for byte, by every backend."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from tercet.protocol import KVLayout, TransferFailed, content_of, packed
from tercet.transport import BlockShape, HeadSlice, KVRegion, RankTransport, SendReport, local_rank, peer, routes
from tercet.transport.backends import tcp
from tercet.transport.peer_messages import FROM_SENDER, MessageSplitter, ReadDescriptors, SendBegin, SendEnd, Welcome
from tercet.transport.sockets import Post
from tests.unit.transport.models import a_grant
from tests.unit.transport.ranks import (
    ADJACENT,
    KIB,
    SCATTERED,
    SECONDS,
    TOKEN_BYTES,
    TOKENS,
    Send,
    content,
    expected_after,
    filled,
    grant,
    idle,
    new_lease,
    rank,
    settings,
    transfer,
    transport_to,
    whole,
)

BACKENDS = ["host", "tcp"]
STREAMS = [1, 2, 4]


# ---- bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [16, 64, 256])
@pytest.mark.parametrize("moved", [SCATTERED, ADJACENT], ids=["scattered", "adjacent"])
def test_kv_arrives_byte_for_byte_and_nothing_else_changes(
    backend: str, streams: int, tokens: int, moved: tuple[Sequence[int], Sequence[int]]
) -> None:
    size, layers, (sources, targets) = tokens * TOKEN_BYTES, 5, moved
    ours, theirs = filled(layers, 40, size, 1), filled(layers, 40, size, 2)
    expected = expected_after(content(theirs), ours, sources, targets)
    chosen = settings(backend, streams=streams)
    with rank(ours, chosen) as sender, rank(theirs, chosen) as receiver:
        report = transfer(sender, ours, receiver, sources, targets, tokens)
        assert content(theirs) == expected
        assert report.bytes == layers * len(sources) * size
        assert transport_to(sender, receiver.addresses) == backend
        assert report.transport == backend
        assert receiver.counters()["chunks_received"] == report.chunks
        idle(sender, receiver)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_larger_than_a_frame_is_cut_and_put_together(backend: str) -> None:
    ours, theirs = filled(2, 24, 512 * KIB, 1), filled(2, 24, 512 * KIB, 2)
    sources, targets = tuple(range(20)), tuple(reversed(range(20)))
    expected = expected_after(content(theirs), ours, sources, targets)
    chosen = settings(backend, streams=4)
    with rank(ours, chosen) as sender, rank(theirs, chosen) as receiver:
        report = transfer(sender, ours, receiver, sources, targets)
        assert content(theirs) == expected
        # Until the peers have agreed on a backend, frames are cut as for tcp.
        assert report.chunks in ((4,) if backend == "tcp" else (1, 4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_layers(backend: str) -> None:
    layers = 96
    ours, theirs = filled(layers, 8, 3 * KIB, 1), filled(layers, 8, 3 * KIB, 2)
    expected = expected_after(content(theirs), ours, (1, 2, 6), (0, 7, 3))
    with rank(ours, settings(backend)) as sender, rank(theirs, settings(backend)) as receiver:
        transfer(sender, ours, receiver, (1, 2, 6), (0, 7, 3))
        assert content(theirs) == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_sends_at_once_and_one_after_another_share_a_session(backend: str) -> None:
    layers, size, rounds, at_once = 3, 8 * KIB, 3, 8
    ours, theirs = filled(layers, 64, size, 1), filled(layers, 64, size, 2)
    with rank(ours, settings(backend)) as sender, rank(theirs, settings(backend)) as receiver:
        for turn in range(rounds):
            expected = content(theirs)
            sends: list[tuple[Send, str]] = []
            for number in range(at_once):
                sources = tuple((turn + number * 8 + index * 3) % 64 for index in range(8))
                targets = tuple(range(number * 8, number * 8 + 8))
                expected = expected_after(expected, ours, sources, targets)
                lease = grant(receiver, targets)
                sends.append((Send(sender, receiver.addresses, lease, whole(ours)), lease))
                for layer in range(layers):  # a chunk of each, so that they interleave
                    sends[-1][0].push([layer], sources[:4])
                    sends[-1][0].push([layer], sources[4:], slot=4)
            for send, _ in sends:
                send.finish(8 * TOKENS)
            for send, lease in sends:
                assert isinstance(send.wait(), SendReport)
                assert receiver.grants.revoke(lease) == 8 * TOKENS
            assert content(theirs) == expected
        assert receiver.counters()["sessions_in"] == sender.counters()["sessions_out"] == 1
        assert receiver.counters()["receives_done"] == sender.counters()["sends_done"] == rounds * at_once
        idle(sender, receiver)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_send_to_each_other_at_the_same_time(backend: str) -> None:
    first, second = filled(3, 16, 16 * KIB, 1), filled(3, 16, 16 * KIB, 2)
    before = content(first), content(second)
    lower, upper = tuple(range(8)), tuple(range(8, 16))
    expected_first = expected_after(before[0], second, lower, upper)
    expected_second = expected_after(before[1], first, lower, upper)
    with rank(first, settings(backend)) as one, rank(second, settings(backend)) as other:
        ways = [(one, first, other), (other, second, one)]
        threads = [threading.Thread(target=transfer, args=(*way, lower, upper)) for way in ways]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert content(first) == expected_first
        assert content(second) == expected_second


# ---- tensor parallelism, and blocks of another size ----------------------------------------------------------


HEADS, HEAD_BYTES = 4, 4 * KIB


def layout(tp_size: int) -> KVLayout:
    return KVLayout(
        model="m", dtype="bfloat16", num_layers=3, num_kv_heads=HEADS, head_size=64, block_size=TOKENS,
        block_bytes=HEADS // tp_size * HEAD_BYTES, tp_size=tp_size, packing="plain", splits_by_head=True,
    )  # fmt: skip


def head_of(region: KVRegion, layer: int, block: int, head: int) -> bytes:
    return bytes(region.blocks(layer, block)[head * HEAD_BYTES : (head + 1) * HEAD_BYTES])


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [(1, 2), (2, 1), (2, 2), (1, 1), (4, 1), (1, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_head_finds_its_rank(backend: str, degrees: tuple[int, int]) -> None:
    sources, targets = SCATTERED
    source, target = layout(degrees[0]), layout(degrees[1])
    ours = [filled(3, 40, source.block_bytes, 10 + number) for number in range(degrees[0])]
    theirs = [filled(3, 40, target.block_bytes, 20 + number) for number in range(degrees[1])]
    senders = [RankTransport(region, "tp", settings(backend)) for region in ours]
    receivers = [RankTransport(region, "tp", settings(backend)) for region in theirs]
    end, lease = len(targets) * TOKENS, new_lease(len(targets) * TOKENS)
    try:
        for receiver in receivers:
            receiver.grants.grant(a_grant(lease, targets, 0, end, TOKENS))
        sends = [
            Send(sender, receivers[route.receiver].addresses, lease, route.head_slice)
            for number, sender in enumerate(senders)
            for route in routes(source, target, number)
        ]
        for send in sends:
            send.push(range(3), sources)
            send.finish(end)
        for send in sends:
            assert isinstance(send.wait(), SendReport)
        assert [receiver.grants.revoke(lease) for receiver in receivers] == [end] * degrees[1]
    finally:
        for each in (*senders, *receivers):
            each.close()
    here, there = HEADS // degrees[0], HEADS // degrees[1]
    for layer, head in itertools.product(range(3), range(HEADS)):
        for block, to in zip(sources, targets, strict=True):
            sent = head_of(ours[head // here], layer, block, head % here)
            assert head_of(theirs[head // there], layer, to, head % there) == sent
    for region in (*ours, *theirs):
        region.close()


def test_a_part_of_the_ranks_makes_nothing_valid() -> None:
    ours, theirs = filled(3, 40, 8 * KIB, 1), filled(3, 40, 16 * KIB, 2)
    with rank(ours) as sender, rank(theirs) as receiver:
        lease = grant(receiver, SCATTERED[1])
        send = Send(sender, receiver.addresses, lease, HeadSlice(0, 8 * KIB, 0, 2))
        send.push(range(3), SCATTERED[0])
        send.finish(len(SCATTERED[0]) * TOKENS)
        assert isinstance(send.wait(), SendReport)
        assert receiver.grants.revoke(lease) == 0


def tokens_of(region: KVRegion, shape: BlockShape, layer: int, blocks: Sequence[int]) -> list[list[bytes]]:
    """What each head knows of each token, read item by item: keys lie by dimension, values by token."""
    dtype, size, count = np.dtype(f"u{shape.item_bytes}"), shape.head_size, shape.tokens
    found: list[list[bytes]] = []
    for block in blocks:
        items = np.frombuffer(region.blocks(layer, block), dtype)
        for token in range(count):
            row: list[bytes] = []
            for head in range(shape.heads):
                start = head * 2 * size * count
                keys = [items[start + dimension * count + token] for dimension in range(size)]
                values = [items[start + size * count + token * size + dimension] for dimension in range(size)]
                row.append(np.array([*keys, *values], dtype).tobytes())
            found.append(row)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (16, 128), (128, 16), (48, 32)], ids=str)
@pytest.mark.parametrize(("backend", "streams"), [("host", 1), ("tcp", 1), ("tcp", 4)])
def test_blocks_of_another_size_arrive_token_for_token(sizes: tuple[int, int], streams: int, backend: str) -> None:
    heads, size, item, total = 2, 8, 2, 384
    here, there = (BlockShape(tokens, heads, size, item) for tokens in sizes)
    ours = filled(2, total // here.tokens + 3, here.block_bytes, 1)
    theirs = filled(2, total // there.tokens + 3, there.block_bytes, 2)
    sources = list(reversed(range(1, 1 + total // here.tokens)))
    targets = [*range(2, 2 + total // there.tokens, 2), *range(3, 2 + total // there.tokens, 2)]
    allowed = settings(backend, streams=streams)
    with rank(ours, allowed, block=here) as sender, rank(theirs, allowed, block=there) as receiver:
        untouched = bytes(theirs.blocks(0, 0, 2)), bytes(theirs.blocks(1, theirs.shape.num_blocks - 1))
        lease = grant(receiver, targets, there.tokens)
        send = Send(sender, receiver.addresses, lease, whole(ours))
        send.push(range(2), sources)
        send.finish(total)
        assert isinstance(send.wait(), SendReport)
        assert transport_to(sender, receiver.addresses) == backend
        assert receiver.grants.revoke(lease) == total
        for layer in range(2):
            assert tokens_of(theirs, there, layer, targets) == tokens_of(ours, here, layer, sources)
        assert (bytes(theirs.blocks(0, 0, 2)), bytes(theirs.blocks(1, theirs.shape.num_blocks - 1))) == untouched


# ---- whose KV it is ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_kv_of_other_tokens_writes_no_byte(backend: str) -> None:
    ours, theirs = filled(3, 8, KIB, 1), filled(3, 8, KIB, 2)
    with rank(ours, settings(backend)) as sender, rank(theirs, settings(backend)) as receiver:
        before, lease = content(theirs), grant(receiver, (0, 1))
        for others in (content_of(packed([0, 2, *range(2, 2 * TOKENS)]), None), content_of(packed(range(32)), "salt")):
            send = Send(sender, receiver.addresses, lease, whole(ours), others)
            send.push(range(3), (4, 5))
            send.finish(2 * TOKENS)
            outcome = send.wait()
            assert isinstance(outcome, TransferFailed)
            assert "of other tokens" in outcome.message
        assert content(theirs) == before
        assert receiver.counters()["chunks_received"] == 0
        send = Send(sender, receiver.addresses, lease, whole(ours))
        send.push(range(3), (4, 5))
        send.finish(2 * TOKENS)
        assert isinstance(send.wait(), SendReport)
        assert receiver.grants.revoke(lease) == 2 * TOKENS


def test_a_refused_send_of_megabytes_ends_at_once_and_the_session_goes_on() -> None:
    ours, theirs = filled(1, 16, 1024 * KIB, 1), filled(1, 16, 1024 * KIB, 2)
    chosen = settings("tcp", timeout=2 * SECONDS)  # a sender that nobody reads from waits as long
    with rank(ours, chosen) as sender, rank(theirs, chosen) as receiver:
        before, lease = content(theirs), grant(receiver, tuple(range(16)))
        for others in (content_of(packed([1] * 16 * TOKENS), None), None):
            send = Send(sender, receiver.addresses, lease, whole(ours), others)
            send.push(range(1), tuple(range(16)))
            send.finish(16 * TOKENS)
            outcome = send.wait()
            assert isinstance(outcome, SendReport if others is None else TransferFailed), outcome
            assert content(theirs) == (content(ours) if others is None else before)
        assert sender.counters()["sessions_lost"] == 0


def test_the_chunks_of_a_push_are_announced_together(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = filled(4, 8, 1024 * KIB, 1), filled(4, 8, 1024 * KIB, 2)
    with rank(ours, settings()) as sender, rank(theirs, settings()) as receiver:
        transfer(sender, ours, receiver, (1,), (1,))  # so that the session is there
        said, send = list[bytes](), Post.send

        def noted(post: Post, data: bytes) -> None:
            said.append(data)
            send(post, data)

        monkeypatch.setattr(Post, "send", noted)
        report = transfer(sender, ours, receiver, range(8), range(8))
    assert report.chunks > 1
    kinds = [[type(each) for each in MessageSplitter(FROM_SENDER).feed(data)] for data in said]
    assert kinds == [[SendBegin, *[ReadDescriptors] * report.chunks], [SendEnd]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_in_place_is_not_written_again_by_a_send_that_covers_it(backend: str) -> None:
    first, second, theirs = (filled(3, 8, KIB, seed) for seed in (1, 2, 3))
    with (
        rank(first, settings(backend)) as one,
        rank(second, settings(backend)) as other,
        rank(theirs, settings(backend)) as receiver,
    ):
        lease = grant(receiver, (0, 1, 2))
        for sender, region, slots in ((one, first, 2), (other, second, 3)):
            send = Send(sender, receiver.addresses, lease, whole(region))
            send.push(range(3), (4, 5, 6)[:slots])
            send.finish(slots * TOKENS)
            assert isinstance(send.wait(), SendReport)
        assert receiver.grants.revoke(lease) == 3 * TOKENS
        for layer in range(3):
            assert theirs.blocks(layer, 0, 2) == first.blocks(layer, 4, 2)
            assert theirs.blocks(layer, 2) == second.blocks(layer, 6)


@pytest.mark.parametrize(("local", "chunks"), [(True, 2), (False, 6)])
def test_chunks_are_longer_within_a_machine(local: bool, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "LOCAL_CHUNK_BYTES", 3 * 1024 * KIB)
    monkeypatch.setattr(tcp, "LONGEST_CHUNK_BYTES", 1024 * KIB)
    ours, theirs = filled(2, 6, 512 * KIB, 1), filled(2, 6, 512 * KIB, 2)
    with rank(ours, settings()) as sender, rank(theirs, settings()) as receiver:
        with monkeypatch.context() as patch:
            patch.setattr(peer, "is_local", lambda _: local)
            transfer(sender, ours, receiver, (0,), (0,))  # so that it is known
        assert transfer(sender, ours, receiver, range(6), range(6)).chunks == chunks
        assert content(theirs) == content(ours)


@pytest.mark.parametrize("longest", [1024 * KIB, 3 * 1024 * KIB])
def test_a_receiver_says_how_long_chunks_may_be(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_rank, "Welcome", lambda name, proof, _longest: Welcome(name, proof, longest))
    ours, theirs = filled(2, 6, 512 * KIB, 1), filled(2, 6, 512 * KIB, 2)
    with rank(ours, settings()) as sender, rank(theirs, settings()) as receiver:
        transfer(sender, ours, receiver, (0,), (0,))  # so that it is known
        report = transfer(sender, ours, receiver, range(6), range(6))
        assert report.chunks == 6 * 1024 * KIB // longest
        assert content(theirs) == content(ours)
