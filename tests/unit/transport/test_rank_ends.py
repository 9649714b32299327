"""How sends end: cancelled, revoked, closed; each once, and with everything given back."""

from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np
import pytest

from tercet.cluster.ports import free_ports
from tercet.protocol import BadRequest, Conflict, EngineError, TransferFailed
from tercet.transport import HeadSlice, RankTransport, SendDestination, SendReport
from tests.unit.transport.models import whose
from tests.unit.transport.ranks import (
    KIB,
    NOW,
    SCATTERED,
    SECONDS,
    TOKENS,
    Held,
    Send,
    content,
    expected_after,
    filled,
    grant,
    idle,
    new_lease,
    outcome_between,
    rank,
    settings,
    settle,
    transfer,
    transport_to,
    whole,
)

BACKENDS = ["host", "tcp"]
STREAMS = [1, 2, 4]


@pytest.mark.slow
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
            ours.blocks(layer, 0, 32)[:] = b"\xff" * (32 * 64 * KIB)
        send.push(range(layers), blocks)
        send.finish(32 * TOKENS)
        settle(lambda: send.outcomes)
        idle(sender)
        valid = receiver.grants.revoke(lease)
        # Backends that read by themselves may have copied what is not pinned any more, but do not count it. Over tcp
        # what is asked for after the cancel is answered with zeros.
        if backend == "tcp":
            for now, sent, old in zip(content(theirs), *allowed, strict=True):
                found, new, before = (np.frombuffer(each, "u1") for each in (now, sent, old))
                assert ((found == new) | (found == before) | (found == 0)).all()
        if when == "after":
            assert (valid, content(theirs)) == (32 * TOKENS, allowed[0])
        elif isinstance(send.outcomes[0], SendReport):  # it was acknowledged before it was cancelled
            assert (when, valid, content(theirs)) == ("claimed", 32 * TOKENS, allowed[0])
        elif valid:  # the acknowledgement was on its way
            assert (when, content(theirs)) == ("claimed", allowed[0])
        assert len(send.outcomes) == 1
        idle(receiver)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_after_a_revocation_nothing_is_written_and_the_sender_hears_of_it(backend: str) -> None:
    layers, blocks = 8, range(32)
    ours, theirs = filled(layers, 32, 64 * KIB, 1), filled(layers, 32, 64 * KIB, 2)
    with rank(ours, settings(backend)) as sender, rank(theirs, settings(backend)) as receiver:
        for wait_for in (0, 1, 3, 6):
            lease, begun = grant(receiver, blocks), receiver.counters()["chunks_received"]
            send = Send(sender, receiver.addresses, lease, whole(ours))
            pusher = threading.Thread(target=send.push, args=(list(range(layers)), blocks))
            pusher.start()
            settle(lambda least=begun + wait_for: receiver.counters()["chunks_received"] >= least)
            assert receiver.grants.revoke(lease) in range(0, 32 * TOKENS + 1, TOKENS)
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
        sender.sends.open("failing", lease, whose(TOKENS), [SendDestination(receiver.addresses, whole(ours))], fail)
        sender.sends.push("failing", range(2), 0, [1])
        sender.sends.finish("failing", 0, TOKENS)
        idle(sender)
        transfer(sender, ours, receiver, *SCATTERED)
        assert sender.counters()["sessions_lost"] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_callback_may_cancel_another_send_of_the_session(backend: str) -> None:
    ours, theirs = filled(2, 40, KIB, 1), filled(2, 40, KIB, 2)
    with rank(ours, settings(backend)) as sender, rank(theirs, settings(backend)) as receiver:
        before = Send(sender, receiver.addresses, grant(receiver, (4, 5)), whole(ours))
        before.push([0], (0, 1))
        settle(lambda: transport_to(sender, receiver.addresses) == backend)
        other = Send(sender, receiver.addresses, grant(receiver, (2, 3)), whole(ours))
        to = SendDestination(receiver.addresses, whole(ours))
        sender.sends.open("first", grant(receiver, (0, 1)), whose(2 * TOKENS), [to], lambda _: other.cancel())
        sender.sends.push("first", range(1), 0, [4, 5])
        other.push([0], (6, 7))
        sender.sends.push("first", range(-1, 0), 0, [0])
        outcome = other.wait()
        assert isinstance(outcome, TransferFailed)
        assert "cancelled" in outcome.message
        before.push([1], (0, 1))
        before.finish(2 * TOKENS)
        assert isinstance(before.wait(), SendReport)
        assert sender.counters()["sessions_lost"] == 0


def test_a_receiver_that_cannot_take_a_claim_says_so() -> None:
    def fail(_lease: str, _end: int) -> None:
        raise RuntimeError("the receiver's own")

    ours, theirs = filled(2, 40, KIB, 1), filled(2, 40, KIB, 2)
    with rank(ours) as sender, rank(theirs, on_filled=fail) as receiver:
        outcome = outcome_between(sender, ours, receiver)
        assert isinstance(outcome, TransferFailed)
        assert "could not accept the KV that arrived" in outcome.message


def test_the_receiver_hears_of_a_claim_before_the_sender_does() -> None:
    heard: list[tuple[str, int]] = []
    ours, theirs = filled(2, 40, KIB, 1), filled(2, 40, KIB, 2)
    with rank(ours) as sender, rank(theirs, on_filled=lambda lease, end: heard.append((lease, end))) as receiver:
        lease = grant(receiver, (0, 1))
        send = Send(sender, receiver.addresses, lease, whole(ours))
        send.push(range(2), (2, 3))
        send.finish(2 * TOKENS)
        send.wait()
        assert heard == [(lease, 2 * TOKENS)]


