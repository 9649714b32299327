"""Ranks in real processes that are killed and stopped at every stage; the other side goes on, and keeps nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from tercet.protocol import TransferFailed
from tercet.transport import KVRegion, RankTransport, TransportSettings
from tercet.transport.sockets import parse_address
from tests.unit.transport.ranks import (
    SECONDS,
    TOKENS,
    Held,
    RankProcess,
    Send,
    content,
    filled,
    grant,
    rank,
    rank_process,
    settle,
    transfer,
    transport_to,
    whole,
)

BACKENDS = ["host", "tcp"]
KIB = 1024
LAYERS, BLOCKS, BYTES = 4, 16, 32 * KIB
LARGE = 512 * KIB  # per block: all of it is more than sockets hold
ALL = tuple(range(BLOCKS))
END = BLOCKS * TOKENS
OPEN = ("connections", "sessions_in", "receives_active")


@pytest.fixture(autouse=True, scope="module")
def _server_of_processes() -> None:
    """What starts processes holds descriptors of its own; it has them before any are counted."""
    with rank_process(TransportSettings("tcp"), 1, 1, KIB):
        pass


def settings(backend: str, timeout: float = SECONDS) -> TransportSettings:
    return TransportSettings(backend, timeout=timeout)


def failed(send: Send) -> str:
    outcome = send.wait()
    assert isinstance(outcome, TransferFailed), outcome
    assert len(send.outcomes) == 1
    return outcome.message


def receives_as_before(ours: RankTransport, backend: str) -> None:
    source = filled(LAYERS, BLOCKS, BYTES, 9)
    with rank(source, settings(backend)) as sender:
        transfer(sender, source, ours, ALL, tuple(reversed(ALL)))


def sends_as_before(ours: RankTransport, source: KVRegion, backend: str) -> None:
    with rank(filled(LAYERS, BLOCKS, BYTES, 9), settings(backend)) as receiver:
        transfer(ours, source, receiver, ALL, tuple(reversed(ALL)))


# ---- kill -9 of the sender -----------------------------------------------------------------------------------


def _before_hello(child: RankProcess, ours: RankTransport, _lease: str) -> None:
    child.call("connect", *parse_address(ours.addresses[0]))
    settle(lambda: ours.counters()["connections"] == 1)


def _after_welcome(child: RankProcess, ours: RankTransport, lease: str) -> None:
    child.call("open", ours.addresses, lease)
    settle(lambda: ours.counters()["sessions_in"] == 1)


def _after_two_layers(child: RankProcess, ours: RankTransport, lease: str) -> None:
    _after_welcome(child, ours, lease)
    child.call("push", (0, 1), ALL)
    settle(lambda: ours.counters()["bytes_received"] == 2 * BLOCKS * BYTES)


def _before_finish(child: RankProcess, ours: RankTransport, lease: str) -> None:
    _after_two_layers(child, ours, lease)
    child.call("push", (2, 3), ALL)
    settle(lambda: ours.counters()["bytes_received"] == LAYERS * BLOCKS * BYTES)


def _after_finish(child: RankProcess, ours: RankTransport, lease: str) -> None:
    _before_finish(child, ours, lease)
    child.call("finish", END)
    settle(lambda: ours.counters()["receives_done"] == 1)


Stage = Callable[[RankProcess, RankTransport, str], None]
SENDER_STAGES: list[Stage] = [_before_hello, _after_welcome, _after_two_layers, _before_finish, _after_finish]


@pytest.mark.slow
@pytest.mark.parametrize("reach", SENDER_STAGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_of_a_killed_sender_whole_blocks_are_kept(backend: str, reach: Stage) -> None:
    region = filled(LAYERS, BLOCKS, BYTES, 1)
    heard: list[tuple[str, int]] = []
    with rank(region, settings(backend), on_filled=lambda *told: heard.append(told)) as ours:
        before, lease = Held(), grant(ours, ALL)
        with rank_process(settings(backend), LAYERS, BLOCKS, BYTES) as child:
            reach(child, ours, lease)
            sent = child.call("content")
        settle(lambda: not any(ours.counters()[name] for name in OPEN))
        assert ours.counters()["receives_dropped"] == (reach in (_after_two_layers, _before_finish))
        complete = reach in (_before_finish, _after_finish)
        assert ours.grants.revoke(lease) == (END if complete else 0)
        if complete:
            assert content(region) == sent
            assert heard[-1] == (lease, END), "before anybody asks"
        before.require_back()
        receives_as_before(ours, backend)


# ---- kill -9 of the receiver ---------------------------------------------------------------------------------


def _reach(child: RankProcess, send: Send, stage: str) -> None:
    """Have a send to a child come to a stage."""
    if stage == "before it was welcome":
        child.stop()
        send.push(range(LAYERS), ALL)
        send.finish(END)
        return
    layers = {"after welcome": 0, "after two layers": 2}.get(stage, LAYERS)
    send.push(range(layers), ALL)
    settle(lambda: child.call("counters")["sessions_in"] == 1)
    settle(lambda: child.call("counters")["bytes_received"] == layers * BLOCKS * BYTES)
    if stage == "claimed":
        child.stop()
        send.finish(END)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage", ["before it was welcome", "after welcome", "after two layers", "before finish", "claimed"]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_receiver_fails_the_send(backend: str, stage: str) -> None:
    region = filled(LAYERS, BLOCKS, BYTES, 1)
    with rank(region, settings(backend)) as ours:
        before = Held()
        with rank_process(settings(backend), LAYERS, BLOCKS, BYTES) as child:
            send = Send(ours, child.addresses, child.call("grant", ALL), whole(region))
            _reach(child, send, stage)
        assert "the connection to the receiver" in failed(send)
        settle(lambda: not any(ours.counters()[name] for name in ("sends_active", "sessions_out")))
        assert ours.counters()["sessions_lost"] == 1
        before.require_back()
        sends_as_before(ours, region, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_receiver_that_is_killed_after_the_acknowledgement_costs_nothing(backend: str) -> None:
    region = filled(LAYERS, BLOCKS, BYTES, 1)
    with rank(region, settings(backend)) as ours:
        before = Held()
        with rank_process(settings(backend), LAYERS, BLOCKS, BYTES) as child:
            send = Send(ours, child.addresses, child.call("grant", ALL), whole(region))
            _reach(child, send, "before finish")
            send.finish(END)
            assert not isinstance(send.wait(), TransferFailed)
        settle(lambda: ours.counters()["sessions_out"] == 0)
        assert ours.counters()["sends_failed"] == 0
        assert "refused" in failed(Send(ours, child.addresses, "0" * 32, whole(region)))
        before.require_back()


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_many_sends_only_those_to_a_killed_receiver_fail(backend: str) -> None:
    region, others = filled(LAYERS, BLOCKS, BYTES, 1), filled(LAYERS, BLOCKS, BYTES, 2)
    with rank(region, settings(backend)) as ours, rank(others, settings(backend)) as receiver:
        with rank_process(settings(backend), LAYERS, BLOCKS, BYTES) as child:
            lost = [Send(ours, child.addresses, child.call("grant", ALL), whole(region)) for _ in range(5)]
            kept = Send(ours, receiver.addresses, grant(receiver, ALL), whole(region))
            for send in (*lost, kept):
                send.push((0, 1), ALL)
            settle(lambda: child.call("counters")["receives_active"] == 5)
        for send in lost:
            failed(send)
        kept.push((2, 3), ALL)
        kept.finish(END)
        assert not isinstance(kept.wait(), TransferFailed)
        assert content(others) == content(region)


# ---- SIGSTOP -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "size"), [("host", BYTES), ("tcp", BYTES), ("tcp", LARGE)])
def test_a_stopped_receiver_fails_its_own_sends_and_writes_nothing_under_a_revoked_lease(
    backend: str, size: int
) -> None:
    region, others = filled(LAYERS, BLOCKS, size, 1), filled(LAYERS, BLOCKS, size, 2)
    with (
        rank(region, settings(backend, timeout=1.0)) as ours,
        rank(others, settings(backend)) as receiver,
        rank_process(settings(backend), LAYERS, BLOCKS, size) as child,
    ):
        lease = child.call("grant", ALL)
        send = Send(ours, child.addresses, lease, whole(region))
        settle(lambda: transport_to(ours, child.addresses) == backend)
        child.stop()
        send.push(range(LAYERS), ALL)
        send.finish(END)
        while not send.outcomes:
            transfer(ours, region, receiver, ALL, ALL)
        failed(send)
        settle(lambda: ours.counters()["sessions_out"] == 1)

        child.ask("revoke", lease)
        child.go_on()
        _, then = child.answer()
        settle(lambda: child.call("counters")["connections"] == 0)
        assert child.call("content") == then
        transfer(ours, region, receiver, ALL, ALL)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "size"), [("host", BYTES), ("tcp", BYTES), ("tcp", LARGE)])
def test_what_a_stopped_sender_sends_later_is_refused(backend: str, size: int) -> None:
    region = filled(LAYERS, BLOCKS, size, 1)
    with rank(region, settings(backend)) as ours, rank_process(settings(backend), LAYERS, BLOCKS, size) as child:
        lease = grant(ours, ALL)
        child.call("open", ours.addresses, lease)
        child.call("push", range(LAYERS - 1), ALL)
        settle(lambda: ours.counters()["chunks_received"])
        child.stop()
        assert ours.grants.revoke(lease) == 0
        source = filled(LAYERS, BLOCKS, size, 2)
        with rank(source, settings(backend)) as another:
            transfer(another, source, ours, ALL, ALL)
        for layer in range(LAYERS):  # they belong to somebody else from now on
            region.blocks(layer, 0, BLOCKS)[:] = bytes([layer]) * (BLOCKS * size)
        child.go_on()
        child.call("push", (LAYERS - 1,), ALL)
        child.call("finish", END)
        assert "has ended" in child.call("wait")
        assert content(region) == [bytes([layer]) * (BLOCKS * size) for layer in range(LAYERS)]
        assert ours.counters()["receives_active"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cancel_towards_a_stopped_receiver_is_bounded_and_a_fence(backend: str) -> None:
    region = filled(LAYERS, BLOCKS, LARGE, 1)
    sent = content(region)
    with rank(region, settings(backend)) as ours, rank_process(settings(backend), LAYERS, BLOCKS, LARGE) as child:
        lease, old = child.call("grant", ALL), child.call("content")
        send = Send(ours, child.addresses, lease, whole(region))
        settle(lambda: transport_to(ours, child.addresses) == backend)
        child.stop()
        send.push(range(LAYERS), ALL)
        canceller = threading.Thread(target=send.cancel)
        canceller.start()
        canceller.join(SECONDS)
        assert not canceller.is_alive()
        for layer in range(LAYERS):
            region.blocks(layer, 0, BLOCKS)[:] = b"\xff" * (BLOCKS * LARGE)
        assert "cancelled" in failed(send)
        child.go_on()
        ours.close()
        settle(lambda: child.call("counters")["connections"] == 0)
        assert child.call("revoke", lease)[0] == 0
        if backend == "tcp":  # a backend that reads late copies what it finds, and drops it
            for now, new, before in zip(child.call("content"), sent, old, strict=True):
                found, either = np.frombuffer(now, "u1"), (np.frombuffer(new, "u1"), np.frombuffer(before, "u1"))
                # What is asked for after the cancel is answered with zeros.
                assert ((found == either[0]) | (found == either[1]) | (found == 0)).all()
