"""The short way in and out: from the socket to vLLM's serving objects and back, past the layers between.

What those layers answer themselves (errors above all) is left to them: a request that is no plain stream, or that
vLLM's serving objects refuse, goes to the layers as if nothing had happened.

Relies on ``create_completion`` of ``OpenAIServingCompletion`` and ``create_chat_completion`` of ``OpenAIServingChat``
rendering and validating a request before they return its stream, on their asking ``generate`` of the engine client for
results, and on FastAPI giving them what ``model_validate`` makes of a JSON body.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from starlette.requests import Request

from tercet.protocol import TercetError
from tercet.router.body import App, Body, Receive, Scope, Send
from tercet.router.context import PROGRAM_HEADER, RequestContext, headers_of, serving_request
from tercet.router.entrance import BODY
from tercet.router.streaming.connection import current_connection
from tercet.router.streaming.http_metrics import HttpMetrics
from tercet.router.streaming.pieces import pieces_of
from tercet.router.streaming.plain import is_plain_call, is_plain_chat, is_plain_completion, may_be_shortened
from tercet.router.streaming.stats import StreamStats
from tercet.router.streaming.stream import PlainStream, current_stream, serving

logger = logging.getLogger(__name__)
Chunks = AsyncGenerator[str, None]
START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}
BODY_PART = "http.response.body"


@dataclass(frozen=True)
class Kind:
    """One route: the ``model`` of its bodies, which of them are plain, and what makes chunks of one."""

    model: Any
    is_plain: Callable[[Any], bool]
    create: Callable[[Any, Request], Awaitable[Any]]


class ShortWay:
    """ASGI: serves plain streams, hands everything else to ``app``. ``check_program`` raises for unknown names."""

    def __init__(
        self,
        app: App,
        kinds: dict[str, Kind],
        make_stream: Callable[[], PlainStream | None],
        check_program: Callable[[str], object],
        metrics: HttpMetrics,
    ) -> None:
        self._app = app
        self._kinds = kinds
        self._make_stream = make_stream
        self._check_program = check_program
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if not await self._serve(scope, send):
            await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, send: Send) -> bool:
        """Serve the request if it is a plain stream; whether it was one."""
        began = perf_counter()
        body: Body | None = scope.get(BODY)
        if body is None or body.asked.stream is not True:
            return False
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        kind, context = self._kinds.get(path), RequestContext(headers_of(scope), asked=body.asked)
        stream = self._stream_for(scope, context)
        if kind is None or stream is None:
            return False
        with serving_request(context), serving(stream):
            chunks = await self._chunks(kind, body, scope)
            if chunks is None:
                return False
            body.drop()
            # In a task of its own: a token wakes up all that waits for it, up to the task, and not the layers here.
            await asyncio.create_task(_answer(stream, chunks, send))
        self._metrics.observe(scope, path, began)
        return True

    def _stream_for(self, scope: Scope, context: RequestContext) -> PlainStream | None:
        if not is_plain_call(scope, context.headers):
            return None
        if PROGRAM_HEADER in context.headers:
            try:
                self._check_program(context.headers[PROGRAM_HEADER])
            except TercetError:
                return None
        return self._make_stream()

    async def _chunks(self, kind: Kind, body: Body, scope: Scope) -> Chunks | None:
        try:
            request = kind.model.model_validate(json.loads(body.content))
            if not kind.is_plain(request):
                return None
            chunks = await kind.create(request, Request(scope))
        except Exception as error:  # whatever it is, vLLM's own way answers it
            logger.debug("left to vLLM's own way: %s: %s", type(error).__name__, error)
            return None
        return chunks if isinstance(chunks, AsyncGenerator) else None


async def _answer(stream: PlainStream, chunks: Chunks, send: Send) -> None:
    with stream.connection.until_lost():
        await send(START)
        try:
            async with aclosing(chunks):
                end = ""
                async for chunk in chunks:
                    if stream.finished:
                        end += chunk
                        continue
                    stream.connection.flush()
                    await send({"type": BODY_PART, "body": chunk.encode(), "more_body": True})
                    stream.learn(chunk)
                    if stream.writes:
                        await stream.pump()
        finally:
            await stream.close()
        stream.connection.flush()
        # vLLM makes all that is left once the last result is there, so that nothing waits here for what follows it.
        await send({"type": BODY_PART, "body": end.encode(), "more_body": False})


def short_way(
    app: App,
    state: Any,
    args: argparse.Namespace,
    engine_client: Any,
    stats: StreamStats,
    check_program: Callable[[str], object],
) -> App:
    """``app`` with the short way before it, where the options ``args`` leave any; ``state`` has the serving objects."""
    if not may_be_shortened(args):
        return app
    metrics, pieces = HttpMetrics(app), pieces_of(engine_client.output_processor.tokenizer)
    if not metrics.found:
        logger.warning("vLLM's HTTP metrics are not where they were: plain streams go its own way, which costs more")
        return app
    _let_streams_generate(engine_client)

    def make_stream() -> PlainStream | None:
        connection = current_connection()
        if connection is None:
            return None
        return PlainStream(connection, engine_client.output_processor, stats, pieces)

    return ShortWay(app, _kinds(state), make_stream, check_program, metrics)


def _kinds(state: Any) -> dict[str, Kind]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    kinds: dict[str, Kind] = {}
    completion, chat = state.openai_serving_completion, state.openai_serving_chat
    if completion is not None:
        kinds["/v1/completions"] = Kind(CompletionRequest, is_plain_completion, completion.create_completion)
    if chat is not None and chat.parser_cls is None:
        kinds["/v1/chat/completions"] = Kind(ChatCompletionRequest, is_plain_chat, chat.create_chat_completion)
    return kinds


def _let_streams_generate(engine_client: Any) -> None:
    """Where the current task serves a plain stream, its results come from there."""
    generate, add_request = engine_client.generate, engine_client.add_request

    def generate_for(prompt: Any, sampling_params: Any, request_id: str, **more: Any) -> AsyncGenerator[Any, None]:
        stream = current_stream()
        if stream is None:
            return generate(prompt, sampling_params, request_id, **more)
        return stream.generate(lambda: add_request(request_id, prompt, sampling_params, **more))

    engine_client.generate = generate_for
