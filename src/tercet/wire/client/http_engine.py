"""How a router uses one engine: calls by HTTP, and a token stream that brings the outputs of all its sequences.

:class:`EngineCalls` makes calls that are proved, addressed to one incarnation of the engine, and have typed answers.
:class:`EngineConnection` starts and ends sequences, and :class:`SequenceInbox` delivers what arrives for each.
:class:`HttpEngine` has the verbs, made of both. :mod:`tercet.wire.client.stream_listener` keeps the engine connected.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, unquote

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from tercet.aio.tasks import TaskSet
from tercet.logs import request_id
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
from tercet.protocol.headers import INCARNATION_HEADER, REQUEST_ID_HEADER
from tercet.protocol.spans import LeaseReport, SpanContext, current_span, working_in
from tercet.protocol.sse import EventTooLong, read_events
from tercet.protocol.wire import (
    API_PREFIX,
    JSON,
    UNREADABLE,
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
from tercet.wire.callers import Prover
from tercet.wire.client.bounded_answers import PLAIN, proved, read_answer, reason_of, require_plain
from tercet.wire.streams.wire_format import LONGEST_FRAME, OutputBatch, StreamCommand, TokenDelta, fits, frame_of

if TYPE_CHECKING:
    from tercet.wire.client.stream_listener import StreamListener

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
        self, name: str, url: str, admit: Admit, on_status: Callable[[EngineStatus, bool], object], secret: str,
        tls: ssl.SSLContext | None,
    ) -> None:  # fmt: skip
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
        self, verb: str, call: msgspec.Struct | None, kind: type[T], timeout: aiohttp.ClientTimeout = QUICK,
        method: str = "",
    ) -> T:  # fmt: skip
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
        self, verb: str, call: msgspec.Struct | None, timeout: aiohttp.ClientTimeout, headers: dict[str, str],
        method: str = "",
    ) -> AsyncGenerator[aiohttp.ClientResponse]:  # fmt: skip
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


# ---- The token stream ------------------------------------------------------------------------------------------------


# Most bytes that an engine may leave unread; beyond that it gets no more calls.
MOST_UNREAD = 16 * 1024 * 1024
_batches = msgspec.msgpack.Decoder(OutputBatch)


class EngineConnection:
    """The sequences that one engine runs for this router, and the TCP connection that carries their tokens.

    The engine connects to ``address`` and shows ``key`` there. ``on_load`` receives every report of its load,
    ``on_proposal`` every move that it passes on. ``numbers`` numbers the sequences and never repeats one in this
    process, so late data matches no sequence. Only the engine's known ``incarnation`` may connect; any incarnation may
    connect before it is known. ``on_lost`` is called when the connection is closed, which may mean that the engine has
    ended.
    """

    def __init__(
        self, engine: str, numbers: itertools.count[int], on_load: Callable[[EngineLoad], None],
        on_proposal: Callable[[MoveProposal], None],
    ) -> None:  # fmt: skip
        self.engine = engine
        self.key = secrets.token_hex(16)
        self.address = ""
        self.incarnation = ""
        self.on_lost: Callable[[], object] = lambda: None
        self.last_heard = -float("inf")
        self.inbox = SequenceInbox(engine)
        self._numbers = numbers
        self._on_load = on_load
        self._on_proposal = on_proposal
        self._transport: asyncio.Transport | None = None

    @property
    def connected(self) -> bool:
        return self._transport is not None

    @contextmanager
    def sequence(self, position: int, stream: OutputStream) -> Generator[int]:
        """Yield a new sequence's number; its outputs are put into ``stream``, from ``position`` on.

        A sequence that has not ended at the exit is cancelled on the engine.
        """
        number = next(self._numbers)
        self.inbox.open(number, position, stream)
        try:
            yield number
        finally:
            if self.inbox.close(number):
                self._send(StreamCommand(cancelled=(number,)))

    def start(self, call: StartGenerateCall) -> None:
        """Send a call to generate; outputs and errors arrive at the sequence that ``call.router`` numbers.

        Raises :class:`~tercet.protocol.RequestTooLarge` for a call that does not fit into a message, and
        :class:`~tercet.protocol.EngineUnreachable` if the engine does not read its messages.
        """
        place = current_span()
        traces = () if place is None else (tuple(place.headers().values()),)
        encoded = msgspec.Raw(msgspec.msgpack.encode(call))
        frame = frame_of(StreamCommand(starts=(encoded,), names=(request_id(),), traces=traces))
        if not fits(frame):
            large = large_field_of(call)
            raise RequestTooLarge(
                f"{large}: the call has {len(frame)} bytes, and at most {LONGEST_FRAME} are allowed", large
            )
        # An engine that is stuck must not collect calls in this process's memory.
        if self._transport is not None and self._transport.get_write_buffer_size() > MOST_UNREAD:
            raise EngineUnreachable(f"{self.engine} does not read its messages")
        self._write(frame)

    def receive(self, frame: bytes) -> None:
        """Handle a frame from the engine. Raises one of ``UNREADABLE`` for an invalid frame."""
        batch = _batches.decode(frame)
        self.last_heard = time.monotonic()
        if batch.load is not None:
            self._on_load(batch.load)
        for proposal in batch.proposals:
            self._on_proposal(proposal)
        unwanted = self.inbox.receive(batch.deltas)
        if unwanted:
            self._send(StreamCommand(cancelled=tuple(unwanted)))

    def attach(self, transport: asyncio.Transport) -> None:
        """Use a new connection of the engine; data on an earlier one is lost."""
        if self._transport is not None:
            self.drop("the engine connected again")
        self._transport = transport
        self.last_heard = time.monotonic()
        self.heartbeat()

    def detach(self, transport: asyncio.Transport, why: str) -> None:
        if transport is self._transport:
            self.drop(why)
            self.on_lost()

    def drop(self, why: str) -> None:
        """Close the connection; every sequence ends with :class:`~tercet.protocol.EngineUnreachable`."""
        # No half-open state: outputs that were on their way are gone, so no sequence may wait for them. The service
        # retries each from the tokens that its client has.
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        self.inbox.lose(EngineUnreachable(f"{self.engine}: its token stream ended: {why}"))

    def heartbeat(self) -> None:
        self._send(StreamCommand())

    def _send(self, command: StreamCommand) -> None:
        self._write(frame_of(command))

    def _write(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)


@dataclass(slots=True)
class _Sequence:
    position: int
    stream: OutputStream


class SequenceInbox:
    """The sequences of one engine, without I/O; ``engine`` is its name in messages.

    Every open sequence gets outputs whose positions follow each other, until the last one or an error. Repeated outputs
    are dropped. A gap is an error: no client gets a token that does not follow the one before.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self.sequences: dict[int, _Sequence] = {}

    def open(self, number: int, position: int, stream: OutputStream) -> None:
        """Put the outputs of a sequence into ``stream``; its first token here is at ``position``."""
        self.sequences[number] = _Sequence(position, stream)

    def close(self, number: int) -> bool:
        """Close a sequence whose outputs are not wanted any more; return whether it was still open."""
        return self.sequences.pop(number, None) is not None

    def receive(self, deltas: Iterable[TokenDelta]) -> list[int]:
        """Deliver a message's deltas; return the numbers of sequences that the engine should stop."""
        unwanted: list[int] = []
        for delta in deltas:
            sequence = self.sequences.get(delta.number)
            # It was closed here, and the engine has not read that yet.
            if sequence is None:
                if not delta.is_last:
                    unwanted.append(delta.number)
            elif delta.position == sequence.position:
                self._deliver(sequence, delta)
            # Positions decide: an output that comes again does no harm, and a token that is skipped is noticed.
            elif delta.is_last or delta.position + len(delta.token_ids) > sequence.position:  # not delivered already
                unwanted.append(delta.number)
                why = f"expected output position {sequence.position}, received {delta.position}"
                self._fail(delta.number, EngineUnreachable(f"{self._engine} lost tokens: {why}"))
        return unwanted

    def lose(self, error: TercetError) -> None:
        """End every open sequence with ``error``: the stream is lost."""
        for number in list(self.sequences):
            self._fail(number, error)

    def _deliver(self, sequence: _Sequence, delta: TokenDelta) -> None:
        # Before the output is read: one that cannot be read counts as delivered, and ends its sequence alone.
        sequence.position += len(delta.token_ids)
        if delta.is_last:
            del self.sequences[delta.number]
        try:
            output = delta.to_output()
        except TercetError as error:
            sequence.stream.fail(error)
        else:
            sequence.stream.put(output)

    def _fail(self, number: int, error: TercetError) -> None:
        self.sequences.pop(number).stream.fail(error)


