"""The decode side's coordination: an engine has a prompt's KV computed elsewhere, by the verbs, before it generates.

If no engine can compute it, this engine prefills by itself: a request never fails because of this. All resources are
given back: the reservation ends with its context, and cancelling a call ends the send.
"""

from __future__ import annotations

import ssl
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

from tercet.protocol import (
    Conflict,
    EngineStatus,
    EngineUnreachable,
    Request,
    Reservation,
    Revision,
    Sent,
    TercetError,
    kv_obstacle,
)
from tercet.protocol.trace import TraceEvent, VerbTrace
from tercet.wire.client import prefill_metrics
from tercet.wire.client.http_engine import HttpEngine
from tercet.wire.client.prefill_attempts import REMOTE, PrefillAttempts, prefill_here

MIN_SEND = 32
"""Fewest missing tokens for which a second engine pays."""
MOST_PEERS = 256
"""Number of connections beyond which those to engines that are not used now are closed."""


class Receiver(Protocol):
    """The decode engine as a receiver of KV."""

    @property
    def name(self) -> str: ...

    def prep_recv(self, request: Request, end: int | None = None) -> AbstractAsyncContextManager[Reservation]:
        """Reserve blocks: see :meth:`tercet.protocol.Engine.prep_recv`."""
        ...


@dataclass(eq=False)
class _Peer:
    """An engine that prefills, and its number of running requests."""

    engine: HttpEngine
    in_use: int = 0


class RemotePrefill:
    """Prefills by engines that requests name, for a decode engine that may exchange KV with them.

    ``revision`` returns the decode engine's revision; KV of an engine with an incompatible one is not requested.
    ``secret`` and ``tls`` are as for :class:`~tercet.wire.client.HttpEngine`; with ``tls``, or ``https``, engines are
    called by TLS. Use it as an async context manager.
    """

    def __init__(
        self,
        attempts: PrefillAttempts,
        revision: Callable[[], Awaitable[Revision]],
        secret: str = "",
        https: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._attempts = attempts
        self._clock = attempts.clock
        self._revision = revision
        self._secret = secret
        self._scheme = "https" if https or tls is not None else "http"
        self._tls = tls
        # Engines by address and by the decode engine's revision: after a restart with another revision it needs other
        # KV.
        self._peers: OrderedDict[tuple[str, Revision], _Peer] = OrderedDict()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        while self._peers:
            _, peer = self._peers.popitem()
            await peer.engine.__aexit__(None, None, None)

    @asynccontextmanager
    async def prefilled(
        self, decode: Receiver, request: Request, hosts: Sequence[str], trace: VerbTrace
    ) -> AsyncGenerator[int]:
        """Yield how many tokens of KV ``decode`` holds under a lease that others computed; 0 for none.

        The lease is given back at the exit unless ``decode`` has begun to generate with it. ``trace`` gets the events.
        """
        trace.program = REMOTE
        began = self._clock()
        async with AsyncExitStack() as stack:
            begin = 0
            try:
                # The generating engine computes the last token: it gives the first output token.
                space = await stack.enter_async_context(decode.prep_recv(request, -1))
                event = self._event("prep_recv", decode.name, began, end=space.end)
                event.cached = begin = space.matched_len
                trace.events.append(event)
                if space.missing >= MIN_SEND:
                    begin = await self._fill(decode.name, request, space, hosts, trace)
                    prefill_metrics.prefills.labels(prefill_metrics.PULLED, "").inc()
                else:
                    prefill_metrics.prefills.labels(prefill_metrics.CACHED, "").inc()
            except TercetError as error:
                prefill_here(decode.name, request.seq_id, error, trace)
            prefill_metrics.seconds.observe(self._clock() - began)
            yield begin

    async def _fill(
        self, decode: str, request: Request, space: Reservation, hosts: Sequence[str], trace: VerbTrace
    ) -> int:
        """Fill the reservation from the first of ``hosts`` that succeeds; return the end of the filled part."""

        async def ask(host: str) -> int:
            started = self._clock()
            sent = await self._sent_by(host, request, space)
            event = self._event("remote_send", host, started, begin=sent.begin, end=sent.end)
            event.cached, event.computed, event.bytes = sent.usage.cached, sent.usage.computed, sent.bytes
            event.chunks, event.transport, event.to = sent.chunks, sent.transport, decode
            trace.events.append(event)
            return sent.end

        return await self._attempts.first_of(hosts, request.seq_id, trace, ask)

    async def _sent_by(self, host: str, request: Request, space: Reservation) -> Sent:
        async with self._peer(host) as engine:

            async def look() -> None:
                status = await engine.status()
                if status.stalled_s > self._attempts.budget.stuck_after_s:
                    raise EngineUnreachable(f"{host} has made no progress for {status.stalled_s:.1f} s")

            send = partial(engine.remote_send, request, space, space.matched_len)
            return await self._attempts.watched(host, send, look)

    # ---- engines ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _peer(self, host: str) -> AsyncGenerator[HttpEngine]:
        ours = await self._revision()
        key = host, ours
        peer = self._peers.get(key)
        if peer is None:
            engine = HttpEngine(
                host, f"{self._scheme}://{host}", admit=_sends_to(ours), secret=self._secret, tls=self._tls
            )
            peer = self._peers[key] = _Peer(await engine.__aenter__())
        self._peers.move_to_end(key)
        peer.in_use += 1
        try:
            yield peer.engine
        finally:
            peer.in_use -= 1
            await self._close_unused()

    async def _close_unused(self) -> None:
        unused = [key for key, peer in self._peers.items() if not peer.in_use]
        for key in unused[: max(0, len(self._peers) - MOST_PEERS)]:
            await self._peers.pop(key).engine.__aexit__(None, None, None)

    def _event(self, verb: str, engine: str, started: float, begin: int = 0, end: int = 0) -> TraceEvent:
        return TraceEvent(verb, engine, self._clock() - started, begin=begin, end=end)


def _sends_to(ours: Revision) -> Callable[[EngineStatus], None]:
    def admit(status: EngineStatus) -> None:
        if why := kv_obstacle(status.revision, ours):
            raise Conflict(f"{status.engine} and this engine must not exchange KV: {why}")

    return admit
