"""A server and a client of plain sockets, which send bytes as a test has them and keep those that come."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from tests.longest_wait import LONGEST_WAIT_S

HOST = "127.0.0.1"


@dataclass
class RawServer:
    """Answers every request with ``answer``; ``heard`` is what came, a connection each."""

    answer: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    interim: bytes = b""
    """Said as soon as a head has come, before the body."""
    closes: bool = False
    heard: list[bytearray] = field(default_factory=list[bytearray])
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard = bytearray()
        self.heard.append(heard)
        with suppress(OSError):
            start, told = 0, False
            while data := await reader.read(65536):
                heard += data
                if not told and b"\r\n\r\n" in heard[start:]:
                    told = True
                    writer.write(self.interim)
                if is_whole(bytes(heard[start:])):
                    start, told = len(heard), False
                    writer.write(self.answer)
                    if self.closes:
                        break
        writer.close()


def is_whole(message: bytes) -> bool:
    head, end, body = message.partition(b"\r\n\r\n")
    if not end:
        return False
    if re.search(rb"(?im)^transfer-encoding: *chunked", head):
        return re.search(rb"(^|\r\n)0\r\n([^\r\n]+\r\n)*\r\n$", body) is not None
    length = re.search(rb"(?im)^content-length: *(\d+)", head)
    return len(body) >= (int(length[1]) if length else 0)


@asynccontextmanager
async def raw_server(**says: object) -> AsyncGenerator[RawServer]:
    found = RawServer(**says)  # type: ignore[arg-type]
    server = await asyncio.start_server(found.serve, HOST, 0)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()


async def said(port: int, *pieces: bytes, until: bytes = b"", seconds: float = LONGEST_WAIT_S) -> bytes:
    """What a server says to these bytes, until it closes the connection, or has said ``until``."""
    reader, writer = await asyncio.open_connection(HOST, port)
    got = b""
    try:
        async with asyncio.timeout(seconds):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            while data := await reader.read(65536):
                got += data
                if until and got.endswith(until):
                    break
    finally:
        writer.close()
    return got


@dataclass(frozen=True)
class Message:
    """One in its parts: ``fields`` in their order, names in lower case; chunks of a body are joined."""

    start: bytes
    fields: Sequence[tuple[bytes, bytes]]
    body: bytes
    trailers: Sequence[tuple[bytes, bytes]] = ()

    def named(self, name: bytes) -> list[bytes]:
        return [value for each, value in self.fields if each == name]


def parsed(raw: bytes, has_body: bool = True) -> Message:
    head, _, rest = raw.partition(b"\r\n\r\n")
    start, *lines = head.split(b"\r\n")
    fields = _fields(lines)
    if not has_body or (b"transfer-encoding", b"chunked") not in fields:
        return Message(start, fields, rest)
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not (count := int(size.partition(b";")[0], 16)):
            return Message(start, fields, body, _fields(rest.removesuffix(b"\r\n").split(b"\r\n")[:-1]))
        body, rest = body + rest[:count], rest[count + 2 :]


def _fields(lines: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value.strip(b" \t")) for name, _, value in (line.partition(b":") for line in lines)]
