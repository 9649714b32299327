"""The client against a server on a socket: every way in which an answer can end becomes a record."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec
import pytest

from tercet_bench.openai_client import COMPLETIONS, Client, Clock, PreparedCall, body_of
from tercet_lab.tables import RequestRow, Requests
from tests.unit.bench.openai_server import MODEL, FakeServer


async def ask(url: str, timeout: float = 20.0, tokens: int = 5, **behave: Any) -> RequestRow:
    body = body_of(MODEL, [1, 2, 3], tokens, extra={"behave": behave})
    call = PreparedCall(4, url + COMPLETIONS, body, planned_input=3, planned_output=tokens)
    async with Client(Clock(), timeout) as client:
        return (await client.send(call, 0.0))[0]


async def test_an_answer(server: FakeServer) -> None:
    found = await ask(server.url, gap=0.01)
    assert (found.ok, found.failure, found.status, found.finish_reason) == (True, None, 200, "length")
    assert (found.id, found.input_tokens, found.output_tokens, len(found.token_times)) == (4, 3, 5, 5)
    assert found.first_token == found.token_times[0]
    assert found.ended == found.token_times[-1]
    assert 0 <= found.scheduled <= found.sent < found.token_times[0]


async def test_slow_tokens_have_the_gaps_that_the_server_made(server: FakeServer) -> None:
    found = await ask(server.url, gap=0.05)
    # Sleeps are never short, and a gap that began late may be; their sum cannot be.
    table = Requests.of_rows([found])
    assert sum(table.itl) >= 4 * 0.05 - 0.03
    assert table.ttft[0] >= 0.05
    assert table.tpot[0] == pytest.approx(sum(table.itl) / 4)


async def test_several_tokens_in_an_event_are_counted_and_have_one_time(server: FakeServer) -> None:
    found = await ask(server.url, at_once=2)
    assert (found.output_tokens, found.token_counts, len(found.token_times)) == (5, (2, 2, 1), 3)


async def test_what_is_asked(server: FakeServer) -> None:
    await ask(server.url)
    (body,) = server.bodies
    assert (body["model"], body["prompt"], body["max_tokens"], body["temperature"]) == (MODEL, [1, 2, 3], 5, 0.0)
    assert (body["stream"], body["stream_options"], body["ignore_eos"]) == (True, {"include_usage": True}, True)


@pytest.mark.parametrize("status", [400, 429, 503])
async def test_another_status_is_a_failure_with_the_servers_words_in_one_line(server: FakeServer, status: int) -> None:
    found = await ask(server.url, status=status)
    assert (found.failure, found.status, found.error) == ("http", status, f"HTTP {status}: no room")
    assert (found.ok, found.output_tokens, found.first_token) == (False, 0, None)


@pytest.mark.parametrize("after", [0, 2])
async def test_a_connection_that_breaks(server: FakeServer, after: int) -> None:
    found = await ask(server.url, cut=after)
    assert (found.failure, found.ok) == ("disconnected", False)
    assert found.error


async def test_an_error_in_the_stream(server: FakeServer) -> None:
    found = await ask(server.url, error=2)
    assert (found.failure, found.error, len(found.token_times)) == ("server", "out of blocks", 2)


async def test_an_answer_without_tokens(server: FakeServer) -> None:
    assert (await ask(server.url, silent=True)).failure == "empty"


async def test_a_target_that_stalls_runs_into_the_timeout(server: FakeServer) -> None:
    found = await ask(server.url, timeout=0.3, hang=1)
    assert (found.failure, found.error, len(found.token_times)) == ("timeout", "the answer did not end within 0.3 s", 1)
    assert found.ended - found.sent >= 0.3


async def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        found = await ask(f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert found.failure == "refused"
    assert "\n" not in (found.error or "\n")


async def test_a_cancelled_request_has_a_record(server: FakeServer) -> None:
    asking = asyncio.create_task(ask(server.url, hang=2))
    await server.hung.wait()
    asking.cancel()
    assert (await asking).failure == "interrupted"


def test_sampling_goes_into_the_body() -> None:
    extra = {"temperature": 0.5, "top_p": 0.9, "seed": 3}
    body = msgspec.json.decode(body_of("m", "text", 4, ignore_eos=False, token_ids=True, cache_salt="s", extra=extra))
    assert body | {"stream_options": None} == {
        "model": "m", "prompt": "text", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stream": True,
        "stream_options": None, "return_token_ids": True, "cache_salt": "s",
    }  # fmt: skip


DEEP = b"[" * 5000 + b"]" * 5000


@pytest.mark.parametrize(
    ("raw", "failure"),
    [(b'data: {"choices": [{"text": "\xff"}]}\n\n', "protocol"), (b'data: {"x": %b}\n\n' % DEEP, "protocol")],
    ids=["bytes", "nested"],
)
async def test_what_cannot_be_read_is_a_record_like_others(server: FakeServer, raw: bytes, failure: str) -> None:
    found = await ask(server.url, raw=raw.hex())
    assert (found.ok, found.failure, found.status) == (False, failure, None)
    assert msgspec.json.decode(msgspec.json.encode(found), type=RequestRow) == found


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_an_answer_that_the_server_broke_off_is_a_failure(server: FakeServer, reason: str) -> None:
    found = await ask(server.url, finish=reason)
    assert (found.ok, found.failure, found.finish_reason) == (False, "server", reason)


@pytest.mark.parametrize(
    "body",
    [DEEP, b'{"error": {"message": %b}}' % DEEP, b"\xff\xfe no", b"", b"[]", b"null", b'{"error": 7}',
     b'{"error": {"message": {"a": 1}}}', b'{"error": "\\ud83d"}'],
    ids=lambda body: body[:30].decode(errors="replace"),
)  # fmt: skip
async def test_whatever_an_error_says_is_a_record(server: FakeServer, body: bytes) -> None:
    found = await ask(server.url, status=500, body=body.hex())
    assert (found.failure, found.status) == ("http", 500)
    assert msgspec.json.decode(msgspec.json.encode(found), type=RequestRow) == found
