"""The client of an engine that is called by HTTP."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from tercet.aio import TaskSet
from tercet.protocol import (
    AdapterReport,
    EngineLoad,
    EngineNotReached,
    EngineStatus,
    EngineUnreachable,
    LeaseEnded,
    MoveProposal,
    OutputStream,
    Request,
    Reservation,
    Sent,
    SequenceReport,
    UnknownSequence,
)
from tercet.protocol.spans import SpanContext, current_span, working_in
from tercet.protocol.sse import EventTooLong, read_events
from tercet.protocol.wire import (
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
)
from tercet.wire.client.connection_errors import reason_of
from tercet.wire.client.engine_calls import PATIENT, Admit, EngineCalls
from tercet.wire.client.stream_keeper import StreamKeeper
from tercet.wire.streams import EngineConnection, StreamListener


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
            self._keeper = StreamKeeper(listener, connection, self.url, self._connect, self.status)

    async def __aenter__(self) -> HttpEngine:
        self._calls.open()
        if self._keeper is not None:
            self._keeper.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._keeper is not None:
            await self._keeper.close()
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
        answer = await self._calls.result_of("prep_recv", call, PrepRecvAnswer)
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
            await self._calls.result_of("release", ReleaseCall(lease=lease), dict[str, Any])
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
        return await self._calls.result_of("remote_send", call, Sent, PATIENT)

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
        async with self._calls.answer_to("start_generate", call, PATIENT) as response:
            try:
                async for data in read_events(response.content.iter_any()):
                    stream.put(self._calls.output_of(data))
                    await stream.until_asked()
            except (aiohttp.ClientError, HttpProcessingError, EventTooLong, TimeoutError, OSError) as error:
                raise EngineUnreachable(f"{self.name} was lost: {reason_of(error)}") from error
            if not stream.over:
                raise EngineUnreachable(f"{self.name} ended the stream without a finish reason")

    async def _connect(self, router: RouterAddress) -> None:
        await self._calls.result_of("connect", ConnectCall(router=router), dict[str, Any])

    async def load_adapter(self, name: str, path: str) -> AdapterReport:
        """Load an adapter: see :class:`~tercet.protocol.TakesAdapters`."""
        return await self._calls.result_of("adapters", LoadAdapterCall(name=name, path=path), AdapterReport, PATIENT)

    async def replace_adapter(self, name: str, path: str) -> AdapterReport:
        """Replace an adapter: see :class:`~tercet.protocol.TakesAdapters`."""
        call = ReplaceAdapterCall(path=path)
        return await self._calls.result_of(_adapter(name), call, AdapterReport, PATIENT, "PUT")

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter: see :class:`~tercet.protocol.TakesAdapters`."""
        await self._calls.result_of(_adapter(name), None, dict[str, Any], method="DELETE")

    async def status(self) -> EngineStatus:
        return await self._calls.status()

    async def sequences(self) -> list[SequenceReport]:
        """Return the sequences that the engine generates for all clients; the last known ones if it is stuck."""
        return await self._calls.result_of("sequences", None, list[SequenceReport])

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
        if is_restarted:
            self._held.clear()
            if self._keeper is not None:
                self._keeper.connection.drop("it was restarted")
            self._on_new()


def _adapter(name: str) -> str:
    return f"adapters/{quote(name, safe='')}"
