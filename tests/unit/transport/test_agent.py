"""The agent process: KV from step notes, orders over the control channel, and an end that it shares with its worker."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from tercet.protocol import EngineError, packed
from tercet.transport import TransportSettings
from tercet.transport.agent import agent
from tercet.transport.agent.agent import COPY_PAST_THE_CACHES, TUNABLES, AgentProcess, AgentSetup, past_the_caches
from tercet.transport.agent.agent_messages import (
    AsyncControlClient,
    CancelSend,
    Command,
    ControlServer,
    GrantLease,
    LayersDone,
    LeaseFilled,
    Push,
    PushCached,
    ReadCounters,
    ReceiveDone,
    RevokeLease,
    SendComplete,
    SendDone,
)
from tests.unit.transport.agents import (
    ALL,
    BLOCKS,
    BYTES,
    END,
    LAYERS,
    BlockingClient,
    Edge,
    Rank,
    Worker,
    agents_of,
    edge,
    is_there,
    opening,
    rank,
    start,
    step,
    worker,
)
from tests.unit.transport.models import whose
from tests.unit.transport.ranks import SECONDS, TOKENS, Held, content, expected_after, filled, new_lease, settle

pytestmark = pytest.mark.slow

NOWHERE = ("tcp://127.0.0.1:1",)
HALF = BLOCKS // 2


@pytest.fixture
def inbox() -> Generator[Edge]:
    """An edge of one test: what is reported of another one's sends does not come here."""
    with edge() as found:
        yield found


@pytest.fixture(scope="module")
def source() -> Generator[Rank]:
    with rank(1) as found:
        yield found


@pytest.fixture(scope="module")
def target() -> Generator[Rank]:
    with rank(2) as found:
        yield found


def reports(inbox: Edge, count: int) -> tuple[list[SendDone], list[LeaseFilled]]:
    found = [inbox.next() for _ in range(count)]
    sent = [report for report in found if isinstance(report, SendDone)]
    return sent, [report for report in found if isinstance(report, LeaseFilled)]


# ---- KV ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_kv_of_a_step_arrives_and_both_edges_hear_of_it(source: Rank, target: Rank, inbox: Edge) -> None:
    lease, backwards = target.grant(inbox.address), tuple(reversed(ALL))
    expected = expected_after(content(target.region), source.region, backwards, ALL)
    opened = opening("one", lease, inbox.address, target.addresses)
    step(source.agent, [opened], [Push("one", 0, backwards)], [SendComplete("one", 0, END)])
    sent, filled_leases = reports(inbox, 2)
    assert filled_leases == [LeaseFilled(lease, 2, whose(END))]
    assert sent == [SendDone("one", 1, LAYERS * BLOCKS * BYTES, sent[0].chunks, "host")]
    assert target.order(RevokeLease(lease)) == END
    assert content(target.region) == expected


def test_a_traced_send_is_told_of_where_it_arrives(source: Rank, target: Rank, inbox: Edge) -> None:
    traced = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    whole, cut = (target.grant(inbox.address) for _ in range(2))
    for name, lease in (("whole", whole), ("cut", cut)):
        opened = msgspec.structs.replace(opening(name, lease, inbox.address, target.addresses), traceparent=traced)
        step(source.agent, [opened], [Push(name, 0, ALL)], [SendComplete(name, 0, END)][: name == "whole"])
    told = inbox.next()
    while not isinstance(told, ReceiveDone):
        told = inbox.next()
    assert (told.rank, told.ended.lease, told.ended.traceparent) == (2, whole, traced)
    assert (told.ended.bytes, told.ended.code) == (LAYERS * BLOCKS * BYTES, "")
    settle(lambda: target.counters()["receives_active"] == 1)
    target.order(RevokeLease(cut))
    told = inbox.next()
    while not isinstance(told, ReceiveDone):
        told = inbox.next()
    assert (told.ended.lease, told.ended.code) == (cut, "lease_ended")
    source.order(CancelSend("cut"))
    target.order(RevokeLease(whole))
    while not (isinstance(report := inbox.next(), SendDone) and report.send_id == "cut"):
        pass


