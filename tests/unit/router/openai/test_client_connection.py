"""Clients that leave and clients that do not read, at the router that writes to sockets itself."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from tercet.wire.serving import client_connection
from tercet.wire.serving.client_connection import ClientConnection, StreamingProtocol
from tests.longest_wait import LONGEST_WAIT_S, until, wait_until

from .conftest import MODEL, LiveRouters, Step


def connect(
    routers: LiveRouters, name: str, script: list[Step], receive_buffer: int | None = None, router: str = "fast",
    **fields: Any,
) -> socket.socket:  # fmt: skip
    body = json.dumps({"model": MODEL, "prompt": "Hello", "stream": True, "max_tokens": 400, **fields}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-request-id: {name}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    routers.engine.expect(name, script)
    client = socket.socket()
    client.settimeout(20)
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect(("127.0.0.1", int(routers.urls[router].rpartition(":")[2])))
    client.sendall(head.encode() + body)
    return client


def read_until(client: socket.socket, wanted: bytes) -> bytes:
    found = b""
    while wanted not in found:
        data = client.recv(65536)
        assert data
        found += data
    return found


def test_a_client_that_leaves_ends_its_sequence(routers: LiveRouters) -> None:
    ended = routers.engine.ended["leaves"] = threading.Event()
    client = connect(routers, "leaves", [*[[token] for token in routers.tokens("one two three four")], "stop"])
    read_until(client, b'"text":"one"')
    routers.let_go("leaves")
    read_until(client, b'"text":" two"')
    client.close()
    assert ended.wait(LONGEST_WAIT_S)
    wait_until(lambda: not routers.processor.request_states)
    assert not routers.engine.running


def test_a_client_that_leaves_with_two_requests_under_way_is_no_error(
    routers: LiveRouters, caplog: pytest.LogCaptureFixture
) -> None:
    """The second one waits, unread: that its client has gone is noticed when the first one writes to it."""
    ended = routers.engine.ended["first"] = threading.Event()
    client = connect(routers, "first", [*[list(routers.tokens("one"))] * 100, "stop"])
    read_until(client, b'"text":"one"')
    client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    routers.let_go("first")
    read_until(client, b'"text":"one"')
    client.close()
    for _ in range(90):
        routers.let_go("first")
        if ended.wait(0.05):
            break
    assert routers.engine.said["first"] < 100
    wait_until(lambda: not routers.processor.request_states and not routers.engine.running)
    time.sleep(0.1)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


def test_the_first_token_is_on_the_socket_before_the_program_goes_on(routers: LiveRouters) -> None:
    tokens = routers.tokens("one two more and more")
    client = connect(routers, "first", [*[[token] for token in tokens], "stop"])
    routers.let_go("first", 10)
    found = read_until(client, b"[DONE]")
    places = [found.index(b'"text":"%b"' % routers.tokenizer.decode([token]).encode()) for token in tokens[:3]]
    assert places == sorted(places)
    assert found.index(b'"finish_reason":"stop"') > places[-1]
    client.close()


def test_a_client_that_does_not_read_pauses_its_program(routers: LiveRouters) -> None:
    """Each output has much text, so that buffers are full long before the script's end."""
    word = routers.tokens(" international")
    script: list[Step] = [list(word * 60) for _ in range(300)]
    ended = routers.engine.ended["slow"] = threading.Event()
    # Fewer bytes than the script says fit into the socket's buffers and ours.
    client = connect(routers, "slow", [*script, "length"], receive_buffer=4096)
    wait_until(lambda: "slow" in routers.engine.said)
    routers.let_go("slow", 300)
    wait_until(routers.full)
    said = routers.engine.said["slow"]
    assert said < len(script)
    assert not ended.is_set()
    found = b""
    while b"[DONE]" not in found:
        found += client.recv(65536)
    assert found.count(b" international") == 60 * 300
    client.close()


class Cycle:
    """What of uvicorn's cycle a connection uses."""

    def __init__(self, full: bool) -> None:
        self.disconnected = False
        self.written, self.aborted = list[bytes](), False
        self.room = asyncio.Event()
        self.flow = SimpleNamespace(write_paused=full, drain=self.room.wait)
        self.closing = False
        self.transport = SimpleNamespace(
            write=self.written.append, abort=self._abort, is_closing=lambda: self.closing,
            get_write_buffer_size=lambda: 0,
        )  # fmt: skip

    def _abort(self) -> None:
        self.aborted = True


