"""What RFC 9110 and 9112 let clients and engines say goes through a sidecar: bodies byte for byte, fields as text."""

from __future__ import annotations

import asyncio
import gzip
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from tercet_gateway.gateway_settings import SidecarConfig
from tercet_gateway.sidecar import sidecar
from tests.longest_wait import LONGEST_WAIT_S
from tests.unit.wire.client.raw_http import Message, RawServer, parsed, raw_server, said

EVERY_BYTE = bytes(byte for byte in range(0x21, 0x100) if byte != 0x7F)
GZIP = gzip.compress(b"x" * 1000)
FRAMING = b"content-length", b"transfer-encoding"
# What a sidecar asks before it takes a long body: whether the engine takes the key of the request.
_ASKS = re.compile(rb"\AGET /v1/models HTTP/1\.1\r\n(?:[^\r\n]+\r\n)+\r\n(?=POST)")


@asynccontextmanager
async def passing(**says: Any) -> AsyncGenerator[tuple[RawServer, int]]:
    async with (
        raw_server(**says) as engine,
        sidecar(SidecarConfig(engine=engine.url, port=0, prefill_hosts="127.0.0.1:*")) as server,
    ):
        yield engine, server.port


async def asked(*pieces: bytes, **says: Any) -> tuple[Message, bytes]:
    """The request as the engine gets it, and all that its client is told."""
    async with passing(**says) as (engine, port):
        told = await said(port, *pieces)
        return parsed(_ASKS.sub(b"", bytes(engine.heard[-1]))), told


def request(*lines: bytes, start: bytes = b"POST /x HTTP/1.1", body: bytes = b"") -> bytes:
    return b"\r\n".join([start, b"Host: the.host:1", *lines, b"Connection: close", b"", b""]) + body


# ---- requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [b"/v1/models", b"/v1/chat%2Fcompletions?a=%2f&b=%2F&b=+&c", b"/a//b/./../c;d=e/%c3%a9%FF?%", b"/%",
     b"/*'()!$,@:", b"/a?b?c/d\"<>\\^`{|}"],
)  # fmt: skip
@pytest.mark.parametrize("method", [b"GET", b"OPTIONS", b"DELETE", b"PATCH", b"PURGE"])
async def test_a_target_goes_on_as_it_is_written(method: bytes, target: bytes) -> None:
    heard, _ = await asked(request(start=method + b" " + target + b" HTTP/1.1"))
    assert heard.start == method + b" " + target + b" HTTP/1.1"


@pytest.mark.parametrize(
    ("target", "goes_on"),
    [
        (b"http://named:8/a%2Fb?c", b"/a%2Fb?c"),
        (b"https://named:8/", b"/"),
        (b"http://u:p@named:8/?a", b"/?a"),
        (b"HTTP://named:8/a?b", b"/a?b"),
        (b"http://named:8//a@b:1/[c]?http://x", b"//a@b:1/[c]?http://x"),
    ],
)
async def test_a_url_as_target_names_the_host(target: bytes, goes_on: bytes) -> None:
    heard, _ = await asked(request(start=b"GET " + target + b" HTTP/1.1"))
    assert (heard.start, heard.named(b"host")) == (b"GET " + goes_on + b" HTTP/1.1", [b"named:8"])


async def test_fields_go_on_as_they_are_in_their_order_and_no_other() -> None:
    fields = [
        (b"X-Bytes", EVERY_BYTE.decode("latin-1").encode()), (b"Accept", b"text/*"), (b"accept", b"*/*;q=0.1"),
        (b"Cookie", b"a=1"),
        (b"X-Empty", b""), (b"Cookie", b"b=2"), (b"X-UTF-8", "naïve 🎈".encode()),
        (b"X-Inner", b"a \t b"), (b"x!#$%&'*+.^_`|~9", b"token"), (b"X-Long", b"l" * 40_000), (b"Via", b"1.1 before"),
        (b"Range", b"bytes=0-1"), (b"If-None-Match", b'"a", W/"b"'),
        (b"X-Forwarded-For", b"::1"),
    ]  # fmt: skip
    heard, _ = await asked(
        request(*(name + b":\t " + value + b" \t" for name, value in fields), start=b"GET / HTTP/1.1")
    )
    assert heard.fields == [(b"host", b"the.host:1"), *((name.lower(), value) for name, value in fields)]


@pytest.mark.parametrize("value", [EVERY_BYTE, b"caf\xe9"])
async def test_a_field_in_latin_1_goes_on_in_utf_8(value: bytes) -> None:
    heard, _ = await asked(request(b"X-Latin: " + value, start=b"GET / HTTP/1.1"))
    assert heard.named(b"x-latin") == [value.decode("latin-1").encode()]


