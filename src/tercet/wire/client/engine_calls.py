"""Calls of an engine over HTTP: proved, addressed to one incarnation of the engine, and with typed answers.

Also the TLS settings of the caller.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import aiohttp
import msgspec

from tercet.aio.files import require_regular
from tercet.logs import request_id
from tercet.protocol import (
    BadRequest,
    Conflict,
    EngineError,
    EngineNotReached,
    EngineStatus,
    EngineUnreachable,
    Output,
    RequestTooLarge,
    TercetError,
    from_wire,
)
from tercet.protocol.access import Prover
from tercet.protocol.headers import INCARNATION_HEADER, REQUEST_ID_HEADER
from tercet.protocol.spans import current_span
from tercet.protocol.wire import API_PREFIX, JSON, UNREADABLE, encode_call, large_field_of
from tercet.wire.client.bounded_answers import PLAIN, proved, read_answer, reason_of, require_plain

T = TypeVar("T")
# Seconds of silence after which an engine counts as dead: between two outputs of a stream it may run one long prefill
# of other requests.
SILENCE_SECONDS = 300.0
# A verb that only reserves or frees waits for at most one engine step.
QUICK = aiohttp.ClientTimeout(total=30.0, sock_connect=5.0)
PATIENT = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=SILENCE_SECONDS)
# vLLM closes a connection that was idle for 5 s. A call that is sent at that time is lost, and looks like a dead
# engine.
KEEPALIVE_SECONDS = 2.0


Admit = Callable[[EngineStatus], object]
"""A function that raises :class:`~tercet.protocol.TercetError` for an engine that must not be used."""


class EngineCalls:
    """Calls of the engine at ``url`` between :meth:`open` and :meth:`close`.

    The first call is ``status``, whose answer must pass ``admit``. Every later call carries that incarnation. A
    restarted engine refuses the call; then its status is requested. ``on_status`` is called after each status, with
    True if the engine was restarted since the status before. ``secret`` is proved and never sent.
    """

    def __init__(
        self,
        name: str,
        url: str,
        admit: Admit,
        on_status: Callable[[EngineStatus, bool], object],
        secret: str,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._name, self._url = name, url
        self._prover = Prover(secret)
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None
        self._admit = admit
        self._on_status = on_status
        self._incarnation: str | None = None
        self._is_known = False
        self._refusal: TercetError | None = None

    def open(self) -> None:
        """Open the session; its connections are opened by calls."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS, ssl=self._tls or True)
        self._session = aiohttp.ClientSession(connector=connector, headers=PLAIN, auto_decompress=False)

    async def close(self) -> None:
        """Close the session and its connections."""
        if self._session is not None:
            await self._session.close()

    async def status(self) -> EngineStatus:
        """Request the engine's status, and check whether the engine may be used."""
        async with self._exchange("status", None, QUICK, {}) as response:
            status = await self._decode(response, EngineStatus)
        self._refusal = None
        try:
            self._admit(status)
        except TercetError as error:
            self._refusal = error
        before, self._incarnation, self._is_known = self._incarnation, status.incarnation, True
        self._on_status(status, before is not None and before != status.incarnation)
        return status

    async def result_of(
        self,
        verb: str,
        call: msgspec.Struct | None,
        kind: type[T],
        timeout: aiohttp.ClientTimeout = QUICK,
        method: str = "",
    ) -> T:
        """Make a call and return its result, decoded as ``kind``; see :meth:`answer_to`."""
        async with self.answer_to(verb, call, timeout, method) as response:
            return await self._decode(response, kind)

    @asynccontextmanager
    async def answer_to(
        self, verb: str, call: msgspec.Struct | None, timeout: aiohttp.ClientTimeout, method: str = ""
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Make a call and yield its answer, which has begun; the answer is closed at the end.

        ``method`` is GET by default, or POST if there is a ``call``. Raises the error that the engine answers, and
        :class:`~tercet.protocol.EngineUnreachable` if it does not answer.
        """
        async with AsyncExitStack() as stack:
            try:
                where = await self._addressed()
                response = await stack.enter_async_context(self._exchange(verb, call, timeout, where, method))
            except Conflict as error:
                if error.param != INCARNATION_HEADER:
                    raise
                self._is_known = False  # the engine refused the call before any work: check it, and call again
                where = await self._addressed()
                response = await stack.enter_async_context(self._exchange(verb, call, timeout, where, method))
            yield response

    def output_of(self, data: bytes) -> Output:
        """Return the output that a server-sent event carries, or raise its error."""
        if data.startswith(b'{"error"'):
            raise _error_of(500, data)
        return self._understood(data, Output)

    async def _addressed(self) -> dict[str, str]:
        """Return the headers of a call, with the incarnation to which it is addressed."""
        if not self._is_known:
            try:
                await self.status()
            except EngineUnreachable as error:
                raise EngineNotReached(error.message) from error
        if self._refusal is not None:
            raise EngineNotReached(f"{self._name} is not used: {self._refusal.message.removeprefix('url: ')}")
        return {INCARNATION_HEADER: self._incarnation} if self._incarnation else {}

    @asynccontextmanager
    async def _exchange(
        self,
        verb: str,
        call: msgspec.Struct | None,
        timeout: aiohttp.ClientTimeout,
        headers: dict[str, str],
        method: str = "",
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        method = method or ("GET" if call is None else "POST")
        url = f"{self._url}{API_PREFIX}/{verb}"
        body, content_type = (None, JSON) if call is None else encode_call(call)
        headers = {"content-type": content_type, **headers}
        if named := request_id():
            headers[REQUEST_ID_HEADER] = named
        if (place := current_span()) is not None:
            headers |= place.headers()

        async def ask(proof: dict[str, str]) -> aiohttp.ClientResponse:
            try:
                response = await self._client.request(
                    method, url, data=body, headers={**headers, **proof}, timeout=timeout, allow_redirects=False
                )
                require_plain(response)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                raise EngineNotReached(f"{self._name} cannot be reached: {reason_of(error)}") from error
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise EngineUnreachable(f"{self._name} does not answer: {reason_of(error)}") from error
            return response

        response = await proved(self._prover, method, f"/{unquote(verb)}", body, ask)
        try:
            if response.status >= 400:
                try:
                    await self._decode(response, dict[str, Any])
                except RequestTooLarge as error:
                    raise self._too_large(error, call) from error
            yield response
        finally:
            # Closing an unfinished answer tells the engine that the client has left.
            response.release() if response.content.at_eof() else response.close()

    async def _decode(self, response: aiohttp.ClientResponse, kind: type[T]) -> T:
        try:
            body = await read_answer(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineUnreachable(f"{self._name} was lost: {reason_of(error)}") from error
        if response.status >= 400:
            raise _error_of(response.status, body)
        return self._understood(body, kind)

    def _too_large(self, error: RequestTooLarge, call: msgspec.Struct | None) -> RequestTooLarge:
        """Return the error with the name of the large field: an engine that has not read a body cannot know it."""
        if error.param is not None or call is None:
            return error
        large = large_field_of(call)
        return RequestTooLarge(f"{large}: too large for {self._name}: {error.message}", large)

    def _understood(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except UNREADABLE as error:
            raise EngineError(f"{self._name} does not answer as a Tercet engine: {error}") from error

    @property
    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("HttpEngine is used outside its async context")
        return self._session


def _error_of(status: int, body: bytes) -> TercetError:
    try:
        return from_wire(status, msgspec.json.decode(body, type=dict[str, Any]))
    except UNREADABLE:
        return from_wire(status, {"error": {"message": f"HTTP {status}: {body[:200].decode(errors='replace')}"}})


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