# ---- The verbs -------------------------------------------------------------------------------------------------------


class HttpEngine:
    """The client of an engine at ``url``; it implements :class:`~tercet.protocol.Engine`, which documents its methods.

    Use it as an async context manager. With a ``listener``, outputs arrive by the engine's token stream, ``on_load``
    receives the engine's load ten times a second, ``on_proposal`` the moves that it passes on, and ``on_lost`` is
    called when the stream has closed. Without a listener, or if the engine cannot connect to it, outputs arrive as
    server-sent events.

    ``admit`` is as in :class:`EngineCalls`; ``on_new`` is called after a restart, since all state of the old engine is
    lost. ``secret`` is the fleet's, or the engine's API key, which is proved and never sent; ``tls`` is for an
    ``https://`` engine.
    """

    def __init__(
        self, name: str, url: str, listener: StreamListener | None = None,
        on_load: Callable[[EngineLoad], None] = lambda _: None, admit: Admit = lambda _: None,
        on_new: Callable[[], object] = lambda: None, secret: str = "", tls: ssl.SSLContext | None = None,
        on_proposal: Callable[[MoveProposal], None] = lambda _: None, on_lost: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self.name = name
        self.url = url.rstrip("/")
        self._calls = EngineCalls(name, self.url, admit, self._on_status, secret, tls)
        self._on_new = on_new
        # Leases of sequences whose context is still open; start_generate takes them over.
        self._held: dict[str, str] = {}
        self._releasing = TaskSet()
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._keeper = None
        if listener is not None:
            connection = listener.connection_of(name, on_load, on_proposal)
            connection.on_lost = on_lost
            self._keeper = listener.keeper_of(connection, self.url, self._connect, self.status)

    async def __aenter__(self) -> HttpEngine:
        self._calls.open()
        if self._keeper is not None:
            self._keeper.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._keeper is not None:
            await self._keeper.close()
        # Leases that are being released; those that are not end by their time to live.
        await self._releasing.wait(5.0)
        await self._calls.close()

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

            def release(done: asyncio.Future[Reservation]) -> None:
                if not done.cancelled() and done.exception() is None:
                    self._release_soon(request.seq_id, done.result().lease)

            reserving.add_done_callback(release)
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
        features = tuple(feature.without_data() for feature in request.mm_features)  # digests identify their KV
        call = PrepRecvCall(
            prompt=request.prompt, seq_id=request.seq_id, end=end, lease=lease, cache_salt=request.cache_salt,
            adapter=request.adapter, adapter_digest=request.adapter_digest, mm_features=features,
        )  # fmt: skip
        return await self._calls.result_of("prep_recv", call, PrepRecvAnswer)

    def _release_soon(self, seq_id: str, lease: str) -> None:
        """End a lease in the background: leaving a reservation never waits for an engine that does not answer."""
        task = self._ending[seq_id] = self._releasing.spawn(self._release(lease))
        task.add_done_callback(lambda done: self._ending.pop(seq_id) if self._ending.get(seq_id) is done else None)

    async def _release(self, lease: str) -> None:
        try:
            await self._calls.result_of("release", ReleaseCall(lease=lease), dict[str, Any])
        except (UnknownSequence, LeaseEnded, EngineUnreachable):
            return  # the lease, or its engine, has ended; otherwise the lease's time to live ends it

    async def remote_send(
        self, request: Request, to: Reservation, begin: int, end: int | None = None, sample: bool = False,
        cached_only: bool = False,
    ) -> Sent:  # fmt: skip
        call = RemoteSendCall(
            prompt=request.prompt, seq_id=request.seq_id, kv_addr_info=to.kv_addr_info, begin=begin,
            end=to.end if end is None else end, sample=sample, cached_only=cached_only,
            sampling_params=request.sampling_params, cache_salt=request.cache_salt, adapter=request.adapter,
            adapter_digest=request.adapter_digest, mm_features=request.mm_features, priority=request.priority,
            background=request.background,
        )  # fmt: skip
        return await self._calls.result_of("remote_send", call, Sent, PATIENT)

    def start_generate(self, request: Request, begin: int = 0, output: Sequence[int] = ()) -> OutputStream:
        call = StartGenerateCall(
            prompt=request.prompt, seq_id=request.seq_id, begin=begin, output=list(output),
            sampling_params=request.sampling_params, cache_salt=request.cache_salt, adapter=request.adapter,
            adapter_digest=request.adapter_digest, mm_features=request.mm_features, priority=request.priority,
            background=request.background,
        )  # fmt: skip
        return OutputStream(partial(self._generate, call, current_span()))

    async def _generate(self, call: StartGenerateCall, place: SpanContext | None, stream: OutputStream) -> None:
        try:
            connection = await self._connection()
            if connection is None:
                with working_in(place):
                    # Receive outputs as server-sent events; if the caller leaves early, end answer and sequence.
                    async with self._calls.answer_to("start_generate", call, PATIENT) as response:
                        try:
                            async for data in read_events(response.content.iter_any()):
                                stream.put(self._calls.output_of(data))
                                await stream.until_asked()
                        except (aiohttp.ClientError, HttpProcessingError, EventTooLong, TimeoutError, OSError) as error:
                            raise EngineUnreachable(f"{self.name} was lost: {reason_of(error)}") from error
                        if not stream.over:
                            raise EngineUnreachable(f"{self.name} ended the stream without a finish reason")
                return
            # Leaving early cancels the sequence on the engine.
            with connection.sequence(len(call.output), stream) as number:
                router = StreamDestination(address=connection.address, key=connection.key, number=number)
                with working_in(place):
                    connection.start(msgspec.structs.replace(call, router=router))
                await stream.until_over()
        finally:
            if stream.begun:
                # The lease has ended: its blocks belong to the running sequence.
                self._held.pop(call.seq_id, None)

    async def _connection(self) -> EngineConnection | None:
        try:
            return await self._keeper.ready() if self._keeper is not None else None
        except EngineUnreachable as error:
            raise EngineNotReached(error.message) from error

    async def _connect(self, router: RouterAddress) -> None:
        await self._calls.result_of("connect", ConnectCall(router=router), dict[str, Any])

    async def load_adapter(self, name: str, path: str) -> AdapterReport:
        return await self._calls.result_of("adapters", LoadAdapterCall(name=name, path=path), AdapterReport, PATIENT)

    async def replace_adapter(self, name: str, path: str) -> AdapterReport:
        call = ReplaceAdapterCall(path=path)
        return await self._calls.result_of(_adapter(name), call, AdapterReport, PATIENT, "PUT")

    async def unload_adapter(self, name: str) -> None:
        await self._calls.result_of(_adapter(name), None, dict[str, Any], method="DELETE")

    async def status(self) -> EngineStatus:
        return await self._calls.status()

    async def sequences(self) -> list[SequenceReport]:
        """Return the sequences that the engine generates for all clients; the last known ones if it is stuck."""
        return await self._calls.result_of("sequences", None, list[SequenceReport])

    async def lease_stories(self, seq_id: str) -> list[LeaseReport]:
        return await self._calls.result_of(f"leases/{quote(seq_id, safe='')}", None, list[LeaseReport])

    async def propose_move(self, seq_id: str, destination: str, reason: str) -> None:
        """Ask the engine to pass a proposal to move a sequence on to the router that runs the sequence.

        ``seq_id`` is the engine's id for the sequence, or its client's. Returns when the proposal was sent; the router
        records its result. Raises :class:`~tercet.protocol.UnknownSequence` if the engine does not generate the
        sequence, and :class:`~tercet.protocol.Conflict` if no router receives its tokens.
        """
        path = f"sequences/{quote(seq_id, safe='')}/move"
        await self._calls.result_of(path, MoveCall(destination=destination, reason=reason), dict[str, Any])

    def _on_status(self, status: EngineStatus, is_restarted: bool) -> None:
        """Note the incarnation of a status, and drop the state of an earlier one."""
        if self._keeper is not None:
            self._keeper.connection.incarnation = status.incarnation
        # Leases and sequences of the former start are gone with its memory: nothing is left to release there.
        if is_restarted:
            self._held.clear()
            if self._keeper is not None:
                self._keeper.connection.drop("it was restarted")
            self._on_new()


def _adapter(name: str) -> str:
    return f"adapters/{quote(name, safe='')}"