async def test_what_is_for_the_next_hop_alone_does_not_go_on() -> None:
    hop = [
        b"Connection: X-Hop, keep-alive", b"X-Hop: 1", b"Keep-Alive: timeout=5", b"TE: trailers", b"Upgrade: h2c",
        b"Proxy-Connection: close", b"Proxy-Authorization: Basic eA==", b"connection: x-other ,,", b"X-OTHER: 2",
    ]  # fmt: skip
    heard, told = await asked(
        request(*hop, b"X-Kept: 3", start=b"GET / HTTP/1.1"),
        answer=b"HTTP/1.1 200 OK\r\nConnection: x-hop, close\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\n"
        b"Upgrade: h2\r\nProxy-Authenticate: Basic\r\nX-Kept: 3\r\nContent-Length: 0\r\n\r\n",
    )
    assert heard.fields == [(b"host", b"the.host:1"), (b"x-kept", b"3")]
    assert parsed(told).fields == [(b"x-kept", b"3"), (b"content-length", b"0"), (b"connection", b"close")]


@pytest.mark.parametrize("path", [b"/x", b"/v1/completions"])
@pytest.mark.parametrize("body", [b"", b"\0\r\n\r\n", bytes(range(256)) * 1000, GZIP], ids=["", "few", "many", "gzip"])
async def test_bodies_with_a_length(path: bytes, body: bytes) -> None:
    encoding = [b"Content-Encoding: gzip"] if body is GZIP and path == b"/x" else []
    length = b"Content-Length: %d" % len(body)
    heard, told = await asked(request(*encoding, length, start=b"POST " + path + b" HTTP/1.1", body=body))
    assert (heard.body, heard.named(b"content-length")) == (body, [b"%d" % len(body)])
    assert heard.named(b"content-encoding") == [each.partition(b": ")[2] for each in encoding]
    assert told.endswith(b"ok")


async def test_bodies_in_chunks_go_on_in_chunks_without_trailers() -> None:
    pieces = b"3;ext=1\r\nabc\r\n", b"a", b"\r\n0123456789\r", b"\n0;x\r\nX-Later: a\xe9\r\nx-later: b\r\n\r\n"
    heard, _ = await asked(request(b"Transfer-Encoding: chunked", b"Trailer: x-later"), *pieces)
    assert (heard.body, heard.trailers) == (b"abc0123456789", [])
    assert (heard.named(b"content-length"), heard.named(b"trailer")) == ([], [])


async def test_no_trailer_becomes_a_header() -> None:
    late = b"Authorization: Bearer k\r\nHost: other\r\nx-prefiller-host-port: h:1\r\nX-Later: 1\r\n"
    heard, _ = await asked(request(b"Transfer-Encoding: chunked"), b"0\r\n" + late + b"\r\n")
    assert (heard.trailers, heard.named(b"host")) == ([], [b"the.host:1"])
    assert not heard.named(b"authorization") + heard.named(b"x-later")


async def test_a_body_in_chunks_that_is_read_whole_goes_on_whole() -> None:
    heard, _ = await asked(
        request(b"Transfer-Encoding: chunked", b"Trailer: x", start=b"POST /v1/completions HTTP/1.1"),
        b"2\r\n{}\r\n0\r\nx: 1\r\n\r\n",
    )
    assert (heard.body, [each for each in heard.fields if each[0] in (*FRAMING, b"trailer")]) == (
        b"{}", [(b"content-length", b"2")]
    )  # fmt: skip


@pytest.mark.parametrize("path", [b"/x", b"/v1/completions"])
async def test_a_client_is_told_to_go_on_before_it_sends_its_body(path: bytes) -> None:
    go_on = b"HTTP/1.1 100 Continue\r\n\r\n"
    async with passing(interim=go_on) as (engine, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(b"Expect: 100-continue", b"Content-Length: 2", start=b"POST " + path + b" HTTP/1.1"))
        async with asyncio.timeout(LONGEST_WAIT_S):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            writer.write(b"{}")
            assert (await reader.read()).endswith(b"ok")
        writer.close()
        heard = parsed(bytes(engine.heard[0]))
        assert (heard.body, heard.named(b"expect")) == (b"{}", [b"100-continue"] if path == b"/x" else [])


async def test_an_engine_may_refuse_before_the_body_has_come() -> None:
    """And a client that waits for its word sends none."""
    refusal = b"HTTP/1.1 417 No\r\nContent-Length: 2\r\n\r\nno"
    told = await asked(request(b"Expect: 100-continue", b"Content-Length: 9"), interim=refusal)
    assert told[1].startswith(b"HTTP/1.1 417 Expectation Failed\r\n")
    assert told[1].endswith(b"no")


