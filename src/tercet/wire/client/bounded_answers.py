"""Answers of untrusted HTTP servers: not compressed, without redirects, and of limited size; and calls with a proof.

A client may name the server. A megabyte of gzip can become gigabytes, and a redirect leaves the list of allowed
servers, and must not carry a secret elsewhere. :func:`reason_of` says why there is no answer. :func:`proved` makes a
call that proves a secret, and answers one challenge. :func:`engine_tls` has the certificates of calls.

Then the calls of a router: of its admin API, and of an engine that joins it, stays and leaves.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import aiohttp
import msgspec

from tercet.aio.files import require_regular
from tercet.protocol import BadRequest, EngineNotReached, EngineUnreachable, TercetError
from tercet.protocol.wire import API_PREFIX, MEMBERS, JoinCall, Joined, answer_of_router, network_reason
from tercet.wire.callers import CHALLENGE_HEADER, Prover, bearer, digest_of

LONGEST = 16 * 1024 * 1024
PLAIN = {"accept-encoding": "identity"}
"""Headers of requests whose answers are read here."""
REDIRECTS = range(300, 400)
AGAIN_SECONDS = 2.0
"""Interval in seconds at which a member repeats its call to join, so that a restarted router soon lists it again."""
LEAVE_SECONDS = 5.0
"""Longest wait in seconds for a router that does not answer when an engine leaves."""


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


async def read_answer(response: aiohttp.ClientResponse) -> bytes:
    """Return the whole body.

    Raises :class:`AnswerRefused` for more than :data:`LONGEST` bytes, and errors of :func:`require_plain`.
    """
    require_plain(response)
    parts, size = list[bytes](), 0
    while part := await response.content.readany():
        parts.append(part)
        size += len(part)
        if size > LONGEST:
            response.close()
            raise AnswerRefused(f"its answer has more than {LONGEST} bytes")
    return b"".join(parts)


async def proved(
    prover: Prover, method: str, path: str, body: bytes | None,
    ask: Callable[[dict[str, str]], Awaitable[aiohttp.ClientResponse]],
) -> aiohttp.ClientResponse:  # fmt: skip
    """Return the answer to a call, which ``ask`` makes with the headers of its proof; the caller closes it.

    ``path`` is relative to ``/tercet/v1``. After a challenge the call is made once more, and no third time: a server
    with another secret sends one each time.
    """
    digest = digest_of(body)
    response = await ask(prover.headers(method, path, digest))
    challenges = response.headers.getall(CHALLENGE_HEADER, [])
    # A proof answers the server's challenge, which the first call to it, or to a restarted one, does not know.
    if response.status == HTTPStatus.UNAUTHORIZED and prover.meets(challenges):
        response.release() if response.content.at_eof() else response.close()
        response = await ask(prover.headers(method, path, digest))
    return response


def reason_of(error: BaseException) -> str:
    """Return why a call got no answer, such as ``Connection refused``, without the address of the call."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    return network_reason(cause)


