"""A rank's transport as a whole: KV byte for byte, by every backend, with everything given back."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tercet.protocol import BadRequest, Conflict, EngineError, KVLayout, TransferFailed
from tercet.transport import (
    BlockShape,
    Grant,
    KVRegion,
    RankTransport,
    SendReport,
    Strip,
    Target,
    TransportSettings,
    routes,
)
from tests.unit.transport.ranks import (
    SECONDS,
    TOKENS,
    Held,
    Send,
    content,
    expected_after,
    filled,
    grant,
    new_lease,
    rank,
    settle,
    transfer,
    whole,
)

BACKENDS = ["host", "tcp"]
STREAMS = [1, 2, 4]
KIB = 1024
TOKEN_BYTES = 192  # of one layer: a small model's
SCATTERED = ((31, 2, 17, 3, 38), (5, 39, 0, 22, 21))
ADJACENT = (tuple(range(4, 20)), tuple(range(11, 27)))
NOW = ("connections", "sessions_in", "sessions_out", "sends_active", "leases_open", "receives_active")


def settings(backend: str = "tcp", **changes: Any) -> TransportSettings:
    return TransportSettings(backend, **changes)


def idle(*ranks: RankTransport) -> None:
    """Nothing of a send is left anywhere, though sessions may stay."""
    for each in ranks:
        settle(lambda each=each: not any(each.counters()[name] for name in ("sends_active", "receives_active")))


# ---- bytes ---------------------------------------------------------------------------------------------------


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
        assert sender.transport_to(receiver.addresses) == backend
        by_reference = receiver.counters()["pieces_by_reference"]
        assert by_reference == (0 if backend == "tcp" else report.pieces)
        idle(sender, receiver)


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
        assert report.pieces >= (10 if backend == "tcp" else 2)


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
                assert receiver.revoke(lease) == 8 * TOKENS
            assert content(theirs) == expected
        assert receiver.counters()["sessions_in"] == sender.counters()["sessions_out"] == 1
        assert receiver.counters()["claims_accepted"] == sender.counters()["sends_done"] == rounds * at_once
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


@pytest.mark.parametrize("degrees", [(1, 2), (2, 1), (2, 2), (1, 1), (4, 1), (1, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_head_finds_its_rank(backend: str, degrees: tuple[int, int]) -> None:
    sources, targets = SCATTERED
    source, target = layout(degrees[0]), layout(degrees[1])
    ours = [filled(3, 40, source.block_bytes, 10 + number) for number in range(degrees[0])]
    theirs = [filled(3, 40, target.block_bytes, 20 + number) for number in range(degrees[1])]
    senders = [RankTransport(region, "tp", settings(backend)) for region in ours]
    receivers = [RankTransport(region, "tp", settings(backend)) for region in theirs]
    end, lease = len(targets) * TOKENS, new_lease()
    try:
        for receiver in receivers:
            receiver.grant(Grant(lease, targets, 0, end, TOKENS))
        sends = [
            Send(sender, receivers[route.receiver].addresses, lease, route.strip)
            for number, sender in enumerate(senders)
            for route in routes(source, target, number)
        ]
        for send in sends:
            send.push(range(3), sources)
            send.finish(end)
        for send in sends:
            assert isinstance(send.wait(), SendReport)
        assert [receiver.revoke(lease) for receiver in receivers] == [end] * degrees[1]
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
        send = Send(sender, receiver.addresses, lease, Strip(0, 8 * KIB, 0, 2))
        send.push(range(3), SCATTERED[0])
        send.finish(len(SCATTERED[0]) * TOKENS)
        assert isinstance(send.wait(), SendReport)
        assert receiver.revoke(lease) == 0


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


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (16, 128), (128, 16), (48, 32)], ids=str)
@pytest.mark.parametrize("streams", [1, 4])
def test_blocks_of_another_size_go_over_tcp_token_for_token(sizes: tuple[int, int], streams: int) -> None:
    heads, size, item, total = 2, 8, 2, 384
    here, there = (BlockShape(tokens, heads, size, item) for tokens in sizes)
    ours = filled(2, total // here.tokens + 3, here.block_bytes, 1)
    theirs = filled(2, total // there.tokens + 3, there.block_bytes, 2)
    sources = list(reversed(range(1, 1 + total // here.tokens)))
    targets = [*range(2, 2 + total // there.tokens, 2), *range(3, 2 + total // there.tokens, 2)]
    auto = settings("auto", streams=streams)
    with rank(ours, auto, block=here) as sender, rank(theirs, auto, block=there) as receiver:
        untouched = bytes(theirs.blocks(0, 0, 2)), bytes(theirs.blocks(1, theirs.shape.num_blocks - 1))
        lease = grant(receiver, targets, there.tokens)
        send = Send(sender, receiver.addresses, lease, whole(ours))
        send.push(range(2), sources)
        send.finish(total)
        assert isinstance(send.wait(), SendReport)
        assert sender.transport_to(receiver.addresses) == "tcp"
        assert receiver.revoke(lease) == total
        for layer in range(2):
            assert tokens_of(theirs, there, layer, targets) == tokens_of(ours, here, layer, sources)
        assert (bytes(theirs.blocks(0, 0, 2)), bytes(theirs.blocks(1, theirs.shape.num_blocks - 1))) == untouched


# ---- addresses -----------------------------------------------------------------------------------------------


def test_every_host_is_used() -> None:
    ours, theirs = filled(4, 16, 256 * KIB, 1), filled(4, 16, 256 * KIB, 2)
    hosts = ("127.0.0.1", "127.0.0.2")
    expected = expected_after(content(theirs), ours, range(16), range(16))
    with rank(ours, settings(streams=4)) as sender, rank(theirs, settings(hosts=hosts)) as receiver:
        assert [address.rpartition(":")[0] for address in receiver.addresses] == [f"tcp://{host}" for host in hosts]
        transfer(sender, ours, receiver, range(16), range(16))
        ports = {int(address.rpartition(":")[2]) for address in receiver.addresses}
        settle(lambda: receiver.counters()["connections"] == 4)
        assert established(ports) == dict.fromkeys(ports, 2)
        assert content(theirs) == expected


def established(ports: set[int]) -> dict[int, int]:
    """How many connections this machine's listeners at ``ports`` have."""
    found = dict.fromkeys(ports, 0)
    with open("/proc/net/tcp", encoding="ascii") as table:
        next(table)
        for line in table:
            _, local, _, state, *_ = line.split()
            port = int(local.rpartition(":")[2], 16)
            if port in ports and state == "01":
                found[port] += 1
    return found


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def test_a_busy_port_is_skipped_and_when_all_are_it_says_so() -> None:
    region = filled(1, 4, KIB, 1)
    free, *_ = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = taken.getsockname()[1]
        before = Held()
        with pytest.raises(EngineError, match=f"ports: none is free for 127.0.0.1 in {busy} to {busy}"):
            RankTransport(region, "f", settings(ports=(busy,)))
        before.require_back()
        with rank(region, settings(ports=(busy, free))) as transport:
            assert transport.addresses == (f"tcp://127.0.0.1:{free}",)


