"""The client of an engine that is called by HTTP, and the upkeep of its token stream."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from tercet.aio import TaskSet, keep_running
from tercet.logs import STREAM_BACK, STREAM_FALLBACK
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
    TercetError,
    UnknownSequence,
)
from tercet.protocol.spans import SpanContext, current_span, working_in
from tercet.protocol.sse import EventTooLong, read_events
from tercet.protocol.trace import LeaseReport
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
from tercet.wire.client.bounded_answers import reason_of
from tercet.wire.client.engine_calls import PATIENT, Admit, EngineCalls
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

    async def lease_stories(self, seq_id: str) -> list[LeaseReport]:
        """Tell the stories of a sequence's leases: see :class:`~tercet.protocol.engine.TellsLeases`."""
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
        if is_restarted:
            self._held.clear()
            if self._keeper is not None:
                self._keeper.connection.drop("it was restarted")
            self._on_new()


def _adapter(name: str) -> str:
    return f"adapters/{quote(name, safe='')}"


logger = logging.getLogger(__name__)
CHECK_SECONDS = 0.5
STALE_AFTER = 1.0
"""Seconds without a report after which the engine is polled."""
STALLED_AFTER = 15.0
ANSWER_SECONDS = 10.0
RETRY_DELAY_S = 30.0
ATTEMPTS = 5
ATTEMPT_SECONDS = 0.05


class StreamKeeper:
    """Upkeep of ``connection``: it makes an engine connect to ``listener``, and again when the connection is lost.

    ``connect`` makes the engine connect to a router, ``alive`` polls it; both raise
    :class:`~tercet.protocol.EngineUnreachable` if it does not answer. An engine that cannot connect is served by
    server-sent events, which is logged; connecting is retried every half minute.
    """

    def __init__(
        self,
        listener: StreamListener,
        connection: EngineConnection,
        url: str,
        connect: Callable[[RouterAddress], Awaitable[object]],
        alive: Callable[[], Awaitable[object]],
    ) -> None:
        self._listener = listener
        self._name = connection.engine
        self._url = url
        self._connect = connect
        self._alive = alive
        self.connection = connection
        self._falls_back_until: float | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to keep the stream connected."""
        self._keeping = asyncio.get_running_loop().create_task(keep_running(self._keep, f"stream of {self._name}"))

    async def close(self) -> None:
        """Disconnect; sequences that the engine still runs for this router end."""
        for task in (self._keeping, self._connecting):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        self._listener.forget(self.connection)

    async def ready(self) -> EngineConnection | None:
        """Return the connection once the engine is connected; None if server-sent events have to be used.

        Raises :class:`~tercet.protocol.EngineUnreachable` if the engine does not answer.
        """
        if self.connection.connected:
            return self.connection
        if self._falls_back_until is not None and time.monotonic() < self._falls_back_until:
            return None
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._try())
            self._connecting.add_done_callback(self._tried)
        await asyncio.shield(self._connecting)
        return self.connection if self.connection.connected else None

    def _tried(self, task: asyncio.Task[None]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # mark it as retrieved; the callers that wait get it

    async def _try(self) -> None:
        try:
            self.connection.address = await self._listener.address_for(self._url)
            for _ in range(ATTEMPTS):
                await self._connect(RouterAddress(address=self.connection.address, key=self.connection.key))
                if self.connection.connected:
                    break
                # The engine has not noticed yet that its last connection is lost.
                await asyncio.sleep(ATTEMPT_SECONDS)
        except EngineUnreachable:
            raise
        except (TercetError, OSError) as error:
            if self._falls_back_until is None:
                why = error.message if isinstance(error, TercetError) else str(error)
                STREAM_FALLBACK.tell(engine=self._name, reason=why)
            self._falls_back_until = time.monotonic() + RETRY_DELAY_S
            return
        if not self.connection.connected:
            raise EngineUnreachable(f"{self._name} connected its token stream and disconnected at once")
        if self._falls_back_until is not None:
            STREAM_BACK.tell(engine=self._name, reason="the engine has connected")
        self._falls_back_until = None

    async def _keep(self) -> None:
        while True:
            try:
                await self.ready()
            except EngineUnreachable as error:
                logger.debug("%s", error)  # the engine may still be loading, or have ended; membership logs that
            await asyncio.sleep(CHECK_SECONDS)
            if self.connection.connected and self._silence() > STALE_AFTER:
                await self._check()

    async def _check(self) -> None:
        """Disconnect if the engine is dead, or if it answers but sends nothing on the stream."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._alive()
        except (EngineUnreachable, TimeoutError):
            if self._silence() > STALE_AFTER:
                self.connection.drop(f"no data for {self._silence():.0f} s, and the engine does not answer")
        except TercetError as error:
            logger.debug("%s answers: %s", self._name, error)
        if self.connection.connected and self._silence() > STALLED_AFTER:
            self.connection.drop(f"no data for {self._silence():.0f} s")

    def _silence(self) -> float:
        return time.monotonic() - self.connection.last_heard