async def test_a_client_that_never_reads_is_disconnected() -> None:
    cycle = Cycle(full=True)
    connection = ClientConnection(cast(Any, cycle), unread_seconds=0.01)
    assert connection.is_full
    await connection.has_room()
    assert cycle.aborted


async def test_a_client_that_reads_in_time_stays() -> None:
    cycle = Cycle(full=True)
    waiting = asyncio.create_task(ClientConnection(cast(Any, cycle), unread_seconds=60).has_room())
    await asyncio.sleep(0)
    cycle.room.set()
    await waiting
    assert not cycle.aborted


async def test_frames_are_written_together_soon_and_in_order() -> None:
    cycles = [Cycle(full=False) for _ in range(2)]
    connections = [ClientConnection(cast(Any, cycle)) for cycle in cycles]
    for frame in (b"1", b"2"):
        for connection in connections:
            connection.write(frame)
    assert [cycle.written for cycle in cycles] == [[], []]
    await asyncio.sleep(0)
    assert [cycle.written for cycle in cycles] == [[b"1", b"2"]] * 2
    connections[0].write(b"3")
    await asyncio.sleep(0)
    assert cycles[0].written[2:] == [b"3"]


async def test_what_was_gathered_goes_before_what_follows_a_flush() -> None:
    cycle = Cycle(full=False)
    connection = ClientConnection(cast(Any, cycle))
    connection.write(b"1")
    connection.flush()
    assert cycle.written == [b"1"]
    connection.flush()
    connection.write(b"2")
    await asyncio.sleep(0)
    assert cycle.written == [b"1", b"2"]


def test_an_event_loop_that_ended_leaves_the_next_one_alone() -> None:
    async def write(cycle: Cycle, patient: bool) -> None:
        ClientConnection(cast(Any, cycle)).write(b"x")
        if patient:
            await asyncio.sleep(0)

    left, cycle = Cycle(full=False), Cycle(full=False)
    asyncio.run(write(left, patient=False))
    asyncio.run(write(cycle, patient=True))
    assert cycle.written == [b"x"]


@pytest.mark.parametrize("how", ["here", "gone", "closing"])
async def test_nothing_is_written_to_a_client_that_is_gone(how: str) -> None:
    cycle = Cycle(full=False)
    cycle.disconnected, cycle.closing = how == "gone", how == "closing"
    connection = ClientConnection(cast(Any, cycle))
    connection.write(b"x")
    connection.flush()
    assert cycle.written == ([b"x"] if how == "here" else [])


# ---- clients that never read -----------------------------------------------------------------------------------------


def test_a_client_that_never_reads_is_let_go_and_others_stream(
    routers: LiveRouters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_connection, "UNREAD_SECONDS", 0.3)
    word = routers.tokens(" international")
    script: list[Step] = [list(word * 60) for _ in range(300)]
    ended = routers.engine.ended["slow"] = threading.Event()
    client = connect(routers, "slow", [*script, "length"], receive_buffer=4096)
    wait_until(lambda: "slow" in routers.engine.said)
    routers.let_go("slow", 300)
    other = connect(routers, "other", [*[[token] for token in routers.tokens("one two three four")], "stop"])
    routers.let_go("other", 10)
    assert b"[DONE]" in read_until(other, b"[DONE]")
    assert ended.wait(LONGEST_WAIT_S)
    wait_until(lambda: not routers.processor.request_states and not routers.engine.running)
    client.close()
    other.close()


async def test_a_client_for_which_too_much_waits_is_let_go_at_once() -> None:
    cycle = Cycle(full=True)
    cycle.transport.get_write_buffer_size = lambda: client_connection.MOST_UNREAD
    connection = ClientConnection(cast(Any, cycle))
    connection.write(b"1")
    connection.flush()
    assert not cycle.aborted
    cycle.transport.get_write_buffer_size = lambda: client_connection.MOST_UNREAD + 1
    connection.write(b"2")
    connection.flush()
    assert cycle.aborted


class Transport(asyncio.Transport):
    """Notes whether it was aborted."""

    aborted = False

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted


@pytest.mark.parametrize("reads", [False, True])
async def test_whoever_writes_to_a_client_that_does_not_read_is_freed(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also vLLM's own layers, which wait for room without an end."""
    monkeypatch.setattr(client_connection, "UNREAD_SECONDS", 0.05)
    protocol = StreamingProtocol.__new__(StreamingProtocol)
    transport = Transport()
    protocol.transport, protocol.flow = transport, FlowControl(transport)
    protocol.pause_writing()
    if reads:
        protocol.resume_writing()
        await asyncio.sleep(0.2)
    else:
        await until(lambda: transport.aborted)
    assert transport.aborted is not reads
