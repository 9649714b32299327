"""Upkeep of one engine's token stream, from the router's side."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from tercet.aio import keep_running
from tercet.protocol import EngineUnreachable, TercetError
from tercet.protocol.wire import RouterAddress
from tercet.settings.log_events import STREAM_BACK, STREAM_FALLBACK
from tercet.wire.streams import EngineConnection, StreamListener

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