def test_a_prompt_that_takes_several_steps(source: Rank, target: Rank, inbox: Edge) -> None:
    lease, other = target.grant(inbox.address, ALL[:HALF]), target.grant(inbox.address, ALL[HALF:])
    sources = (3, 1, 4, 15, 9, 2, 6, 5)
    expected = expected_after(content(target.region), source.region, sources * 2, ALL)
    openings = [opening(name, each, inbox.address, target.addresses) for name, each in (("a", lease), ("b", other))]
    step(source.agent, openings[:1], [Push("a", 0, sources[:3])])
    step(source.agent, openings[1:], [Push("a", 3, sources[3:5]), Push("b", 0, sources[:7])])
    step(source.agent, [], [])
    done = SendComplete("a", 0, HALF * TOKENS), SendComplete("b", 0, HALF * TOKENS)
    step(source.agent, [], [Push("b", 7, sources[7:]), Push("a", 5, sources[5:])], done)
    sent, filled_leases = reports(inbox, 4)
    assert {report.send_id: report.error for report in sent} == {"a": None, "b": None}
    assert {report.lease: report.valid.end for report in filled_leases} == dict.fromkeys((lease, other), HALF * TOKENS)
    assert [target.order(RevokeLease(each)) for each in (lease, other)] == [HALF * TOKENS] * 2
    assert content(target.region) == expected


def test_cached_kv_is_pushed_without_a_step(source: Rank, target: Rank, inbox: Edge) -> None:
    lease = target.grant(inbox.address)
    opened = opening("cached", lease, inbox.address, target.addresses)
    source.order(PushCached(opened, (Push("cached", 0, ALL),)))
    sent, _ = reports(inbox, 2)
    assert sent[0].error is None
    assert target.order(RevokeLease(lease)) == END
    assert content(target.region) == content(source.region)


def test_a_send_that_is_cancelled_before_its_step_is_not_opened(source: Rank, target: Rank, inbox: Edge) -> None:
    lease, before = target.grant(inbox.address), source.counters()
    source.order(CancelSend("early"))
    opened = opening("early", lease, inbox.address, target.addresses)
    step(source.agent, [opened], [Push("early", 0, ALL)], [SendComplete("early", 0, END)])
    opened = opening("next", lease, inbox.address, target.addresses)
    step(source.agent, [opened], [Push("next", 0, ALL)], [SendComplete("next", 0, END)])
    sent, _ = reports(inbox, 2)
    assert [report.send_id for report in sent] == ["next"]
    assert source.counters()["chunks_sent"] - before["chunks_sent"] == LAYERS
    target.order(RevokeLease(lease))


def test_a_cancel_between_steps_is_reported_once_and_is_a_fence(source: Rank, target: Rank, inbox: Edge) -> None:
    lease = target.grant(inbox.address)
    opened = opening("half", lease, inbox.address, target.addresses)
    step(source.agent, [opened], [Push("half", 0, ALL[:HALF])])
    # The channel and the control channel are two: only an opened send can be cancelled here.
    settle(lambda: target.counters()["receives_active"] == 1)
    source.order(CancelSend("half"))
    assert "cancelled" in (inbox.done().error or "")
    pushed = source.counters()["chunks_sent"]
    step(source.agent, [], [Push("half", HALF, ALL[HALF:])], [SendComplete("half", 0, END)])
    source.order(CancelSend("half"))
    assert target.order(RevokeLease(lease)) in (0, HALF * TOKENS), "all that had come in every layer, or nothing"
    assert source.counters()["chunks_sent"] == pushed
    assert source.counters()["sends_active"] == target.counters()["receives_active"] == 0


def test_one_lost_rank_of_several_ends_the_send_with_one_report(source: Rank, target: Rank, inbox: Edge) -> None:
    lease = target.grant(inbox.address)
    opened = opening("two", lease, inbox.address, target.addresses, NOWHERE)
    step(source.agent, [opened], [Push("two", 0, ALL[:HALF])])
    assert "Connection refused" in (inbox.done().error or "")
    settle(lambda: source.counters()["sends_active"] == 0)
    assert target.order(RevokeLease(lease)) in (0, HALF * TOKENS)


def test_a_rank_whose_heads_others_send_is_done_at_once(source: Rank, inbox: Edge) -> None:
    step(source.agent, [opening("none", new_lease(), inbox.address)], [Push("none", 0, ALL)])
    assert inbox.done() == SendDone("none", 1)


def test_what_was_revoked_is_reported_as_an_error_and_leases_are_told_of_no_more(
    source: Rank, target: Rank, inbox: Edge
) -> None:
    lease = target.grant(inbox.address)
    assert target.order(RevokeLease(lease)) == 0
    opened = opening("late", lease, inbox.address, target.addresses)
    step(source.agent, [opened], [Push("late", 0, ALL)], [SendComplete("late", 0, END)])
    assert "has ended" in (inbox.done().error or "")


