"""Ranks that cannot listen, do not find each other, or do not agree; and wrong input."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from tercet.cluster.ports import free_ports
from tercet.protocol import BadRequest, Conflict, EngineError, TransferFailed
from tercet.transport import (
    HeadSlice,
    RankTransport,
    SendDestination,
    SendReport,
)
from tests.unit.transport.models import whose
from tests.unit.transport.ranks import (
    KIB,
    SCATTERED,
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
