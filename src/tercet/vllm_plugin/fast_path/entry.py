"""The streaming fast path: from the socket to vLLM's serving objects and back, around the layers between.

What those layers answer themselves (errors above all) is left to them: a request that this path does not know, or that
vLLM's serving objects refuse, goes to the layers as if nothing had happened.

Relies on ``create_completion`` of ``OpenAIServingCompletion`` and ``create_chat_completion`` of ``OpenAIServingChat``
rendering and validating a request before they return its stream, which they make by ``completion_stream_generator`` and
``chat_completion_stream_generator`` from the result of ``engine_client.generate``; and on FastAPI passing them the
result of ``model_validate`` for a JSON body.
"""

from __future__ import annotations

import argparse
import copy
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from tercet.protocol.headers import TRACE_HEADER
from tercet.vllm_plugin.differences import OFFSETS_OF_SENT_TEXT
from tercet.vllm_plugin.fast_path.header_layers import HeaderLayers
from tercet.vllm_plugin.fast_path.logprob_chunks import TokenPieces
from tercet.vllm_plugin.fast_path.parser_parts import keep_parser_parts
from tercet.vllm_plugin.fast_path.request_stream import RequestStream
from tercet.vllm_plugin.fast_path.short_prompts import render_short_prompts_here
from tercet.vllm_plugin.fast_path.sse_chunks import ChunkWriter, chat_format, completion_format
from tercet.vllm_plugin.fast_path.stream_metrics import HttpMetrics, StreamStats
from tercet.vllm_plugin.fast_path.stream_plan import StreamPlan, StreamTools, chat_plan, completion_plan
from tercet.vllm_plugin.fast_path.token_texts import texts_of
from tercet.wire.serving.client_connection import ClientConnection
from tercet.wire.serving.request_context import RequestContext, current

__all__ = ["FastPath", "fast_path", "render_short_prompts_here"]
logger = logging.getLogger(__name__)
EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")


@dataclass(frozen=True)
class FastRoute:
    """One route: the ``model`` of its bodies, whether it takes one, and a function that prepares the stream of one."""

    model: Any
    takes: Callable[[Any], bool]
    prepare: Callable[[Any, Request], Awaitable[Any]]


class FastPath:
    """Serves streams of ``routes``, by path; ``layers`` add headers to answers."""

    def __init__(
        self, routes: dict[str, FastRoute], tools: StreamTools, metrics: HttpMetrics, layers: HeaderLayers
    ) -> None:
        self._routes = routes
        self._tools = tools
        self._metrics = metrics
        self._layers = layers
        tokenizer = tools.processor.tokenizer
        self._pieces = None if tokenizer is None else TokenPieces(tokenizer)

    async def serve(self, context: RequestContext, scope: Scope, send: Send) -> bool:
        """Serve the request, which is the current one, if this path knows it; returns whether it did."""
        route, connection = self._routes.get(context.path), context.connection
        if route is None or connection is None or not is_fast_call(scope, context):
            return False
        plan = await _planned(route, context, scope)
        if plan is None or context.add_request is None:
            return False
        context.fields = None  # it may be large, and is not needed any more
        context.stream = RequestStream(connection, self._tools, plan, context.portions, self._pieces)
        answer = self._layers.around(partial(_answer, context.stream, context.add_request, connection))
        await answer(scope, _nothing, send)
        context.calls_tool = context.stream.calls_tool
        self._metrics.observe(scope, context.path, time.monotonic() - context.began)
        return True


async def _planned(route: FastRoute, context: RequestContext, scope: Scope) -> StreamPlan | None:
    try:
        request = route.model.model_validate(context.fields)
        plan = await route.prepare(request, Request(scope)) if route.takes(request) else None
    except Exception as error:  # in any case, vLLM's own path answers it
        logger.debug("left to vLLM's own path: %s: %s", type(error).__name__, error)
        return None
    return plan if isinstance(plan, StreamPlan) else None


async def _answer(
    stream: RequestStream,
    add_request: Callable[[], Awaitable[Any]],
    connection: ClientConnection,
    _scope: Scope,
    _receive: Receive,
    send: Send,
) -> None:
    """ASGI, after the first three."""
    with connection.until_lost():
        await send({"type": "http.response.start", "status": 200, "headers": [EVENT_STREAM]})
        end = await stream.run(add_request)
        connection.flush()
        await send({"type": "http.response.body", "body": end})


async def _nothing() -> Message:
    """ASGI's ``receive`` of a request whose body was read."""
    return {"type": "http.disconnect"}