# ---- the control channel -------------------------------------------------------------------------------------


def test_an_order_that_cannot_be_carried_out_names_the_rank_and_the_reason(target: Rank) -> None:
    with pytest.raises(EngineError, match=r"^blocks: 1 do not hold \[0, 99\)"):
        target.order(GrantLease("00", [[1]], 0, 99, TOKENS, packed(range(99)), None, ""))
    assert target.counters()["leases_open"] == 0


def test_a_lease_that_was_revoked_before_it_was_granted_stays_closed(target: Rank) -> None:
    assert target.order(RevokeLease("00")) == 0
    with pytest.raises(EngineError, match="already been granted"):
        target.order(GrantLease("00", [[1]], 0, TOKENS, TOKENS, packed(range(TOKENS)), None, ""))


def test_who_does_not_know_the_agents_secret_gets_no_answer(target: Rank) -> None:
    stranger = BlockingClient(target.agent.ready.control, "0" * 32, answer_seconds=0.3)
    with pytest.raises(EngineError, match="no answer"):
        stranger.call(ReadCounters())
    stranger.close()


def test_nonsense_on_the_control_channel_is_skipped(target: Rank) -> None:
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(target.agent.ready.control)
    for frames in (
        [b""],
        [b"\xc1"],
        [b"a", b"b", b"c"],
        [msgspec.msgpack.encode(["s", 1, {}])],
        [secrets.token_bytes(99)],
    ):
        stranger.send_multipart(frames)
    assert target.counters()["leases_open"] == 0
    assert not stranger.poll(0)
    context.destroy(linger=0)


def test_closing_the_control_channel_in_the_middle_of_an_order_waits_for_it_and_ends() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def handle(_: Command) -> None:
        begun.set()
        assert go_on.wait(SECONDS)

    server = ControlServer(handle)
    client = BlockingClient(server.address, server.secret, answer_seconds=0.1)
    with pytest.raises(EngineError):
        client.call(ReadCounters())
    assert begun.wait(SECONDS)
    closer = threading.Thread(target=server.close, daemon=True)
    closer.start()
    settle(lambda: closer.is_alive())
    go_on.set()
    closer.join(SECONDS)
    assert not closer.is_alive()
    client.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
async def test_a_control_channel_answers_where_its_engine_is_reached(host: str) -> None:
    server = ControlServer(lambda _: {"here": 1}, host)
    client = AsyncControlClient(server.address, server.secret)
    try:
        assert await client.call(ReadCounters()) == {"here": 1}
    finally:
        server.close()


@pytest.mark.slow
async def test_an_agent_that_is_stopped_holds_nobody_up_and_answers_all_when_it_goes_on(target: Rank) -> None:
    client = AsyncControlClient(target.agent.ready.control, target.agent.ready.secret)
    lease = new_lease()
    assert (await client.call(ReadCounters()))["leases_open"] == 0
    os.kill(target.agent.pid, signal.SIGSTOP)
    try:
        while psutil.Process(target.agent.pid).status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0.01)
        # More than the queues of its sockets hold; the first one's caller does not wait for the answer.
        client.call(GrantLease(lease, [[1]], 0, TOKENS, TOKENS, packed(range(TOKENS)), None, "")).cancel()
        asked = [client.call(CancelSend(str(number))) for number in range(5000)]
        revoked = client.call(RevokeLease(lease))
        assert not (await asyncio.wait([*asked, revoked], timeout=0.2))[0]
    finally:
        os.kill(target.agent.pid, signal.SIGCONT)
    time.sleep(0.5)  # noqa: ASYNC251  # nobody reads meanwhile, and there are more answers than queues hold
    assert await asyncio.wait_for(revoked, SECONDS) == 0
    assert all(answer.done() for answer in asked), "in the order of the calls"
    with pytest.raises(EngineError, match="already been granted"):
        await client.call(GrantLease(lease, [[1]], 0, TOKENS, TOKENS, packed(range(TOKENS)), None, ""))
    client.close()


# ---- beginning and ending ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (TransportSettings(hosts=("192.0.2.1",)), r"hosts: 192\.0\.2\.1 is not an address of this machine"),
        (TransportSettings("pigeon"), "'pigeon' is unknown; choose one of auto, tcp"),
    ],
    ids=["host", "transport"],
)
def test_settings_that_cannot_be_had_are_one_clear_error(settings: TransportSettings, reason: str) -> None:
    region, before = filled(1, 2, BYTES, 1), agents_of(os.getpid())
    with pytest.raises(EngineError, match=f"the KV agent cannot start: .*{reason}"):
        start(region, settings)
    region.close()
    assert agents_of(os.getpid()) == before