def test_unknown_sends_are_fine() -> None:
    ours = filled(2, 4, KIB, 1)
    with rank(ours) as sender:
        sender.sends.push("nobody", range(1), 0, [1])
        sender.sends.finish("nobody", 0, TOKENS)
        sender.sends.cancel("nobody")
        idle(sender)


# Ranks that cannot listen, do not find each other, or do not agree; and wrong input.

# ---- addresses -----------------------------------------------------------------------------------------------


def test_every_host_is_used() -> None:
    ours, theirs = filled(4, 16, 256 * KIB, 1), filled(4, 16, 256 * KIB, 2)
    hosts = ("127.0.0.1", "127.0.0.2")
    expected = expected_after(content(theirs), ours, range(16), range(16))
    with rank(ours, settings(streams=4)) as sender, rank(theirs, settings(hosts=hosts)) as receiver:
        assert [address.rpartition(":")[0] for address in receiver.addresses] == [f"tcp://{host}" for host in hosts]
        transfer(sender, ours, receiver, range(16), range(16))
        ports = {int(address.rpartition(":")[2]) for address in receiver.addresses}
        settle(lambda: receiver.counters()["connections"] == 5)
        assert sorted(established(ports).values()) == [2, 3]
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


def test_a_busy_port_is_skipped_and_when_all_are_it_says_so() -> None:
    region = filled(1, 4, KIB, 1)
    free, *_ = free_ports("127.0.0.1", 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = taken.getsockname()[1]
        before = Held()
        with pytest.raises(EngineError, match=f"ports: no port of {busy} to {busy} is free on 127.0.0.1"):
            RankTransport(region, "f", settings(ports=(busy,)))
        before.require_back()
        with rank(region, settings(ports=(busy, free))) as transport:
            assert transport.addresses == (f"tcp://127.0.0.1:{free}",)


@pytest.mark.parametrize("ports", [(), (40000, 40001)], ids=["any port", "a list"])
def test_a_host_that_cannot_be_bound_is_named_and_nothing_stays_open(ports: tuple[int, ...]) -> None:
    region = filled(1, 4, KIB, 1)
    before = Held(region)
    with pytest.raises(EngineError, match=r"hosts: 192\.0\.2\.1 is not an address of this machine"):
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
    with pytest.raises(BadRequest, match="'pigeon' is unknown; choose one of auto, tcp, host"):
        RankTransport(region, "f", settings("pigeon"))
    region.close()


# ---- peers that do not agree ---------------------------------------------------------------------------------


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
        assert "layout: the sender's KV layout differs from the receiver's" in outcome.message
        assert content(theirs) == before


def test_a_transport_that_only_one_side_allows_is_refused_with_the_reason() -> None:
    ours, theirs = filled(2, 4, KIB, 1), filled(2, 4, KIB, 2)
    with rank(ours, settings("tcp")) as sender, rank(theirs, settings("host")) as receiver:
        outcome = outcome_between(sender, ours, receiver)
        assert isinstance(outcome, TransferFailed)
        assert "host: the sender does not offer it" in outcome.message
        assert transport_to(sender, receiver.addresses) is None


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
    (port,) = free_ports("127.0.0.1", 1)
    with rank(ours) as sender:
        outcome = Send(sender, (f"tcp://127.0.0.1:{port}",), new_lease(), whole(ours)).wait()
        assert isinstance(outcome, TransferFailed)
        settle(lambda: sender.counters()["sessions_out"] == 0)
        with rank(theirs, settings(ports=(port,))) as receiver:
            assert isinstance(outcome_between(sender, ours, receiver), SendReport)


def test_one_wrong_address_among_several_fails_the_send_soon() -> None:
    ours, theirs = filled(2, 4, KIB, 1), filled(2, 4, KIB, 2)
    (port,) = free_ports("127.0.0.1", 1)
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


STRIPS = [
    HeadSlice(0, 0),
    HeadSlice(-1, KIB),
    HeadSlice(1, KIB),
    HeadSlice(0, KIB + 1),
    HeadSlice(0, KIB, 1, 1),
    HeadSlice(0, KIB, -1, 2),
]


@pytest.mark.parametrize("head_slice", STRIPS, ids=str)
def test_a_strip_that_is_none_fails_its_send_alone(head_slice: HeadSlice) -> None:
    ours, theirs = filled(2, 40, KIB, 1), filled(2, 40, KIB, 2)
    with rank(ours) as sender, rank(theirs) as receiver:
        assert isinstance(Send(sender, receiver.addresses, new_lease(), head_slice).wait(), BadRequest)
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
        assert receiver.grants.revoke(lease) == 0
        assert receiver.counters()["receives_refused"] == 1
        transfer(sender, ours, receiver, *SCATTERED)


def test_a_send_id_names_one_send() -> None:
    ours, theirs = filled(2, 4, KIB, 1), filled(2, 4, KIB, 2)
    with rank(ours) as sender, rank(theirs) as receiver:
        first = Send(sender, receiver.addresses, grant(receiver, (0,)), whole(ours))
        outcomes: list[object] = []
        sender.sends.open(
            first.send_id,
            new_lease(),
            whose(TOKENS),
            [SendDestination(receiver.addresses, whole(ours))],
            outcomes.append,
        )
        assert isinstance(outcomes[0], Conflict)
        first.push(range(2), [1])
        first.finish(TOKENS)
        assert isinstance(first.wait(), SendReport)