# ---- which requests it takes ---------------------------------------------------------------------------------


def may_be_fast(args: argparse.Namespace) -> bool:
    """Whether any request may take the fast path under vLLM's options ``args``.

    The user's middleware may read answers; the other options change what vLLM's own path logs or counts.
    """
    return not (
        args.middleware
        or args.enable_log_outputs
        or args.enable_server_load_tracking
        or args.enable_per_request_metrics
    )


def is_fast_call(scope: Scope, context: RequestContext) -> bool:
    """Whether a request asks for a stream, and has no headers that other layers handle."""
    headers = context.headers
    return (
        context.asked.stream is True
        and scope["http_version"] == "1.1"
        and headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
        and TRACE_HEADER not in headers
    )


def is_fast_completion(request: Any) -> bool:
    """Whether this completion's chunks are written here."""
    return (
        _is_one_prompt(request.prompt)
        and _is_fast(request)
        and request.prompt_embeds is None
        and (request.logprobs is None or not OFFSETS_OF_SENT_TEXT.is_here)
    )


def is_fast_chat(request: Any) -> bool:
    """Whether the chunks of this chat answer are written here."""
    return _is_fast(request)


def _is_fast(request: Any) -> bool:
    return bool(request.stream) and not (
        request.echo
        or request.prompt_logprobs is not None
        or request.use_beam_search
        or getattr(request, "return_weight_versions", False)  # not in vLLM before 0.33
    )


def _is_one_prompt(prompt: Any) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int))


# ---- vLLM's serving objects, up to where they would generate -------------------------------------------------


class PreparingClient:
    """Replaces the engine client of a serving object: records what would be generated instead of doing it."""

    def __init__(self, engine_client: Any) -> None:
        self._engine_client = engine_client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine_client, name)

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **more: Any) -> None:
        """Replaces ``AsyncLLM.generate``."""
        current().add_request = partial(
            self._engine_client.add_request, request_id, prompt, sampling_params, **more
        )  # fmt: skip


def completion_route(serving: Any, engine_client: Any) -> FastRoute:
    """Completions, prepared by a copy of vLLM's ``serving`` object that returns a plan instead of a stream."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    def plan(
        request: Any, _inputs: Any, _results: Any, request_id: str, created: int, model: str, **_: Any
    ) -> StreamPlan:
        return completion_plan(serving, request, ChunkWriter(completion_format(), request_id, created, model))

    preparing = copy.copy(serving)
    preparing.engine_client, preparing.completion_stream_generator = PreparingClient(engine_client), plan
    return FastRoute(CompletionRequest, is_fast_completion, preparing.create_completion)


def chat_route(serving: Any, engine_client: Any) -> FastRoute:
    """Chat answers, in the same way."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    def plan(
        request: Any, _results: Any, request_id: str, model: str, _conversation: Any, tokenizer: Any, _metadata: Any,
        chat_template_kwargs: Any = None, mm_token_counts: Any = None,
    ) -> StreamPlan:  # fmt: skip
        chunks = ChunkWriter(chat_format(), request_id, int(time.time()), model)
        return chat_plan(serving, request, chunks, tokenizer, chat_template_kwargs, mm_token_counts)

    preparing = copy.copy(serving)
    preparing.engine_client, preparing.chat_completion_stream_generator = PreparingClient(engine_client), plan
    return FastRoute(ChatCompletionRequest, is_fast_chat, preparing.create_chat_completion)


def fast_path(app: Any, state: Any, args: argparse.Namespace, engine_client: Any) -> FastPath | None:
    """The fast path around ``app``, if the options ``args`` allow it; ``state`` has the serving objects."""
    if not may_be_fast(args):
        return None
    metrics = HttpMetrics(app)
    if not metrics.found:
        logger.warning("vLLM's HTTP metrics were not found: streams use its own path, which costs more")
        return None
    keep_parser_parts()
    routes: dict[str, FastRoute] = {}
    completion, chat = state.openai_serving_completion, state.openai_serving_chat
    if completion is not None:
        routes["/v1/completions"] = completion_route(completion, engine_client)
    if chat is not None:
        routes["/v1/chat/completions"] = chat_route(chat, engine_client)
    processor = engine_client.output_processor
    tools = StreamTools(
        processor,
        StreamStats(engine_client.logger_manager),
        texts_of(processor.tokenizer),
        float(args.sse_keep_alive_interval),
    )
    return FastPath(routes, tools, metrics, HeaderLayers(app))
