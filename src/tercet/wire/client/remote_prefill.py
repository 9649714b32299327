"""The decode side's coordination: an engine has a prompt's KV computed elsewhere, by the verbs, before it generates.

The named engines are tried one after another, until one succeeds, or until a timeout. One that fails, refuses or is
silent is skipped; a lost engine is not used again before it answers. If no engine can compute the KV, this engine
prefills by itself: a request never fails because of this. All resources are given back: the reservation ends with its
context, and cancelling a call ends the send.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from prometheus_client import Counter, Histogram

from tercet import logs
from tercet.protocol import (
    Conflict,
    DeadlineExceeded,
    EngineStatus,
    EngineUnreachable,
    Request,
    Reservation,
    Revision,
    TercetError,
    kv_obstacle,
)
from tercet.protocol.spans import FALLBACK, TraceEvent, VerbTrace
from tercet.settings.process_settings import PrefillBudget
from tercet.wire import SECONDS
from tercet.wire.client.http_engine import HttpEngine

PULLED, CACHED, LOCAL = "remote", "cached", "local"

prefills = Counter(
    "tercet_prefills",
    "Requests that named engines to prefill: `remote`: one of them prefilled; `cached`: this engine had the KV; "
    "`local`: this engine prefills, since none of them could; the code is that of the last error.",
    ["outcome", "code"],
)
failures = Counter("tercet_prefill_failures", "Named engines that did not prefill, by error.", ["code"])
seconds = Histogram(
    "tercet_prefill_seconds",
    "Seconds that requests waited for other engines to prefill, with any result.",
    buckets=SECONDS,
)
METRICS = (prefills, failures, seconds)


logger = logging.getLogger(__name__)
T = TypeVar("T")
REMOTE, HERE = "disaggregated", "data_parallel"
POLL_INTERVAL_S = 0.5
PROBE_SECONDS = 1.0
REST_SECONDS = 2.0
"""Seconds for which a lost engine is not used; after that it first has to answer a poll."""
MOST_LOST = 256
Look = Callable[[], Awaitable[object]]
"""A function that polls an engine; it raises :class:`~tercet.protocol.TercetError` if the engine is not healthy."""


class _Lost(NamedTuple):
    at: float
    why: str


class PrefillAttempts:
    """Calls of engines that requests name, and a memory of lost engines. ``clock`` is monotonic, in seconds."""

    def __init__(self, budget: PrefillBudget, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget = budget
        self.clock = clock
        self._lost: OrderedDict[str, _Lost] = OrderedDict()

    async def first_of(
        self, hosts: Sequence[str], seq_id: str, trace: VerbTrace, ask: Callable[[str], Awaitable[T]]
    ) -> T:
        """Return the result of the first of ``hosts`` that does not fail; raise the error of the last one.

        ``ask`` calls one host, by :meth:`watched`; it is cancelled at the timeout.
        """
        began = self.clock()
        # In the order in which the request names them.
        failure: TercetError = DeadlineExceeded("no engine was called")
        for host in hosts:
            # One budget for all hosts: the client waits for the whole.
            left = began + self.budget.timeout_s - self.clock()
            if left <= 0:
                break
            patience = asyncio.timeout(left)
            try:
                async with patience:
                    return await ask(host)
            except TimeoutError:
                if not patience.expired():
                    raise
                failure = DeadlineExceeded(f"{host} has not prefilled within {self.budget.timeout_s:g} s")
            except TercetError as error:
                failure = error
            failures.labels(failure.code).inc()
            logs.PREFILL_FAILED.tell(seq_id=seq_id, engine=host, code=failure.code, reason=failure.message)
            trace.events.append(TraceEvent(FALLBACK, host, code=failure.code, reason=f"{REMOTE}: {failure.message}"))
        raise failure

    async def watched(self, host: str, work: Callable[[], Coroutine[Any, Any, T]], look: Look) -> T:
        """Return the result of ``work`` at ``host``, which ``look`` polls in the meantime.

        Raises the errors of both. In any case, the work has ended, or was cancelled, when this returns.
        """
        lost = self._lost.get(host)
        if lost is not None and self.clock() < lost.at + REST_SECONDS:
            raise EngineUnreachable(f"{host} was lost a moment ago: {lost.why}")
        tasks = set[asyncio.Future[Any]]()
        try:
            # It was lost some time ago: a short poll is cheaper than a request that fails again.
            if host in self._lost:
                await _answered(host, look, PROBE_SECONDS)
                self._lost.pop(host, None)
            working = asyncio.ensure_future(work())
            watching = asyncio.ensure_future(self._until_lost(host, look))
            # The work alone would wait for an engine that has stopped without closing its connection.
            tasks.update((working, watching))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                watching.result()
            return await working
        except EngineUnreachable as error:
            self._lost[host] = _Lost(self.clock(), error.message)
            # Clients name the hosts, so their number is bounded.
            while len(self._lost) > MOST_LOST:
                self._lost.popitem(last=False)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # the other task's exception is not needed

    async def _until_lost(self, host: str, look: Look) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await _answered(host, look, self.budget.stuck_after_s)


async def _answered(host: str, look: Look, patience: float) -> None:
    try:
        async with asyncio.timeout(patience):
            await look()
    except EngineUnreachable:
        raise
    except TercetError as error:  # an engine that answers is alive
        logger.debug("%s answers: %s", host, error)
    except TimeoutError:
        raise EngineUnreachable(f"{host} has sent nothing for {patience:g} s") from None


def prefill_here(decode: str, seq_id: str, error: TercetError, trace: VerbTrace) -> None:
    """Record why a request that named engines to prefill is prefilled on this engine."""
    prefills.labels(LOCAL, error.code).inc()
    fields = {"seq_id": seq_id, "engine": decode, "code": error.code, "reason": error.message}
    logs.FALLBACK.tell(program=REMOTE, to=HERE, tokens=0, **fields)
    trace.program = f"{REMOTE} -> {HERE}"
    trace.events.append(TraceEvent(FALLBACK, decode, code=error.code, reason=f"{trace.program}: {error.message}"))


MIN_SEND = 32
"""Fewest missing tokens for which a second engine pays."""
MOST_PEERS = 256
"""Number of connections beyond which those to engines that are not used now are closed."""


class Receiver(Protocol):
    """The decode engine as a receiver of KV."""

    @property
    def name(self) -> str: ...

    def prep_recv(self, request: Request, end: int | None = None) -> AbstractAsyncContextManager[Reservation]: ...


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
        self, attempts: PrefillAttempts, revision: Callable[[], Awaitable[Revision]], secret: str = "",
        https: bool = False, tls: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
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
                if space.to_send >= MIN_SEND:
                    begin = await self._fill(decode.name, request, space, hosts, trace)
                    prefills.labels(PULLED, "").inc()
                else:
                    prefills.labels(CACHED, "").inc()
            # Whatever fails here costs time and no request: the decode engine computes what is missing.
            except TercetError as error:
                prefill_here(decode.name, request.seq_id, error, trace)
            seconds.observe(self._clock() - began)
            yield begin

    async def _fill(
        self, decode: str, request: Request, space: Reservation, hosts: Sequence[str], trace: VerbTrace
    ) -> int:
        """Fill the reservation from the first of ``hosts`` that succeeds; return the end of the filled part."""

        async def ask(host: str) -> int:
            started = self._clock()
            async with self._peer(host) as engine:

                async def look() -> None:
                    status = await engine.status()
                    if status.stalled_s > self._attempts.budget.stuck_after_s:
                        raise EngineUnreachable(f"{host} has made no progress for {status.stalled_s:.1f} s")

                send = partial(engine.remote_send, request, space, space.matched_len)
                sent = await self._attempts.watched(host, send, look)
            event = self._event("remote_send", host, started, begin=sent.begin, end=sent.end)
            event.cached, event.computed, event.bytes = sent.usage.cached, sent.usage.computed, sent.bytes
            event.chunks, event.transport, event.to = sent.chunks, sent.transport, decode
            trace.events.append(event)
            return sent.end

        return await self._attempts.first_of(hosts, request.seq_id, trace, ask)

    # ---- engines ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _peer(self, host: str) -> AsyncGenerator[HttpEngine]:
        # Asked each time: the decode engine may have been restarted with another revision since.
        ours = await self._revision()
        key = host, ours
        peer = self._peers.get(key)
        if peer is None:

            def admit(status: EngineStatus) -> None:
                if why := kv_obstacle(status.revision, ours):
                    raise Conflict(f"{status.engine} and this engine must not exchange KV: {why}")

            engine = HttpEngine(host, f"{self._scheme}://{host}", admit=admit, secret=self._secret, tls=self._tls)
            peer = self._peers[key] = _Peer(await engine.__aenter__())
        self._peers.move_to_end(key)
        peer.in_use += 1
        try:
            yield peer.engine
        finally:
            peer.in_use -= 1
            # In the order of their last use.
            unused = [key for key, peer in self._peers.items() if not peer.in_use]
            for key in unused[: max(0, len(self._peers) - MOST_PEERS)]:
                await self._peers.pop(key).engine.__aexit__(None, None, None)

    def _event(self, verb: str, engine: str, started: float, begin: int = 0, end: int = 0) -> TraceEvent:
        return TraceEvent(verb, engine, self._clock() - started, begin=begin, end=end)