def test_busy_ports_are_one_clear_error() -> None:
    region, before = filled(1, 2, BYTES, 1), agents_of(os.getpid())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=f"the KV agent cannot start: ports: no port of {port} to {port} is free"):
            start(region, TransportSettings(ports=(port,)))
    region.close()
    assert agents_of(os.getpid()) == before


def test_kv_that_is_not_there_is_an_error_that_points_to_the_log() -> None:
    region, larger, before = filled(1, 2, BYTES, 1), filled(1, 200, BYTES, 1), agents_of(os.getpid())
    with pytest.raises(EngineError, match="the KV agent ended at start with status 1; see its log above"):
        AgentProcess(AgentSetup(0, region.fd, larger.shape, "agents", TransportSettings(), ()))
    region.close()
    larger.close()
    assert agents_of(os.getpid()) == before


def test_the_secret_is_not_for_everybody_to_read() -> None:
    secret = "not-for-everybody"
    with rank(1, TransportSettings(secret=secret)) as ours:
        for name in ("cmdline", "environ"):
            assert secret.encode() not in Path(f"/proc/{ours.agent.pid}/{name}").read_bytes()


@pytest.mark.processes
def test_an_agent_keeps_to_its_cpus_and_outlives_the_signals_of_a_terminal() -> None:
    cpu = max(os.sched_getaffinity(0))
    region = filled(1, 2, BYTES, 1)
    setup = AgentSetup(0, region.fd, region.shape, "agents", TransportSettings(), [cpu])
    found = Rank(region, AgentProcess(setup))
    assert os.sched_getaffinity(found.agent.pid) == {cpu}
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(found.agent.pid, number)
    assert found.counters()["connections"] == 0
    found.close()
    region.close()


@pytest.mark.processes
def test_an_agent_ends_by_itself_when_its_channel_closes_also_with_sends_under_way(
    caplog: pytest.LogCaptureFixture, target: Rank
) -> None:
    sessions = target.counters()["sessions_in"]  # an answer: the socket to the target's agent is open from here on
    before = Held()
    with edge() as inbox:  # opened after the descriptors were counted, and closed before they are counted again
        lease = target.grant(inbox.address)
        with rank(3) as ours:
            pid = ours.agent.pid
            opened = opening("cut", lease, NOWHERE[0], target.addresses)
            step(ours.agent, [opened], [Push("cut", 0, ALL)])
            settle(lambda: target.counters()["receives_active"] == 1)
        assert not is_there(pid)
        assert "did not end within" not in caplog.text
        settle(lambda: target.counters()["receives_active"] == 0)
        settle(lambda: target.counters()["sessions_in"] == sessions)
        assert target.order(RevokeLease(lease)) in (0, END), "all that had come in every layer, or nothing"
    del ours
    before.require_back()


@pytest.mark.slow
def test_an_agent_that_is_stopped_is_killed_when_it_is_to_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tercet")
    monkeypatch.setattr(agent, "STOP_SECONDS", 0.3)
    with rank(3) as ours:
        os.kill(ours.agent.pid, signal.SIGSTOP)
    assert not is_there(ours.agent.pid)
    assert "did not end within" in caplog.text


def tell_without_end(agent: AgentProcess) -> None:
    while True:
        agent.send(LayersDone(tuple(range(1000))))


@pytest.mark.processes
def test_notes_are_kept_for_an_agent_that_is_stopped(source: Rank, target: Rank, inbox: Edge) -> None:
    lease = target.grant(inbox.address)
    os.kill(source.agent.pid, signal.SIGSTOP)
    try:
        while not source.agent._backlog:
            source.agent.send(LayersDone(tuple(range(1000))))  # of no send: nothing comes of it
        step(source.agent, [opening("kept", lease, inbox.address, target.addresses)], [Push("kept", 0, ALL)],
             [SendComplete("kept", 0, END)])  # fmt: skip
    finally:
        os.kill(source.agent.pid, signal.SIGCONT)
    # How far it is may be told before, since the lease is old by now.
    report = inbox.next()
    while not isinstance(report, SendDone):
        assert isinstance(report, LeaseFilled)
        assert report.valid.end in (0, END)
        report = inbox.next()
    assert (report.send_id, report.error) == ("kept", None)
    settle(lambda: not source.agent._backlog)
    assert target.order(RevokeLease(lease)) == END


