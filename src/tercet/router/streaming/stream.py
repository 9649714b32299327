"""One plain stream: its first and last chunks are vLLM's, those in between are written here.

Relies on ``OutputProcessor`` keeping a ``RequestState`` with ``queue``, ``detokenizer`` and ``stats`` for each request,
on its calling nothing but ``queue.put``, and on its stream generators counting ``token_ids`` of the outputs they see.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from vllm.outputs import RequestOutput

from tercet.protocol import Output
from tercet.router.streaming.connection import Connection
from tercet.router.streaming.stats import StreamStats
from tercet.router.streaming.template import Template, is_opening, template_of


class PlainStream:
    """A stream that may go the short way once its first chunk is on the socket."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._template: Template | None = None
        self._settled = asyncio.Event()
        self._state: Any = None
        self._queue: Any = None
        self._stats: StreamStats | None = None
        # Tokens that vLLM's stream generator has not counted yet.
        self._uncounted: list[int] = []

    # ---- between vLLM's output processor and its stream generator --------------------------------------------

    def attach(self, state: Any, stats: StreamStats) -> bool:
        """Stand between a request's state and its queue; False for what must go vLLM's way."""
        if self._state is not None or state.parent_req is not None or state.stream_interval > 1:
            self._settled.set()
            return False
        self._state, self._queue, self._stats = state, state.queue, stats
        state.queue = self
        return True

    def put(self, output: Any) -> None:
        """Pass on what vLLM's path has made, with the tokens that went the short way counted in."""
        if self._uncounted and isinstance(output, RequestOutput):
            completion = output.outputs[0]
            completion.token_ids = [*self._uncounted, *completion.token_ids]
            self._uncounted = []
        self._queue.put(output)

    async def watching(self, chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """vLLM's stream of events, unchanged; learns from it what chunks look like."""
        # The generator's caller runs what asks for this stream, vLLM's engine client, in the same context.
        _current.set(self)
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
                    # Whoever asks for the next chunk has written this one.
                    if not self._settled.is_set():
                        self._learn(chunk)
        finally:
            self._template = None
            self._settled.set()

    def _learn(self, chunk: str) -> None:
        if is_opening(chunk):
            return
        if self._state is not None and self._connection.is_chunked:
            self._template = template_of(chunk)
        self._settled.set()

    # ---- the program's outputs -------------------------------------------------------------------------------

    async def settled(self) -> None:
        """Wait until the first content is on the socket, or the stream is over."""
        await self._settled.wait()

    def takes(self, output: Output) -> bool:
        """Whether the output goes the short way."""
        return (
            self._template is not None
            and output.finish_reason is None
            and output.logprobs is None
            and bool(output.token_ids)
        )

    def write(self, token_ids: Sequence[int]) -> str | None:
        """Send the text of these tokens; returns the stop string that ends the stream, if they complete one.

        The text before a stop string is not sent: it belongs to the last chunk, which is vLLM's.
        """
        template = self._template
        if template is None or self._stats is None:
            raise RuntimeError("the stream does not go the short way")
        detokenizer = self._state.detokenizer
        before = detokenizer.num_output_tokens()
        stop = detokenizer.update(list(token_ids), False)
        # A stop string inside several tokens of one step drops those behind it.
        self._uncounted += token_ids[: detokenizer.num_output_tokens() - before]
        if stop is not None:
            self._stats.count(self._state.stats, len(token_ids))
            return stop
        self._stats.observe(self._state.stats, len(token_ids))
        self._connection.write(template.frame(detokenizer.get_next_output_text(False, True)))
        return None

    @property
    def is_full(self) -> bool:
        """Whether the client must read before more is written."""
        return self._connection.is_full

    async def has_room(self) -> None:
        """Wait for the client to read."""
        await self._connection.has_room()


_current: ContextVar[PlainStream | None] = ContextVar("tercet_stream", default=None)


def current_stream() -> PlainStream | None:
    """The plain stream being served, if the request is one."""
    return _current.get()
