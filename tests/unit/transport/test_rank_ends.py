"""How sends end: cancelled, revoked, closed; each once, and with everything given back."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tercet.protocol import TransferFailed
from tercet.transport import (
    SendDestination,
    SendReport,
)
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
