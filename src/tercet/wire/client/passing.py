"""Requests that a proxy passes on, and their answers: bodies unchanged, and header fields except those of a hop.

Only the fields for the next hop are left out (RFC 9110, 7.6.1), and trailers. No body is decoded, decompressed or
merged on the way; cookies and redirects are not handled. aiohttp's client sends the requests.

    client ──▶ ASGI scope, receive ──▶ request() ──▶ server behind
    client ◀── ASGI send  ◀── part() ◀── OriginAnswer ◀──┘
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Collection, Sequence

import aiohttp
from yarl import URL

from tercet.wire.client.bounded_answers import reason_of

Fields = Sequence[tuple[bytes, bytes]]
"""Header fields: names as they were written, in any case, and values without surrounding white space."""

HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade"}
)  # fmt: skip


def values(fields: Fields, name: bytes) -> list[bytes]:
    """Return the values of all fields with that lower-case name."""
    return [value for each, value in fields if each.lower() == name]


def first(fields: Fields, name: bytes) -> str | None:
    """Return the first value of a field, one character per byte; None without one."""
    return next((value.decode("latin-1") for each, value in fields if each.lower() == name), None)


def end_to_end(fields: Fields, but: Collection[bytes] = ()) -> list[tuple[bytes, bytes]]:
    """Return the fields that a proxy passes on.

    Left out are fields for the next hop, fields named by ``Connection``, fields of framing, and those in ``but``.
    """
    return passed_on(fields, {b"content-length", *but})


def passed_on(fields: Fields, but: Collection[bytes] = ()) -> list[tuple[bytes, bytes]]:
    """Return the fields of :func:`end_to_end`, and the length of a message whose body is passed on as it arrives."""
    dropped = {*HOP_BY_HOP, *but}
    dropped |= {each.strip().lower() for value in values(fields, b"connection") for each in value.split(b",")}
    if values(fields, b"transfer-encoding"):
        dropped.add(b"content-length")
    return [(name, value) for name, value in fields if name.lower() not in dropped]


READ_BYTES = 64 * 1024
# Headers that aiohttp would add.
NOT_ADDED = frozenset({"Accept", "Accept-Encoding", "Content-Type", "User-Agent"})


class BrokeOff(ConnectionError):
    """An error: the server closed the connection before its message was complete."""


class NotConnected(ConnectionError):
    """An error: there is no connection to the server."""


class NotReadable(Exception):
    """An error: the server did not send valid HTTP/1.1."""


def passing_session(
    tls: ssl.SSLContext | None, *, keep_alive_s: float, connect_s: float, max_head: int
) -> aiohttp.ClientSession:
    """Return a session for :func:`request`. Its idle connections are used for ``keep_alive_s`` seconds.

    ``tls`` is for ``https://`` servers. Connecting takes at most ``connect_s`` seconds. A field of an answer's head has
    at most ``max_head`` bytes.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=tls or True, keepalive_timeout=keep_alive_s),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
        cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, read_bufsize=READ_BYTES,
        max_line_size=max_head, max_field_size=max_head,
    )  # fmt: skip


class OriginAnswer:
    """An answer whose body is read as it arrives. The caller closes it."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.fields: Fields = response.raw_headers
        self._response = response

    async def part(self) -> bytes:
        """Return the body's next bytes, empty at its end; chunks that arrive together are returned together.

        Raises :class:`BrokeOff`.
        """
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            # aiohttp says of a body only that it is not complete, and why in the cause.
            is_cut = isinstance(error, aiohttp.ClientPayloadError)
            raise BrokeOff("it closed the connection" if is_cut else reason_of(error)) from error

    def close(self) -> None:
        """Stop reading. After the answer's end the connection is reused; before that, it is closed."""
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


class _Body:
    """The body of a request, which is sent once: a second try would send the rest of it only."""

    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        self.error: Exception | None = None
        self._parts: AsyncIterator[bytes] | None = parts

    def __aiter__(self) -> AsyncIterator[bytes]:
        parts, self._parts = self._parts, None
        if parts is None:
            raise BrokeOff("it closed the connection")
        return self._sent(parts)

    async def _sent(self, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        try:
            async for part in parts:
                yield part
        except Exception as error:
            self.error = error
            raise


async def request(
    session: aiohttp.ClientSession, url: str, method: str, target: bytes, fields: Fields,
    body: bytes | AsyncIterator[bytes] | None,
) -> OriginAnswer:  # fmt: skip
    """Return the answer of the server at ``url`` as soon as its head has arrived, perhaps before all of ``body``.

    A body that is an iterator has the length in ``fields``, or is sent in chunks. The server's host is added unless
    ``fields`` name one. Raises :class:`NotConnected`, :class:`BrokeOff`, :class:`NotReadable`, and the errors of
    ``body``.
    """
    streamed = _Body(body) if isinstance(body, AsyncIterator) else None
    # In lower case: aiohttp takes the same name in another case for a replacement.
    headers = [(name.decode("ascii").lower(), _text(value)) for name, value in fields]
    try:
        return OriginAnswer(
            await session.request(
                method, URL(url.rstrip("/") + target.decode("ascii"), encoded=True), headers=headers,
                data=body if streamed is None else streamed, skip_auto_headers=NOT_ADDED, allow_redirects=False,
            )
        )  # fmt: skip
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise NotConnected(reason_of(error)) from error
    except (aiohttp.ClientError, OSError) as error:
        if streamed is not None and streamed.error is not None:
            raise streamed.error from None
        if isinstance(error, aiohttp.ClientResponseError):
            raise NotReadable(error.message) from error
        raise BrokeOff(reason_of(error)) from error


def _text(value: bytes) -> str:
    """Return a field's value, which aiohttp sends in UTF-8; other text is read as Latin-1, HTTP's older charset."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