@pytest.mark.parametrize("ports", [(), (40000, 40001)], ids=["any port", "a list"])
def test_a_host_that_cannot_be_bound_is_named_and_nothing_stays_open(ports: tuple[int, ...]) -> None:
    region = filled(1, 4, KIB, 1)
    before = Held(region)
    with pytest.raises(EngineError, match=r"hosts: 192\.0\.2\.1 is no address of this machine"):
        RankTransport(region, "f", settings("auto", hosts=("127.0.0.1", "192.0.2.1"), ports=ports))
    region.close()
    before.require_back()


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"hosts": ()}, "hosts"),
        ({"ports": (0,)}, "ports"),
        ({"ports": (65536,)}, "ports"),
        ({"streams": 0}, "streams"),
        ({"streams": 65}, "streams"),
        ({"timeout": 0.0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest, match=param) as caught:
        settings(**changes)
    assert caught.value.param == param


def test_a_transport_that_there_is_not_is_named() -> None:
    region = filled(1, 4, KIB, 1)
    with pytest.raises(BadRequest, match="there is no 'pigeon'; choose auto, tcp, host"):
        RankTransport(region, "f", settings("pigeon"))
    region.close()


# ---- peers that do not agree ---------------------------------------------------------------------------------


def outcome_between(ours: RankTransport, source: KVRegion, theirs: RankTransport) -> SendReport | Exception:
    lease = grant(theirs, (0, 1))
    send = Send(ours, theirs.addresses, lease, whole(source))
    send.push(range(source.num_layers), (2, 3))
    send.finish(2 * TOKENS)
    outcome = send.wait()
    theirs.revoke(lease)
    idle(ours, theirs)
    return outcome


def test_an_equal_secret_opens_the_door() -> None:
    ours, theirs = filled(2, 4, KIB, 1), filled(2, 4, KIB, 2)
    with rank(ours, settings(secret="s")) as sender, rank(theirs, settings(secret="s")) as receiver:
        assert isinstance(outcome_between(sender, ours, receiver), SendReport)


@pytest.mark.parametrize("secrets", [("one", "other"), ("", "other"), ("one", "")], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_another_secret_is_refused(backend: str, secrets: tuple[str, str]) -> None:
    ours, theirs = filled(2, 4, KIB, 1), filled(2, 4, KIB, 2)
    before = content(theirs)
    first, second = (settings(backend, secret=secret) for secret in secrets)
    with rank(ours, first) as sender, rank(theirs, second) as receiver:
        outcome = outcome_between(sender, ours, receiver)
        assert isinstance(outcome, TransferFailed)
        assert "secret: the sender does not know this fleet's secret" in outcome.message
        assert receiver.counters()["connections_refused"] == 1
        assert content(theirs) == before
        settle(lambda: receiver.counters()["connections"] == 0)


def test_another_layout_is_refused_with_the_reason() -> None:
    ours, theirs = filled(2, 4, KIB, 1), filled(2, 4, KIB, 2)
    before = content(theirs)
    with rank(ours, fingerprint="one") as sender, rank(theirs, fingerprint="other") as receiver:
        outcome = outcome_between(sender, ours, receiver)
        assert isinstance(outcome, TransferFailed)
        assert "layout: the sender's KV layout is another one" in outcome.message
        assert content(theirs) == before


def test_a_transport_that_only_one_side_allows_is_refused_with_the_reason() -> None:
    ours, theirs = filled(2, 4, KIB, 1), filled(2, 4, KIB, 2)
    with rank(ours, settings("tcp")) as sender, rank(theirs, settings("host")) as receiver:
        outcome = outcome_between(sender, ours, receiver)
        assert isinstance(outcome, TransferFailed)
        assert "host: the sender does not offer it; tcp: not allowed" in outcome.message
        assert sender.transport_to(receiver.addresses) is None


@pytest.mark.parametrize("address", ["", "127.0.0.1:1", "http://127.0.0.1:1", "tcp://:1", "tcp://127.0.0.1:65536"])
def test_an_address_that_is_none_fails_its_send(address: str) -> None:
    ours = filled(2, 4, KIB, 1)
    with rank(ours) as sender:
        outcome = Send(sender, (address,), new_lease(), whole(ours)).wait()
        assert isinstance(outcome, TransferFailed)
        assert "is not tcp://host:port" in outcome.message
        idle(sender)


def test_nobody_there_fails_the_send_and_a_later_one_tries_again() -> None:
    ours, theirs = filled(2, 4, KIB, 1), filled(2, 4, KIB, 2)
    (port,) = free_ports(1)
    with rank(ours) as sender:
        outcome = Send(sender, (f"tcp://127.0.0.1:{port}",), new_lease(), whole(ours)).wait()
        assert isinstance(outcome, TransferFailed)
        settle(lambda: sender.counters()["sessions_out"] == 0)
        with rank(theirs, settings(ports=(port,))) as receiver:
            assert isinstance(outcome_between(sender, ours, receiver), SendReport)


def test_one_wrong_address_among_several_fails_the_send_soon() -> None:
    ours, theirs = filled(2, 4, KIB, 1), filled(2, 4, KIB, 2)
    (port,) = free_ports(1)
    with rank(ours, settings(streams=2)) as sender, rank(theirs) as receiver:
        send = Send(sender, (*receiver.addresses, f"tcp://127.0.0.1:{port}"), grant(receiver, (0,)), whole(ours))
        assert isinstance(send.wait(), TransferFailed)
        idle(sender, receiver)


# ---- wrong input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lease", ["", "0" * 31, "0" * 33, "G" * 32, "A" * 32])
def test_a_lease_that_is_none_fails_its_send_alone(lease: str) -> None:
    ours, theirs = filled(2, 40, KIB, 1), filled(2, 40, KIB, 2)
    with rank(ours) as sender, rank(theirs) as receiver:
        assert isinstance(Send(sender, receiver.addresses, lease, whole(ours)).wait(), BadRequest)
        transfer(sender, ours, receiver, *SCATTERED)


STRIPS = [Strip(0, 0), Strip(-1, KIB), Strip(1, KIB), Strip(0, KIB + 1), Strip(0, KIB, 1, 1), Strip(0, KIB, -1, 2)]


@pytest.mark.parametrize("strip", STRIPS, ids=str)
def test_a_strip_that_is_none_fails_its_send_alone(strip: Strip) -> None:
    ours, theirs = filled(2, 40, KIB, 1), filled(2, 40, KIB, 2)
    with rank(ours) as sender, rank(theirs) as receiver:
        assert isinstance(Send(sender, receiver.addresses, new_lease(), strip).wait(), BadRequest)
        transfer(sender, ours, receiver, *SCATTERED)


@pytest.mark.parametrize(("layer", "slot", "block"), [(-1, 0, 0), (2, 0, 0), (0, -1, 0), (0, 0, -1), (0, 0, 40)])
def test_a_push_of_what_is_not_there_fails_its_send_alone(layer: int, slot: int, block: int) -> None:
    ours, theirs = filled(2, 40, KIB, 1), filled(2, 40, KIB, 2)
    with rank(ours) as sender, rank(theirs) as receiver:
        wrong = Send(sender, receiver.addresses, grant(receiver, (0, 1)), whole(ours))
        wrong.push([layer], [1, block], slot)
        assert isinstance(wrong.wait(), BadRequest)
        transfer(sender, ours, receiver, *SCATTERED)
        assert len(wrong.outcomes) == 1


@pytest.mark.parametrize(("begin", "end"), [(-1, 16), (16, 0), (0, 2**32)])
def test_a_claim_of_no_range_fails_its_send_alone(begin: int, end: int) -> None:
    ours, theirs = filled(2, 40, KIB, 1), filled(2, 40, KIB, 2)
    with rank(ours) as sender, rank(theirs) as receiver:
        wrong = Send(sender, receiver.addresses, grant(receiver, (0, 1)), whole(ours))
        wrong.finish(end, begin)
        assert isinstance(wrong.wait(), BadRequest)
        transfer(sender, ours, receiver, *SCATTERED)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_claim_without_a_layer_is_refused_and_makes_nothing_valid(backend: str) -> None:
    ours, theirs = filled(3, 40, KIB, 1), filled(3, 40, KIB, 2)
    with rank(ours, settings(backend)) as sender, rank(theirs, settings(backend)) as receiver:
        lease = grant(receiver, (0, 1))
        send = Send(sender, receiver.addresses, lease, whole(ours))
        send.push([0, 2], (4, 5))
        send.finish(2 * TOKENS)
        outcome = send.wait()
        assert isinstance(outcome, TransferFailed)
        assert "lacks 1 of 3 layers" in outcome.message
        assert receiver.revoke(lease) == 0
        assert receiver.counters()["claims_refused"] == 1
        transfer(sender, ours, receiver, *SCATTERED)


def test_a_send_id_names_one_send() -> None:
    ours, theirs = filled(2, 4, KIB, 1), filled(2, 4, KIB, 2)
    with rank(ours) as sender, rank(theirs) as receiver:
        first = Send(sender, receiver.addresses, grant(receiver, (0,)), whole(ours))
        outcomes: list[object] = []
        sender.open(first.send_id, Target(receiver.addresses, new_lease(), whole(ours)), outcomes.append)
        assert isinstance(outcomes[0], Conflict)
        first.push(range(2), [1])
        first.finish(TOKENS)
        assert isinstance(first.wait(), SendReport)


# ---- ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "half-way", "claimed", "after"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_after_a_cancel_the_kv_is_not_read(backend: str, when: str) -> None:
    layers = 4
    ours, theirs = filled(layers, 32, 64 * KIB, 1), filled(layers, 32, 64 * KIB, 2)
    blocks, allowed = range(32), (content(ours), content(theirs))
    with rank(ours, settings(backend)) as sender, rank(theirs, settings(backend)) as receiver:
        lease = grant(receiver, blocks)
        send = Send(sender, receiver.addresses, lease, whole(ours))
        if when != "before":
            send.push(range(layers if when != "half-way" else 2), blocks)
        if when in ("claimed", "after"):
            send.finish(32 * TOKENS)
        if when == "after":
            assert isinstance(send.wait(), SendReport)
        send.cancel()
        for layer in range(layers):  # whoever reads it now would send this
            ours.blocks(layer, 0, 32)[:] = b"\0" * (32 * 64 * KIB)
        send.push(range(layers), blocks)
        send.finish(32 * TOKENS)
        settle(lambda: send.outcomes)
        idle(sender)
        valid = receiver.revoke(lease)
        # Backends that read may have copied what is not pinned any more, but do not count it.
        if backend == "tcp":
            for layer, (sent, old) in enumerate(zip(*allowed, strict=True)):
                for block, now in enumerate(blocks_of(theirs, layer)):
                    assert now in (cut(sent, block), cut(old, block)), (layer, block)
        if when == "after":
            assert (valid, content(theirs)) == (32 * TOKENS, allowed[0])
        elif isinstance(send.outcomes[0], SendReport):  # it was acknowledged before it was cancelled
            assert (when, valid, content(theirs)) == ("claimed", 32 * TOKENS, allowed[0])
        elif valid:  # the acknowledgement was on its way
            assert (when, content(theirs)) == ("claimed", allowed[0])
        assert len(send.outcomes) == 1
        idle(receiver)


def blocks_of(region: KVRegion, layer: int) -> list[bytes]:
    return [bytes(region.blocks(layer, block)) for block in range(region.shape.num_blocks)]


def cut(layer: bytes, block: int) -> bytes:
    return layer[block * 64 * KIB : (block + 1) * 64 * KIB]


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_a_revocation_nothing_is_written_and_the_sender_hears_of_it(backend: str) -> None:
    layers, blocks = 8, range(32)
    ours, theirs = filled(layers, 32, 64 * KIB, 1), filled(layers, 32, 64 * KIB, 2)
    with rank(ours, settings(backend)) as sender, rank(theirs, settings(backend)) as receiver:
        for wait_for in (0, 1, 3, 6):
            lease, begun = grant(receiver, blocks), receiver.counters()["pieces_received"]
            send = Send(sender, receiver.addresses, lease, whole(ours))
            pusher = threading.Thread(target=send.push, args=(range(layers), blocks))
            pusher.start()
            settle(lambda least=begun + wait_for: receiver.counters()["pieces_received"] >= least)
            assert receiver.revoke(lease) == 0
            for layer in range(layers):  # they belong to somebody else from now on
                theirs.blocks(layer, 0, 32)[:] = bytes([layer]) * (32 * 64 * KIB)
            pusher.join(SECONDS)
            send.finish(32 * TOKENS)
            outcome = send.wait()
            assert isinstance(outcome, TransferFailed)
            assert "has ended" in outcome.message
            idle(sender, receiver)
            assert content(theirs) == [bytes([layer]) * (32 * 64 * KIB) for layer in range(layers)]


@pytest.mark.parametrize("whose", ["sender", "receiver"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_close_with_sends_under_way_ends_each_once(backend: str, whose: str) -> None:
    layers, blocks = 4, range(32)
    ours, theirs = filled(layers, 32, 64 * KIB, 1), filled(layers, 32, 64 * KIB, 2)
    before = Held(ours, theirs)
    with rank(ours, settings(backend, streams=4)) as sender, rank(theirs, settings(backend)) as receiver:
        sends = [Send(sender, receiver.addresses, grant(receiver, blocks), whole(ours)) for _ in range(6)]
        for send in sends:
            send.push(range(layers), blocks)
        (sender if whose == "sender" else receiver).close()
        for send in sends:
            assert isinstance(send.wait(), TransferFailed)
            send.finish(32 * TOKENS)
        idle(sender, receiver)
        settle(lambda: sender.counters()["sessions_out"] == receiver.counters()["sessions_in"] == 0)
        assert [len(send.outcomes) for send in sends] == [1] * 6
        assert sender.counters()["sends_failed"] == 6
        late = Send(sender, receiver.addresses, new_lease(), whole(ours))
        assert isinstance(late.wait(), TransferFailed)
    before.require_back()


@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_is_given_back(backend: str) -> None:
    ours, theirs = filled(2, 40, KIB, 1), filled(2, 40, KIB, 2)
    before = Held(ours, theirs)
    with rank(ours, settings(backend, streams=4)) as sender, rank(theirs, settings(backend)) as receiver:
        transfer(sender, ours, receiver, *SCATTERED)
        sender.close()
        for each in (sender, receiver):
            settle(lambda each=each: not any(each.counters()[name] for name in NOW))
    before.require_back()


def test_a_caller_that_fails_to_take_its_answer_harms_nobody() -> None:
    ours, theirs = filled(2, 40, KIB, 1), filled(2, 40, KIB, 2)

    def fail(_: object) -> None:
        raise RuntimeError("the caller's own")

    with rank(ours) as sender, rank(theirs) as receiver:
        lease = grant(receiver, (0,))
        sender.open("failing", Target(receiver.addresses, lease, whole(ours)), fail)
        for layer in range(2):
            sender.push("failing", layer, 0, [1])
        sender.finish("failing", 0, TOKENS)
        idle(sender)
        transfer(sender, ours, receiver, *SCATTERED)
        assert sender.counters()["sessions_lost"] == 0


def test_a_callback_may_cancel_another_send_of_the_same_peer() -> None:
    ours, theirs = filled(2, 40, KIB, 1), filled(2, 40, KIB, 2)
    with rank(ours, settings(streams=1)) as sender, rank(theirs) as receiver:
        other = Send(sender, receiver.addresses, grant(receiver, (2, 3)), whole(ours))
        ended = threading.Event()

        def cancel_other(_: object) -> None:
            other.cancel()
            ended.set()

        sender.open("first", Target(receiver.addresses, grant(receiver, (0, 1)), whole(ours)), cancel_other)
        for layer in range(2):  # one batch has frames of both
            sender.push("first", layer, 0, [4, 5])
            other.push([layer], [6, 7])
        sender.cancel("first")
        assert ended.wait(SECONDS)
        assert isinstance(other.wait(), TransferFailed)
        assert sender.counters()["sessions_lost"] == 0
        transfer(sender, ours, receiver, *SCATTERED)


def test_a_receiver_that_cannot_take_a_claim_says_so() -> None:
    def fail(_lease: str, _end: int) -> None:
        raise RuntimeError("the receiver's own")

    ours, theirs = filled(2, 40, KIB, 1), filled(2, 40, KIB, 2)
    with rank(ours) as sender, rank(theirs, on_finished=fail) as receiver:
        outcome = outcome_between(sender, ours, receiver)
        assert isinstance(outcome, TransferFailed)
        assert "could not take the claim" in outcome.message


def test_the_receiver_hears_of_a_claim_before_the_sender_does() -> None:
    heard: list[tuple[str, int]] = []
    ours, theirs = filled(2, 40, KIB, 1), filled(2, 40, KIB, 2)
    with rank(ours) as sender, rank(theirs, on_finished=lambda lease, end: heard.append((lease, end))) as receiver:
        lease = grant(receiver, (0, 1))
        send = Send(sender, receiver.addresses, lease, whole(ours))
        send.push(range(2), (2, 3))
        send.finish(2 * TOKENS)
        send.wait()
        assert heard == [(lease, 2 * TOKENS)]


def test_unknown_sends_are_fine() -> None:
    ours = filled(2, 4, KIB, 1)
    with rank(ours) as sender:
        sender.push("nobody", 0, 0, [1])
        sender.finish("nobody", 0, TOKENS)
        sender.cancel("nobody")
        idle(sender)