@pytest.mark.slow
def test_a_worker_does_not_wait_for_an_agent_that_takes_no_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "BACKLOG_BYTES", 100_000)
    with rank(3) as ours:
        os.kill(ours.agent.pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match="does not accept notes"):
            tell_without_end(ours.agent)
        os.kill(ours.agent.pid, signal.SIGCONT)


def killed(worker: Worker) -> None:
    os.kill(worker.pid, signal.SIGKILL)


def stopped_and_killed(worker: Worker) -> None:
    os.kill(worker.agent, signal.SIGSTOP)
    killed(worker)


@pytest.mark.slow
@pytest.mark.parametrize("how", [killed, stopped_and_killed, Worker.leave])
def test_an_agent_goes_with_its_worker(how: Callable[[Worker], None]) -> None:
    with worker() as found:
        assert is_there(found.agent)
        how(found)
        settle(lambda: not is_there(found.agent))
        assert found.status() == (0 if how is Worker.leave else -signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_worker_goes_with_its_agent(number: signal.Signals) -> None:
    with worker() as found:
        os.kill(found.agent, number)
        assert found.status() == 1
        assert agents_of(found.pid) == []


# Agents of ranks whose KV is reached through buffers, beside one that reaches it where it lies.


@pytest.mark.parametrize(("sender_staged", "receiver_staged"), [(True, True), (True, False), (False, True)])
def test_a_forward_pass_is_sent_layer_by_layer_through_buffers(sender_staged: bool, receiver_staged: bool) -> None:
    targets = tuple(reversed(ALL))
    with edge() as inbox, rank(1, staged=sender_staged) as source, rank(2, staged=receiver_staged) as target:
        expected = expected_after(content(target.region), source.region, ALL, targets)
        lease = target.grant(inbox.address, targets)
        begun = opening("s", lease, inbox.address, target.addresses)
        step(source.agent, [begun], [Push("s", 0, ALL)], [SendComplete("s", 0, END)])
        while not isinstance(done := inbox.next(), SendDone):
            pass  # how far the lease is filled, as often as time allows
        assert (done.error, done.transport, done.bytes) == (None, "tcp", LAYERS * BLOCKS * BYTES)
        assert target.order(RevokeLease(lease)) == END
        assert content(target.region) == expected


def test_a_transport_that_reads_memory_is_refused_at_the_start() -> None:
    with pytest.raises(EngineError, match="cannot read"), rank(1, TransportSettings("host"), staged=True):
        pytest.fail("it started")


# How a process that copies KV is started.


def _tunables(environment: dict[str, str]) -> dict[str, str]:
    return dict(part.split("=") for part in environment[TUNABLES].split(":"))


def test_the_c_library_is_told_when_to_copy_past_the_caches() -> None:
    found = past_the_caches({"PATH": "/bin"})
    assert found["PATH"] == "/bin"
    assert _tunables(found) == COPY_PAST_THE_CACHES


def test_tunables_of_the_user_stay() -> None:
    theirs = "glibc.malloc.arena_max=2:glibc.cpu.x86_non_temporal_threshold=0x100000"
    found = _tunables(past_the_caches({TUNABLES: theirs}))
    assert found["glibc.malloc.arena_max"] == "2"
    assert found["glibc.cpu.x86_non_temporal_threshold"] == "0x100000"
    assert found["glibc.cpu.x86_rep_movsb_threshold"] == COPY_PAST_THE_CACHES["glibc.cpu.x86_rep_movsb_threshold"]


@pytest.mark.processes
def test_a_process_started_so_copies_every_byte() -> None:
    """Sizes around the threshold, and places that are not aligned: an error would be silent corruption of KV."""
    program = """
import random
source = random.Random(1).randbytes(1 << 21)
for size in (1, 0x4000, 0x47ff, 0x4800, 0x4801, 98304, 1 << 20):
    for there, here in ((0, 0), (64, 64), (0, 64), (3, 1029), (4096, 1)):
        target = bytearray(1 << 21)
        memoryview(target)[here : here + size] = memoryview(source)[there : there + size]
        assert target[here : here + size] == source[there : there + size], (size, there, here)
        assert not any(target[:here]) and not any(target[here + size :]), (size, there, here)
"""
    subprocess.run([sys.executable, "-c", program], env=past_the_caches(os.environ), check=True, timeout=120)
