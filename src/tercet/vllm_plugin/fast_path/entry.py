"""The streaming fast path: from the socket to vLLM's serving objects and back, around the layers between.

A plain stream is one whose chunks differ only in their text. What those layers answer themselves (errors above all) is
left to them: a request that is not a plain stream, or that vLLM's serving objects refuse, goes to the layers as if
nothing had happened.

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
from starlette.types import Scope, Send

from tercet.protocol.headers import TRACE_HEADER
from tercet.vllm_plugin.fast_path.plain_stream import PlainStream, StreamPlan, StreamTools
from tercet.vllm_plugin.fast_path.short_prompts import render_short_prompts_here
from tercet.vllm_plugin.fast_path.sse_chunks import CHAT, COMPLETION, ChunkWriter
from tercet.vllm_plugin.fast_path.stream_metrics import HttpMetrics, StreamStats
from tercet.vllm_plugin.fast_path.token_texts import texts_of
from tercet.wire.serving.client_connection import ClientConnection
from tercet.wire.serving.request_context import RequestContext, current

__all__ = ["FastPath", "fast_path", "render_short_prompts_here"]
logger = logging.getLogger(__name__)
START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}


@dataclass(frozen=True)
class FastRoute:
    """One route: the ``model`` of its bodies, a check for plain ones, and a function that prepares their stream."""

    model: Any
    is_plain: Callable[[Any], bool]
    prepare: Callable[[Any, Request], Awaitable[Any]]


class FastPath:
    """Serves plain streams of ``routes``, by path."""

    def __init__(self, routes: dict[str, FastRoute], tools: StreamTools, metrics: HttpMetrics) -> None:
        self._routes = routes
        self._tools = tools
        self._metrics = metrics

    async def serve(self, context: RequestContext, scope: Scope, send: Send) -> bool:
        """Serve the request, which is the current one, if it is a plain stream; returns whether it was one."""
        route, connection = self._routes.get(context.path), context.connection
        if route is None or connection is None or not is_plain_call(scope, context):
            return False
        plan = await _planned(route, context, scope)
        if plan is None or context.add_request is None:
            return False
        context.fields = None  # it may be large, and is not needed any more
        context.stream = PlainStream(connection, self._tools, plan)
        await _answer(context.stream, context.add_request, connection, send)
        self._metrics.observe(scope, context.path, time.monotonic() - context.began)
        return True


async def _planned(route: FastRoute, context: RequestContext, scope: Scope) -> StreamPlan | None:
    try:
        request = route.model.model_validate(context.fields)
        plan = await route.prepare(request, Request(scope)) if route.is_plain(request) else None
    except Exception as error:  # in any case, vLLM's own path answers it
        logger.debug("left to vLLM's own path: %s: %s", type(error).__name__, error)
        return None
    return plan if isinstance(plan, StreamPlan) else None


async def _answer(
    stream: PlainStream, add_request: Callable[[], Awaitable[Any]], connection: ClientConnection, send: Send
) -> None:
    with connection.until_lost():
        await send(START)
        end = await stream.run(add_request)
        connection.flush()
        await send({"type": "http.response.body", "body": end})


# ---- which requests are plain streams ------------------------------------------------------------------------


def may_be_fast(args: argparse.Namespace) -> bool:
    """Whether any request may take the fast path under vLLM's options ``args``.

    The user's middleware may read answers; the other options change what vLLM's own path sends or counts.
    """
    return not (
        args.middleware
        or args.sse_keep_alive_interval > 0
        or args.enable_log_outputs
        or args.enable_request_id_headers
        or args.enable_server_load_tracking
        or args.enable_force_include_usage
        or args.enable_per_request_metrics
    )


def is_plain_call(scope: Scope, context: RequestContext) -> bool:
    """Whether a request asks for a stream, and has no headers that other layers handle."""
    headers = context.headers
    return (
        context.asked.stream is True
        and scope["http_version"] == "1.1"
        and headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
        and "origin" not in headers
        and TRACE_HEADER not in headers
    )


def is_plain_completion(request: Any) -> bool:
    """Whether chunks of this completion differ only in their text."""
    return (
        _is_one_prompt(request.prompt)
        and _is_plain(request)
        and request.logprobs is None
        and not request.use_beam_search
        and request.prompt_embeds is None
    )


def is_plain_chat(request: Any) -> bool:
    """Whether chunks of this chat answer, which has no parser, differ only in their text."""
    return _is_plain(request) and not (
        request.logprobs or request.tools or request.use_beam_search or request.return_prompt_text
    )


def _is_plain(request: Any) -> bool:
    options = request.stream_options
    return bool(request.stream) and not (
        (request.n or 1) > 1
        or request.echo
        or request.prompt_logprobs is not None
        or request.return_token_ids
        or (options is not None and options.continuous_usage_stats)
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
        return StreamPlan(serving, ChunkWriter(COMPLETION, request_id, created, model), None, _counts(request))

    preparing = copy.copy(serving)
    preparing.engine_client, preparing.completion_stream_generator = PreparingClient(engine_client), plan
    return FastRoute(CompletionRequest, is_plain_completion, preparing.create_completion)


def chat_route(serving: Any, engine_client: Any) -> FastRoute:
    """Chat answers, in the same way."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    def plan(request: Any, _results: Any, request_id: str, model: str, *_: Any, **__: Any) -> StreamPlan:
        chunks = ChunkWriter(CHAT, request_id, int(time.time()), model)
        return StreamPlan(serving, chunks, serving.get_chat_request_role(request), _counts(request))

    preparing = copy.copy(serving)
    preparing.engine_client, preparing.chat_completion_stream_generator = PreparingClient(engine_client), plan
    return FastRoute(ChatCompletionRequest, is_plain_chat, preparing.create_chat_completion)


def _counts(request: Any) -> bool:
    options = request.stream_options
    return options is not None and bool(options.include_usage)


def fast_path(app: Any, state: Any, args: argparse.Namespace, engine_client: Any) -> FastPath | None:
    """The fast path around ``app``, if the options ``args`` allow it; ``state`` has the serving objects."""
    if not may_be_fast(args):
        return None
    metrics = HttpMetrics(app)
    if not metrics.found:
        logger.warning("vLLM's HTTP metrics were not found: plain streams use its own path, which costs more")
        return None
    routes: dict[str, FastRoute] = {}
    completion, chat = state.openai_serving_completion, state.openai_serving_chat
    if completion is not None:
        routes["/v1/completions"] = completion_route(completion, engine_client)
    if chat is not None and chat.parser_cls is None:
        routes["/v1/chat/completions"] = chat_route(chat, engine_client)
    processor = engine_client.output_processor
    tools = StreamTools(processor, StreamStats(engine_client.logger_manager), texts_of(processor.tokenizer))
    return FastPath(routes, tools, metrics)