async def test_a_client_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a stopped client would hold its connection, and the engine's answer, for ever."""
    monkeypatch.setattr("tercet.wire.serving.client_connection.UNREAD_SECONDS", 0.2)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    engine_is_left = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        with suppress(OSError):
            while True:
                writer.write(b"10000\r\n%b\r\n" % (b"x" * 0x10000))
                await writer.drain()
        engine_is_left.set()
        writer.close()

    async with await asyncio.start_server(endless, "127.0.0.1", 0) as engine:
        url = f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}"
        config = SidecarConfig(engine=url, port=0, prefill_hosts="127.0.0.1:*")
        async with sidecar(config) as server, asyncio.timeout(LONGEST_WAIT_S):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1000)
            writer.write(request(start=b"GET /x HTTP/1.1"))
            await engine_is_left.wait()
            writer.close()


async def test_requests_in_a_row_on_one_connection() -> None:
    one = b"POST /%d HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\n%d"
    async with passing() as (engine, port):
        told = await said(port, one % (1, 1) + one % (2, 2) + request(start=b"GET /3 HTTP/1.1"))
        assert told.count(b"HTTP/1.1 200 OK") == 3
        heard = b"".join(engine.heard)
        assert [heard.index(b"/%d HTTP" % number) for number in (1, 2, 3)] == sorted(
            heard.index(b"/%d HTTP" % number) for number in (1, 2, 3)
        )


async def test_clients_of_http_1_0() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX: 1\r\n\r\n2\r\nok\r\n0\r\nlater: 1\r\n\r\n"
    heard, told = await asked(b"GET /x HTTP/1.0\r\nX: 1\r\n\r\n", answer=chunked, interim=b"HTTP/1.1 103 Early\r\n\r\n")
    assert heard.start == b"GET /x HTTP/1.1"
    assert heard.fields[1:] == [(b"x", b"1")]
    assert heard.fields[0][0] == b"host"
    assert (parsed(told).body, parsed(told).named(b"transfer-encoding")) == (b"ok", [])
    assert b"103" not in told


@pytest.mark.parametrize(
    "raw",
    [b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: h\r\nHost: h\r\n\r\n", b"nonsense\r\n\r\n",
     b"X-OWN.~1 / HTTP/1.1\r\nHost: h\r\n\r\n", b"OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n",
     b"GET / HTTP/1.1\r\nHost: h\r\nX-Folded: a\r\n  b\r\n\tc\r\n\r\n",
     b"GET https://named:8 HTTP/1.1\r\nHost: h\r\n\r\n", b"GET http://named:8? HTTP/1.1\r\nHost: h\r\n\r\n",
     b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
     b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
     b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
     b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: +3\r\n\r\nabc",
     b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked, x\r\n\r\n",
     b"POST / HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
     b"GET / HTTP/1.1\r\nHost: h\r\nX : 1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: h\r\nX: a\0b\r\n\r\n",
     b"GET / HTTP/1.1\r\nHost: h\r\nX: a\rb\r\n\r\n", b"GET /\xc3\xa9 HTTP/1.1\r\nHost: h\r\n\r\n",
     b"CONNECT h:1 HTTP/1.1\r\nHost: h:1\r\n\r\n", b"GET ftp://h/ HTTP/1.1\r\nHost: h\r\n\r\n",
     b"GET http://[ HTTP/1.1\r\nHost: h\r\n\r\n", b"GET http://[::1/a HTTP/1.1\r\nHost: h\r\n\r\n",
     b"GET http://]h/ HTTP/1.1\r\nHost: h\r\n\r\n", b"GET http://u@/ HTTP/1.1\r\nHost: h\r\n\r\n",
     b"GET http:///a HTTP/1.1\r\nHost: h\r\n\r\n", b"GET a HTTP/1.1\r\nHost: h\r\n\r\n",
     b"GET /a#b HTTP/1.1\r\nHost: h\r\n\r\n", b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 70_000 + b"\r\n\r\n"],
)  # fmt: skip
async def test_what_is_no_request_is_refused_and_goes_nowhere(raw: bytes) -> None:
    async with passing() as (engine, port):
        told = parsed(await said(port, raw))
        assert told.start.split()[1] in (b"400", b"405", b"431", b"501")
        assert b'"error"' in told.body
        assert not engine.heard


# ---- answers ---------------------------------------------------------------------------------------------------


async def test_answers_come_as_they_are() -> None:
    fields = [
        (b"X-Bytes", EVERY_BYTE), (b"Set-Cookie", b"a=1; Path=/"), (b"Content-Type", b"x/y"), (b"Set-Cookie", b"b=2"),
        (b"date", b"then"), (b"Server", b"theirs"), (b"X-Long", b"l" * 300_000), (b"X-Empty", b""),
        (b"Content-Encoding", b"gzip"), (b"content-length", b"%d" % len(GZIP)),
        (b"WWW-Authenticate", b"Bearer"), (b"Retry-After", b"3"), (b"x-latin", b"caf\xe9"),
    ]  # fmt: skip
    head = b"".join(name + b": " + value + b"\r\n" for name, value in fields)
    answer = b"HTTP/1.1 203 So \xe9 be it\r\n%b\r\n%b" % (head, GZIP)
    _, told = await asked(request(b"Accept-Encoding: gzip", start=b"GET / HTTP/1.1"), answer=answer)
    got = parsed(told)
    assert (got.start, got.body) == (b"HTTP/1.1 203 Non-Authoritative Information", GZIP)
    assert got.fields == [(name.lower(), value) for name, value in fields] + [(b"connection", b"close")]