def engine_tls(ca: str | None, certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """Return the TLS context of the given PEM files; None (the system's TLS) without any file.

    ``ca`` has the CA certificates by which engines' certificates are checked, instead of the system's; ``certificate``
    is the caller's, with its ``key`` unless the same file has the key. Raises :class:`~tercet.protocol.BadRequest` for
    unusable files.
    """
    if key is not None and certificate is None:
        raise BadRequest("engine-key: requires engine-cert", "engine-key")
    if ca is None and certificate is None:
        return None
    try:
        if ca is not None:
            require_regular(Path(ca))
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise BadRequest(f"engine-ca: {ca} is not a file of certificates (PEM): {error}", "engine-ca") from error
    if certificate is not None:
        try:
            for each in (certificate, key):
                if each is not None:
                    require_regular(Path(each))
            # Without a password OpenSSL would ask for one on the terminal.
            context.load_cert_chain(certificate, key, password="")
        except (OSError, ssl.SSLError) as error:
            files = certificate if key is None else f"{certificate} with the key {key}"
            raise BadRequest(
                f"engine-cert: {files} cannot be used (PEM, with no password): {error}", "engine-cert"
            ) from error
    return context


# Adding an engine waits for the engine's answer, and loading a program for the user's module.
CHANGE_ANSWER = aiohttp.ClientTimeout(total=60.0, sock_connect=5.0)
READ_ANSWER = aiohttp.ClientTimeout(total=20.0, sock_connect=5.0)


async def ask_router(
    url: str, method: str, path: str, body: Any = None, admin_key: str = "", checks_certificate: bool = True
) -> Any:
    """Return the router's JSON answer to ``method`` on ``/tercet/v1`` + ``path``.

    Raises the :class:`~tercet.protocol.TercetError` in the answer, and :class:`~tercet.protocol.EngineUnreachable` if
    no router answers there: :class:`~tercet.protocol.EngineNotReached` if the call was certainly not sent.
    """
    headers = {"content-type": "application/json", **bearer(admin_key), **PLAIN}
    data = None if body is None else msgspec.json.encode(body)
    timeout = READ_ANSWER if method == "GET" else CHANGE_ANSWER
    where = f"{url.rstrip('/')}{API_PREFIX}{path}"
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session,
            session.request(
                method, where, data=data, headers=headers, allow_redirects=False, ssl=checks_certificate
            ) as response,
        ):
            status, answer = response.status, await read_answer(response)
    # Two errors, since only the first one is safe to repeat: the call was certainly not carried out.
    except aiohttp.ClientConnectorError as error:
        raise EngineNotReached(f"no router answers at {url}: {reason_of(error)}", "url") from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineUnreachable(f"no router answers at {url}: {reason_of(error)}", "url") from error
    return answer_of_router(url, status, answer)


class RouterMembership:
    """The membership of the engine ``name`` at the router ``url``.

    An async context manager; its exit closes the connection. Without a ``secret``, only a router of the same machine
    lets the engine join.
    """

    def __init__(self, url: str, name: str, secret: str = "") -> None:
        self._url = url.rstrip("/")
        self._path = MEMBERS + quote(name, safe="")
        self._signed = MEMBERS + name
        self._prover = Prover(secret)

    async def __aenter__(self) -> Self:
        self._client = aiohttp.ClientSession(timeout=CHANGE_ANSWER, auto_decompress=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def join(self, call: JoinCall) -> Joined:
        """Join the router, or stay a member. Raises :class:`~tercet.protocol.TercetError`, as :meth:`leave` does."""
        return await self._ask("PUT", "", msgspec.json.encode(call))

    async def stay(self, call: JoinCall, on_state: Callable[[str], object]) -> None:
        """Repeat the call to join until cancelled; report each change of the result once."""
        said = ""
        while True:
            try:
                await self.join(call)
                state = "is a member of the router's fleet"
            except TercetError as error:
                state = f"is not a member: {error.message}"
            if state != said:
                on_state(state)
                said = state
            await asyncio.sleep(AGAIN_SECONDS)

    async def leave(self, uid: str) -> Joined:
        """Leave the router, for the start ``uid`` of the engine."""
        return await self._ask("DELETE", f"/{uid}", None)

    async def _ask(self, method: str, rest: str, body: bytes | None) -> Joined:
        where = f"{self._url}{API_PREFIX}{self._path}{rest}"

        async def ask(proof: dict[str, str]) -> aiohttp.ClientResponse:
            headers = {"content-type": "application/json", **proof, **PLAIN}
            return await self._client.request(method, where, data=body, headers=headers, allow_redirects=False)

        try:
            async with await proved(self._prover, method, self._signed + rest, body, ask) as response:
                status, answer = response.status, await read_answer(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineUnreachable(f"no router answers at {self._url}: {reason_of(error)}", "url") from error
        return answer_of_router(self._url, status, answer, Joined)
