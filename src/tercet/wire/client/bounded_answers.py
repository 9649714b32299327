"""Answers of untrusted HTTP servers: not compressed, without redirects, and of limited size; and calls with a proof.

A client may name the server. A megabyte of gzip can become gigabytes, and a redirect leaves the list of allowed
servers, and must not carry a secret elsewhere. :func:`reason_of` says why there is no answer. :func:`proved` makes a
call that proves a secret, and answers one challenge.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import aiohttp

from tercet.protocol.access import CHALLENGE_HEADER, Prover, digest_of

LONGEST = 16 * 1024 * 1024
PLAIN = {"accept-encoding": "identity"}
"""Headers of requests whose answers are read here."""
REDIRECTS = range(300, 400)


class AnswerRefused(aiohttp.ClientPayloadError):
    """An error for an answer that is not read, or not to its end; callers treat it as an answer that was cut off."""


def require_plain(response: aiohttp.ClientResponse) -> None:
    """Raise :class:`AnswerRefused` for a redirect, and for a compressed body, before any of it is read.

    The session must have ``auto_decompress=False``, and its requests ``allow_redirects=False``.
    """
    refusal = None
    if response.status in REDIRECTS:
        refusal = f"it redirects (HTTP {response.status}), which is not followed"
    elif (encoding := response.headers.get("content-encoding", "identity").strip().lower()) not in ("identity", ""):
        refusal = f"it answers in {encoding[:20]!r}, which was not requested"
    if refusal is not None:
        response.close()
        raise AnswerRefused(refusal)


async def read_answer(response: aiohttp.ClientResponse, longest: int | None = None) -> bytes:
    """Return the whole body.

    Raises :class:`AnswerRefused` for more than ``longest`` bytes, and errors of :func:`require_plain`.
    """
    require_plain(response)
    longest = LONGEST if longest is None else longest
    parts, size = list[bytes](), 0
    while part := await response.content.readany():
        parts.append(part)
        size += len(part)
        if size > longest:
            response.close()
            raise AnswerRefused(f"its answer has more than {longest} bytes")
    return b"".join(parts)


async def proved(
    prover: Prover,
    method: str,
    path: str,
    body: bytes | None,
    ask: Callable[[dict[str, str]], Awaitable[aiohttp.ClientResponse]],
) -> aiohttp.ClientResponse:
    """Return the answer to a call, which ``ask`` makes with the headers of its proof; the caller closes it.

    ``path`` is relative to ``/tercet/v1``. After a challenge the call is made once more, and no third time: a server
    with another secret sends one each time.
    """
    digest = digest_of(body)
    response = await ask(prover.headers(method, path, digest))
    challenges = response.headers.getall(CHALLENGE_HEADER, [])
    if response.status == HTTPStatus.UNAUTHORIZED and prover.meets(challenges):
        response.release() if response.content.at_eof() else response.close()
        response = await ask(prover.headers(method, path, digest))
    return response


def reason_of(error: BaseException) -> str:
    """Return why a call got no answer, such as ``Connection refused``, without the address of the call."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    if isinstance(cause, (ssl.SSLError, ssl.CertificateError)):
        detail = getattr(cause, "verify_message", "") or getattr(cause, "reason", "")
        return f"TLS: {detail or 'no secure connection'}"
    if isinstance(cause, TimeoutError):
        return "it took too long"
    if isinstance(cause, socket.gaierror):
        return "cannot resolve its host name"
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno)
    return str(cause) or type(cause).__name__