async def test_no_client_gets_the_cookies_of_another_one() -> None:
    async with passing(answer=b"HTTP/1.1 200 OK\r\nSet-Cookie: a=1\r\nContent-Length: 0\r\n\r\n") as (engine, port):
        for _ in range(2):
            assert b"set-cookie: a=1" in await said(port, request(start=b"GET / HTTP/1.1"))
        assert b"cookie" not in b"".join(engine.heard).lower()


@pytest.mark.parametrize(
    ("start", "answer"),
    [(b"HEAD /x HTTP/1.1", b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\nx: 1\r\n\r\n"),
     (b"GET /x HTTP/1.1", b"HTTP/1.1 304 Not Modified\r\netag: x\r\n\r\n"),
     (b"GET /x HTTP/1.1", b"HTTP/1.1 204 No Content\r\nx: 1\r\n\r\n"),
     (b"DELETE /x HTTP/1.1", b"HTTP/1.1 204 No Content\r\nx: 1\r\n\r\n")],
)  # fmt: skip
async def test_answers_without_a_body(start: bytes, answer: bytes) -> None:
    async with passing(answer=answer) as (engine, port):
        first = b"\r\n".join([start, b"Host: h", b"", b""])
        told = await said(port, first + first + request(start=start))
        assert told.count(answer.removesuffix(b"\r\n")) == 3
        assert told.count(b"\r\n\r\n") == 3
        assert len(engine.heard) == 1  # one connection served all


@pytest.mark.parametrize("start", [b"GET /x HTTP/1.1", b"POST /v1/completions HTTP/1.1"])
async def test_answers_in_chunks_come_without_trailers(start: bytes) -> None:
    answer = (
        b"HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"1;a=b\r\na\r\n3\r\nbcd\r\n0\r\nX-Sum: \xe9 1\r\nX-Sum: 2\r\n\r\n"
    )
    _, told = await asked(request(b"TE: trailers", b"Content-Length: 2", start=start, body=b"{}"), answer=answer)
    got = parsed(told)
    assert (got.body, got.trailers) == (b"abcd", [])
    assert got.named(b"trailer") == got.named(b"x-sum") == []


async def test_an_answer_that_ends_with_its_connection() -> None:
    _, told = await asked(request(start=b"GET / HTTP/1.1"), answer=b"HTTP/1.1 200 OK\r\n\r\nabc", closes=True)
    assert parsed(told).body == b"abc"


async def test_answers_before_the_answer_are_for_the_next_hop() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\nlink: \xe9\r\n\r\n"
    _, told = await asked(request(start=b"GET / HTTP/1.1"), interim=early + b"HTTP/1.1 102 Processing\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
    ],
)
async def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(answer: bytes) -> None:
    _, told = await asked(request(start=b"GET / HTTP/1.1"), answer=answer, closes=True)
    assert not told.endswith(b"0\r\n\r\n")
    assert b"ontent-Length: 3" not in told


@pytest.mark.parametrize(
    "answer",
    [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
     b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1_100_000 + b"\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: a\0b\r\n\r\n", b""],
)  # fmt: skip
async def test_what_is_no_answer_is_an_error(answer: bytes) -> None:
    _, told = await asked(request(start=b"GET / HTTP/1.1"), answer=answer, closes=True)
    assert parsed(told).start.split()[1] in (b"500", b"503")


async def test_what_follows_an_answer_is_nobodys_answer() -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    async with passing(answer=whole + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil") as (_, port):
        for _ in range(2):
            assert (await said(port, request(start=b"GET / HTTP/1.1"))).endswith(b"\r\n\r\nok")


async def test_a_stream_that_is_compressed_comes_at_once_and_whole() -> None:
    events = gzip.compress(b"data: 1\n\n" * 10)
    answer = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
        % len(events)
    ) + events
    _, told = await asked(request(start=b"GET / HTTP/1.1"), answer=answer)
    assert parsed(told).body == events


async def test_what_cannot_be_parsed_is_answered_also_if_more_follows() -> None:
    async with passing() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\x0b\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"400"
        writer.write(bytes(8_000_000))
        await writer.drain()
        assert b"not valid HTTP/1.1" in await reader.read()
        writer.close()
