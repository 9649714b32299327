"""The stream of one request on the fast path: its choices, and the events and limits that they share.

Relies on ``AsyncLLM.add_request`` validating a request, registering it with the ``OutputProcessor`` and passing its
sequences to the engine-core client, with one queue for all of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMClientError
from vllm.outputs import RequestOutput

from tercet.vllm_plugin.fast_path.choice_stream import ChoiceStream
from tercet.vllm_plugin.fast_path.keep_alive import KeepAlive
from tercet.vllm_plugin.fast_path.logprob_chunks import TokenPieces
from tercet.vllm_plugin.fast_path.sse_chunks import framed
from tercet.vllm_plugin.fast_path.stream_plan import StreamPlan, StreamTools
from tercet.vllm_plugin.frontend.program_client import SequenceFailed, SequenceOutputs
from tercet.wire.serving.client_connection import ClientConnection
from tercet.wire.serving.request_context import Concurrency

logger = logging.getLogger(__name__)


class RequestStream:
    """The stream of one request, sent to ``connection``.

    ``concurrency`` limits how many of several sequences run at a time; ``pieces`` are the texts of tokens for log
    probabilities.
    """

    def __init__(
        self, connection: ClientConnection, tools: StreamTools, plan: StreamPlan,
        concurrency: Concurrency | None = None, pieces: TokenPieces | None = None,
    ) -> None:  # fmt: skip
        self._connection = connection
        self._tools = tools
        self._plan = plan
        self._concurrency = concurrency
        self._pieces = pieces
        keeps_alive = tools.keep_alive and plan.events.keeps_alive
        self._keep_alive = KeepAlive(connection.write, tools.keep_alive) if keeps_alive else None
        self.write = connection.write if self._keep_alive is None else self._keep_alive.write
        self.flush = connection.flush
        self._choices: list[ChoiceStream] = []
        self._open = plan.n
        self._end = b""
        self.queue: Any = None

    # ---- from start to end -----------------------------------------------------------------------------------

    async def run(self, add_request: Callable[[], Awaitable[Any]]) -> bytes:
        """Stream the request that ``add_request`` adds to vLLM; return the last events, with the error if it failed."""
        events = self._plan.events
        if opening := events.begin():
            self.write(framed(opening))
        try:
            self.queue = await add_request()
            with nullcontext() if self._keep_alive is None else self._keep_alive.running():
                await self._stream()
            return self._end + await events.end(self._choices)
        except Exception as error:
            if not isinstance(error, (VLLMClientError, GracefulHTTPError, GenerationError, SequenceFailed)):
                logger.exception("a stream failed")
            return events.failed(error)

    def begin(self, outputs: SequenceOutputs) -> None:
        """Add a sequence with these ``outputs``; the engine-core client calls it while vLLM adds the request."""
        self._choices.append(ChoiceStream(self, self._tools, self._plan, outputs, self._pieces))

    async def _stream(self) -> None:
        if not self._choices:
            raise RuntimeError("vLLM added a request without passing it to its engine-core client")
        try:
            if len(self._choices) == 1:
                await self._choices[0].run(nullcontext())
            else:
                await self._run_all()
        finally:
            self._tools.processor.abort_requests((self._choices[0].id,), internal=True)
            self.queue.close()

    async def _run_all(self) -> None:
        """Stream all choices at the same time; an error of one choice ends all of them."""
        try:
            async with asyncio.TaskGroup() as group:
                for choice in self._choices:
                    group.create_task(choice.run(self._place()))
        except* Exception as failed:
            first = failed.exceptions[0]
        else:
            return
        raise first

    def _place(self) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self._concurrency is None else self._concurrency.one()

    @property
    def calls_tool(self) -> bool:
        """True if any choice has called a tool."""
        return any(choice.calls_tool for choice in self._choices)

    # ---- for its choices -------------------------------------------------------------------------------------

    async def sent(self) -> None:
        """Send the written chunks, and wait until the client has read enough."""
        self._connection.flush()
        await self._connection.has_room()

    def has_result(self, result: RequestOutput) -> None:
        """Write the events that come before the event of ``result``."""
        if events := self._plan.events.result(result):
            self.write(framed(events))

    def has_ended(self, last: bytes) -> None:
        """Write a choice's ``last`` event; the last choice's one is kept for the end of the stream."""
        self._open -= 1
        if self._open:
            self.write(framed(last))
        else:
            self._end = last
