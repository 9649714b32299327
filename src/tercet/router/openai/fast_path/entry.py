"""The streaming fast path: from the socket to vLLM's serving objects and back, without the layers between them.

A request that this path does not support, or that vLLM's serving objects refuse, goes to those layers unchanged: they
answer it, in most cases with an error.

Relies on FastAPI passing serving objects the result of ``model_validate`` for a JSON body.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from tercet.protocol.headers import TRACE_HEADER
from tercet.protocol.wire import JSON
from tercet.router.openai.fast_path.logprob_chunks import TokenPieces, texts_of
from tercet.router.openai.fast_path.parsed_text import keep_parser_parts
from tercet.router.openai.fast_path.request_stream import RequestStream
from tercet.router.openai.fast_path.stream_metrics import HttpMetrics, StreamStats, with_header_layers
from tercet.router.openai.fast_path.stream_plan import FastRoute, StreamPlan, StreamTools, routes_of
from tercet.wire.serving.client_connection import CONNECTION, ClientConnection
from tercet.wire.serving.server_access import RequestContext

logger = logging.getLogger(__name__)
# Key of the scope with the function that streams the answer and returns its last events.
ANSWER = "tercet.stream"
EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")


class FastPath:
    """Serves the streams of ``routes`` (by path) of ``app``, whose layers add headers to answers."""

    def __init__(self, app: Any, routes: dict[str, FastRoute], tools: StreamTools, metrics: HttpMetrics) -> None:
        self._routes = routes
        self._tools = tools
        self._metrics = metrics
        self._answer = with_header_layers(app, _answer)
        tokenizer = tools.processor.tokenizer
        self._pieces = None if tokenizer is None else TokenPieces(tokenizer)

    async def serve(self, context: RequestContext, scope: Scope, send: Send) -> bool:
        """Serve the current request if this path supports it; return False if it does not."""
        route, connection = self._routes.get(context.path), context.connection
        if route is None or connection is None or not is_fast_call(scope, context):
            return False
        plan = await _planned(route, context, scope)
        if plan is None or context.add_request is None:
            return False
        context.fields = None  # the body may be large, and is no longer needed
        stream = context.stream = RequestStream(connection, self._tools, plan, context.concurrency, self._pieces)
        scope[ANSWER] = partial(stream.run, context.add_request)
        await self._answer(scope, _nothing, send)
        context.calls_tool = stream.calls_tool
        self._metrics.observe(scope, context.path, time.monotonic() - context.began)
        return True


async def _planned(route: FastRoute, context: RequestContext, scope: Scope) -> StreamPlan | None:
    try:
        request = route.model.model_validate(context.fields)
        plan = await route.prepare(request, Request(scope)) if route.takes(request) else None
    except Exception as error:  # vLLM's own path answers the request, whatever the error is
        logger.debug("the stream takes vLLM's own path: %s: %s", type(error).__name__, error)
        return None
    return plan if isinstance(plan, StreamPlan) else None


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the stream of ``scope``: an ASGI application."""
    connection: ClientConnection = scope[CONNECTION]
    run: Callable[[], Awaitable[bytes]] = scope[ANSWER]
    with connection.until_lost():
        await send({"type": "http.response.start", "status": 200, "headers": [EVENT_STREAM]})
        end = await run()
        connection.flush()
        await send({"type": "http.response.body", "body": end})


async def _nothing() -> Message:
    """Return a disconnect: ASGI's ``receive`` of a request whose body was read."""
    return {"type": "http.disconnect"}


# ---- which requests it takes ---------------------------------------------------------------------------------


def may_be_fast(args: argparse.Namespace) -> bool:
    """True if any request may take the fast path under vLLM's options ``args``.

    The user's middleware may read answers; the other options make vLLM's own path log or count more.
    """
    return not (
        args.middleware
        or args.enable_log_outputs
        or args.enable_server_load_tracking
        or args.enable_per_request_metrics
    )


def is_fast_call(scope: Scope, context: RequestContext) -> bool:
    """True if a request asks for a stream, and has no headers that other layers handle."""
    return (
        context.asked.stream is True
        and scope["http_version"] == "1.1"
        and context.form == JSON
        and "content-type" in context.headers  # vLLM reads no body without one
        and TRACE_HEADER not in context.headers
    )


def fast_path(app: Any, state: Any, args: argparse.Namespace, engine_client: Any) -> FastPath | None:
    """Return the fast path of ``app``; None if the options ``args`` forbid it. ``state`` has the serving objects."""
    if not may_be_fast(args):
        return None
    metrics = HttpMetrics(app)
    if not metrics.found:
        logger.warning("vLLM's HTTP metrics were not found: streams use vLLM's own path, which costs more CPU time")
        return None
    keep_parser_parts()
    processor = engine_client.output_processor
    tools = StreamTools(
        processor,
        StreamStats(engine_client.logger_manager),
        texts_of(processor.tokenizer),
        float(args.sse_keep_alive_interval),
    )
    return FastPath(app, routes_of(state, engine_client), tools, metrics)
