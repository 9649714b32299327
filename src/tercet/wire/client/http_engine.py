"""The client of an engine that is called by HTTP."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from tercet.aio import TaskSet
from tercet.protocol import (
    AdapterReport,
    Conflict,
    EngineError,
    EngineLoad,
    EngineNotReached,
    EngineStatus,
    EngineUnreachable,
    LeaseEnded,
    MoveProposal,
    Output,
    OutputStream,
    Request,
    RequestTooLarge,
    Reservation,
    Sent,
    SequenceReport,
    TercetError,
    UnknownSequence,
    from_wire,
)
from tercet.protocol.call_proofs import CHALLENGE_HEADER, Prover, digest_of
from tercet.protocol.headers import INCARNATION_HEADER, REQUEST_ID_HEADER
from tercet.protocol.spans import SpanContext, current_span, working_in
from tercet.protocol.sse import EventTooLong, read_events
from tercet.protocol.wire import (
    API_PREFIX,
    JSON,
    UNREADABLE,
    AbortCall,
    ConnectCall,
    LoadAdapterCall,
    MoveCall,
    PrepRecvAnswer,
    PrepRecvCall,
    ReleaseCall,
    RemoteSendCall,
    ReplaceAdapterCall,
    RouterAddress,
    StartGenerateCall,
    StreamDestination,
    encode_call,
    large_field_of,
)
from tercet.settings.log_lines import request_id
from tercet.wire.client.bounded_answers import PLAIN, read_answer, require_plain
from tercet.wire.client.connection_errors import reason_of
from tercet.wire.client.stream_keeper import StreamKeeper
from tercet.wire.streams import EngineConnection, StreamListener

T = TypeVar("T")
UNAUTHORIZED = 401
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


class HttpEngine:
    """The client of an engine at ``url``; it implements :class:`~tercet.protocol.Engine`, which documents its methods.

    Use it as an async context manager. With a ``listener``, outputs arrive by the engine's token stream, ``on_load``
    receives the engine's load ten times a second, ``on_proposal`` the moves that it passes on, and ``on_lost`` is
    called when the stream has closed. Without a listener, or if the engine cannot connect to it, outputs arrive as
    server-sent events.

    The first call is ``status``, whose answer must pass ``admit``. Every later call carries that incarnation. A
    restarted engine refuses the call; then its status is requested, and ``on_new`` is called, since all state of the
    old engine is lost. ``secret`` is the fleet's, or the engine's API key, which is proved and never sent; ``tls`` is
    for an ``https://`` engine.
    """

    def __init__(
        self,
        name: str,
        url: str,
        listener: StreamListener | None = None,
        on_load: Callable[[EngineLoad], None] = lambda _: None,
        admit: Admit = lambda _: None,
        on_new: Callable[[], object] = lambda: None,
        secret: str = "",
        tls: ssl.SSLContext | None = None,
        on_proposal: Callable[[MoveProposal], None] = lambda _: None,
        on_lost: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self._prover = Prover(secret)
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None
        self._admit = admit
        self._on_new = on_new
        self._incarnation: str | None = None
        self._is_known = False
        self._refusal: TercetError | None = None
        # Leases of sequences whose context is still open; start_generate takes them over.
        self._held: dict[str, str] = {}
        self._releasing = TaskSet()
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._keeper = None
        if listener is not None:
            connection = listener.connection_of(name, on_load, on_proposal)
            connection.on_lost = on_lost
            self._keeper = StreamKeeper(listener, connection, self.url, self._connect, self.status)

    async def __aenter__(self) -> HttpEngine:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS, ssl=self._tls or True)
        self._session = aiohttp.ClientSession(connector=connector, headers=PLAIN, auto_decompress=False)
        if self._keeper is not None:
            self._keeper.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._keeper is not None:
            await self._keeper.close()
        await self._releasing.wait(5.0)
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def prep_recv(self, request: Request, end: int | None = None) -> AsyncGenerator[Reservation]:
        ending = self._ending.get(request.seq_id)
        if ending is not None:  # an engine has one lease per sequence; the call that ends one has a timeout
            await asyncio.wait({ending})
        reserving = asyncio.ensure_future(self._reserve(request, end))
        try:
            # The task is shielded: the engine reserves even if this call is cancelled, and the lease is needed to end
            # it.
            reservation = await asyncio.shield(reserving)
        except asyncio.CancelledError:
            reserving.add_done_callback(lambda done: self._release_reserved(request.seq_id, done))
            raise
        self._held[request.seq_id] = reservation.lease
        try:
            yield reservation
        finally:
            if self._held.pop(request.seq_id, None) is not None:
                self._release_soon(request.seq_id, reservation.lease)

    async def extend_recv(self, reservation: Reservation, request: Request, end: int | None = None) -> Reservation:
        return await self._reserve(request, end, reservation.lease)

    async def _reserve(self, request: Request, end: int | None, lease: str | None = None) -> Reservation:
        call = PrepRecvCall(
            prompt=list(request.prompt),
            seq_id=request.seq_id,
            end=end,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            adapter_digest=request.adapter_digest,
            mm_features=tuple(feature.without_data() for feature in request.mm_features),
            lease=lease,
        )
        answer = await self._post("prep_recv", call, PrepRecvAnswer)
        return Reservation(answer.kv_addr_info, answer.matched_len)

    def _release_soon(self, seq_id: str, lease: str) -> None:
        """End a lease in the background: leaving a reservation never waits for an engine that does not answer."""
        task = self._ending[seq_id] = self._releasing.spawn(self._release(lease))
        task.add_done_callback(lambda done: self._ending.pop(seq_id) if self._ending.get(seq_id) is done else None)

    def _release_reserved(self, seq_id: str, reserving: asyncio.Future[Reservation]) -> None:
        if not reserving.cancelled() and reserving.exception() is None:
            self._release_soon(seq_id, reserving.result().lease)

    async def _release(self, lease: str) -> None:
        try:
            await self._post("release", ReleaseCall(lease=lease), dict[str, Any])
        except (UnknownSequence, LeaseEnded, EngineUnreachable):
            return  # the lease, or its engine, has ended; otherwise the lease's time to live ends it

    async def remote_send(
        self, request: Request, to: Reservation, begin: int, end: int | None = None, sample: bool = False
    ) -> Sent:
        call = RemoteSendCall(
            prompt=list(request.prompt),
            kv_addr_info=to.kv_addr_info,
            begin=begin,
            end=to.end if end is None else end,
            seq_id=request.seq_id,
            sample=sample,
            sampling_params=request.sampling_params,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            adapter_digest=request.adapter_digest,
            mm_features=request.mm_features,
            priority=request.priority,
        )
        return await self._post("remote_send", call, Sent, PATIENT)

    def start_generate(self, request: Request, begin: int = 0, output: Sequence[int] = ()) -> OutputStream:
        call = StartGenerateCall(
            prompt=list(request.prompt),
            seq_id=request.seq_id,
            begin=begin,
            output=list(output),
            sampling_params=request.sampling_params,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            adapter_digest=request.adapter_digest,
            mm_features=request.mm_features,
            priority=request.priority,
        )
        return OutputStream(partial(self._generate, call, current_span()))

    async def _generate(self, call: StartGenerateCall, place: SpanContext | None, stream: OutputStream) -> None:
        try:
            connection = await self._connection()
            if connection is None:
                with working_in(place):
                    await self._receive_events(call, stream)
                return
            # leaving early cancels the sequence on the engine
            with connection.sequence(len(call.output), stream) as number:
                router = StreamDestination(address=connection.address, key=connection.key, number=number)
                with working_in(place):
                    connection.start(msgspec.structs.replace(call, router=router))
                await stream.until_over()
        finally:
            if stream.begun:
                self._held.pop(call.seq_id, None)  # the running sequence has the blocks

    async def _connection(self) -> EngineConnection | None:
        try:
            return await self._keeper.ready() if self._keeper is not None else None
        except EngineUnreachable as error:
            raise EngineNotReached(error.message) from error

    async def _receive_events(self, call: StartGenerateCall, stream: OutputStream) -> None:
        """Receive outputs as server-sent events; if the caller leaves early, end answer and sequence."""
        async with self._call("start_generate", call, PATIENT) as response:
            try:
                async for data in read_events(response.content.iter_any()):
                    stream.put(self._output_of(data))
                    await stream.until_asked()
            except (aiohttp.ClientError, HttpProcessingError, EventTooLong, TimeoutError, OSError) as error:
                raise EngineUnreachable(f"{self.name} was lost: {reason_of(error)}") from error
            if not stream.over:
                raise EngineUnreachable(f"{self.name} ended the stream without a finish reason")

    async def _connect(self, router: RouterAddress) -> None:
        await self._post("connect", ConnectCall(router=router), dict[str, Any])

    async def abort(self, seq_id: str) -> None:
        await self._post("abort", AbortCall(seq_id=seq_id), dict[str, Any])

    async def load_adapter(self, name: str, path: str) -> AdapterReport:
        """Load an adapter: see :class:`~tercet.protocol.TakesAdapters`."""
        return await self._post("adapters", LoadAdapterCall(name=name, path=path), AdapterReport, PATIENT)

    async def replace_adapter(self, name: str, path: str) -> AdapterReport:
        """Replace an adapter: see :class:`~tercet.protocol.TakesAdapters`."""
        async with self._call(_adapter(name), ReplaceAdapterCall(path=path), PATIENT, "PUT") as response:
            return await self._decode(response, AdapterReport)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter: see :class:`~tercet.protocol.TakesAdapters`."""
        async with self._call(_adapter(name), None, QUICK, "DELETE") as response:
            await self._decode(response, dict[str, Any])

    async def status(self) -> EngineStatus:
        async with self._exchange("status", None, QUICK, {}) as response:
            status = await self._decode(response, EngineStatus)
        self._meet(status)
        return status

    async def sequences(self) -> list[SequenceReport]:
        """Return the sequences that the engine generates for all clients; the last known ones if it is stuck."""
        async with self._call("sequences", None, QUICK) as response:
            return await self._decode(response, list[SequenceReport])

    async def propose_move(self, seq_id: str, destination: str, reason: str) -> None:
        """Ask the engine to pass a proposal to move a sequence on to the router that runs the sequence.

        ``seq_id`` is the engine's id for the sequence, or its client's. Returns when the proposal was sent; the router
        records its result. Raises :class:`~tercet.protocol.UnknownSequence` if the engine does not generate the
        sequence, and :class:`~tercet.protocol.Conflict` if no router receives its tokens.
        """
        path = f"sequences/{quote(seq_id, safe='')}/move"
        await self._post(path, MoveCall(destination=destination, reason=reason), dict[str, Any])

    def _meet(self, status: EngineStatus) -> None:
        """Check whether the engine may be used, and drop the state of an earlier incarnation."""
        self._refusal = None
        try:
            self._admit(status)
        except TercetError as error:
            self._refusal = error
        before, self._incarnation, self._is_known = self._incarnation, status.incarnation, True
        if self._keeper is not None:
            self._keeper.connection.incarnation = status.incarnation
        if before is not None and before != status.incarnation:
            self._held.clear()
            if self._keeper is not None:
                self._keeper.connection.drop("it was restarted")
            self._on_new()

    async def _addressed(self) -> dict[str, str]:
        """Return the headers of a call, with the incarnation to which it is addressed."""
        if not self._is_known:
            try:
                await self.status()
            except EngineUnreachable as error:
                raise EngineNotReached(error.message) from error
        if self._refusal is not None:
            raise EngineNotReached(f"{self.name} is not used: {self._refusal.message.removeprefix('url: ')}")
        return {INCARNATION_HEADER: self._incarnation} if self._incarnation else {}

    async def _post(self, verb: str, call: msgspec.Struct, kind: type[T], timeout: aiohttp.ClientTimeout = QUICK) -> T:
        async with self._call(verb, call, timeout) as response:
            return await self._decode(response, kind)

    @asynccontextmanager
    async def _call(
        self, verb: str, call: msgspec.Struct | None, timeout: aiohttp.ClientTimeout, method: str = ""
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
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
        url = f"{self.url}{API_PREFIX}/{verb}"
        body, content_type = (None, JSON) if call is None else encode_call(call)
        headers = {"content-type": content_type, **headers}
        if named := request_id():
            headers[REQUEST_ID_HEADER] = named
        if (place := current_span()) is not None:
            headers |= place.headers()
        path, digest = f"/{unquote(verb)}", digest_of(body)

        async def ask() -> aiohttp.ClientResponse:
            proved = {**headers, **self._prover.headers(method, path, digest)}
            try:
                response = await self._client.request(
                    method, url, data=body, headers=proved, timeout=timeout, allow_redirects=False
                )
                require_plain(response)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                raise EngineNotReached(f"{self.name} cannot be reached: {reason_of(error)}") from error
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise EngineUnreachable(f"{self.name} does not answer: {reason_of(error)}") from error
            return response

        response = await ask()
        # So far the engine has only sent a challenge.
        if response.status == UNAUTHORIZED and self._prover.meets(response.headers.getall(CHALLENGE_HEADER, [])):
            response.release() if response.content.at_eof() else response.close()
            response = await ask()
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
            raise EngineUnreachable(f"{self.name} was lost: {reason_of(error)}") from error
        if response.status >= 400:
            raise _error_of(response.status, body)
        return self._understood(body, kind)

    def _too_large(self, error: RequestTooLarge, call: msgspec.Struct | None) -> RequestTooLarge:
        """Return the error with the name of the large field: an engine that has not read a body cannot know it."""
        if error.param is not None or call is None:
            return error
        large = large_field_of(call)
        return RequestTooLarge(f"{large}: too large for {self.name}: {error.message}", large)

    def _understood(self, said: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(said, type=kind)
        except UNREADABLE as error:
            raise EngineError(f"{self.name} does not answer as a Tercet engine: {error}") from error

    def _output_of(self, data: bytes) -> Output:
        if data.startswith(b'{"error"'):
            raise _error_of(500, data)
        return self._understood(data, Output)

    @property
    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("HttpEngine is used outside its async context")
        return self._session


def _adapter(name: str) -> str:
    return f"adapters/{quote(name, safe='')}"


def _error_of(status: int, body: bytes) -> TercetError:
    try:
        return from_wire(status, msgspec.json.decode(body, type=dict[str, Any]))
    except UNREADABLE:
        return from_wire(status, {"error": {"message": f"HTTP {status}: {body[:200].decode(errors='replace')}"}})
