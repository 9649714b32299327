"""The router's ASGI application, which every request passes once before it is served.

It checks the key, the size and the program that the request names, and waits for a slot if the fleet is full. Then a
stream takes the fast path; vLLM's application serves all other requests and contains Tercet's routes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, nullcontext
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.types import ASGIApp, Receive, Scope, Send

from tercet.fleet.admission import ClientLeft, Gate, RequestConcurrency
from tercet.fleet.bodies import (
    ADMITTED_BYTES,
    LARGEST_AT_ONCE,
    AdmittedBodies,
    BodiesHeld,
    HeldBody,
    LongBodies,
    is_long,
    is_short,
)
from tercet.protocol import BadRequest, EngineUnreachable, RouterFailed, Saturated, TercetError, UnknownPath
from tercet.protocol.access import BearerKeys
from tercet.protocol.errors import error_body
from tercet.protocol.headers import GENERATING, PROGRAM_HEADER
from tercet.protocol.request_checks import WITH_BODY
from tercet.protocol.wire import API_PREFIX, JSON
from tercet.router.limits.received_bodies import (
    ReceivedBody,
    nothing_from,
    read_body,
    receive_body,
    require_few_sequences,
)
from tercet.router.observe.followed_requests import access_logged, followed_request, take_id_of_body
from tercet.router.observe.request_traces import FollowedRequest, RequestTraces
from tercet.router.pooling import PooledAnswer, PoolingServers, close_result
from tercet.router.serve.shutdown import Shutdown
from tercet.wire.serving.answers import (
    ErrorSend,
    ToolCallsSend,
    TracingSend,
    error_headers,
    fault_of,
    trace_refused,
    wants_trace,
)
from tercet.wire.serving.client_connection import CONNECTION
from tercet.wire.serving.server_access import (
    AT_ADMIN,
    CONTEXT,
    AdminAccess,
    RequestContext,
    is_admin_path,
    path_of,
    serving,
)

if TYPE_CHECKING:
    from tercet.router.openai.fast_path.entry import FastPath
from typing import TYPE_CHECKING

from starlette.applications import Starlette

from tercet.router.observe.metrics import with_metrics
from tercet.router.page.page_app import with_page
from tercet.router.state.shared_state import SharedState
from tercet.settings import RouterConfig
from tercet.wire.serving.server_access import RouterKeys

if TYPE_CHECKING:
    from tercet.router.openai.fast_path.entry import FastPath


logger = logging.getLogger("tercet.router")
# Key of the scope with an error, for the layers around refusals.
ERROR = "tercet.error"
# Key of the scope with a pooling server's answer, for the same layers.
ANSWER = "tercet.answer"
# Paths without a key, as on a vLLM server, for probes and metrics; their answers contain no client's data.
LIVE = "/live"
READY = frozenset({"/health", "/ping"})
OPEN = READY | {LIVE, "/load", "/version", "/metrics", "/metrics/"}
# Close code of a websocket that the server refuses.
POLICY_VIOLATION = 1008
# The first printable character of ASCII, and the control character after the last one.
FIRST_PRINTABLE, DELETE = 32, "\x7f"


class RouterApp:
    """The application that refuses requests which may not be served, and passes the others to ``fast`` or ``app``.

    Errors have the form of the requested API.

    ``check_program`` raises for an unknown program; ``around_refusals`` adds the layers (CORS) that errors and answers
    of pooling servers need to reach a browser.
    ``shutdown`` counts every request, and refuses all after it has begun; None for a router that does not stop.
    ``access_log`` is true if each request is logged. ``pooling`` serves embeddings, scores and reranking, if given.
    ``keys`` are the client keys, and ``admins`` checks access to admin routes. ``admin_apart`` is true if only a
    separate address serves admin routes. ``traces`` records requests for engines. ``client_traces`` is true if clients
    may see the trace of their request in its answer.
    """

    def __init__(
        self, app: ASGIApp, fast: FastPath | None, gate: Gate, keys: BearerKeys | Sequence[str],
        check_program: Callable[[str], object], max_bytes: int,
        around_refusals: Callable[[ASGIApp], ASGIApp] = lambda app: app,
        shutdown: Shutdown | None = None,
        access_log: bool = False,
        pooling: PoolingServers | None = None,
        admins: AdminAccess | None = None,
        admin_apart: bool = False,
        traces: RequestTraces | None = None,
        client_traces: bool = False,
    ) -> None:  # fmt: skip
        self._app = app
        self._fast = fast
        self._gate = gate
        self._shutdown = shutdown or Shutdown(timeout_s=0)
        self._keys = keys if isinstance(keys, BearerKeys) else BearerKeys(keys)
        self._admins = admins or AdminAccess(clients=self._keys)
        self._admin_apart = admin_apart
        self._check_program = check_program
        self._max_bytes = max_bytes
        self._bodies = BodiesHeld(LARGEST_AT_ONCE * max_bytes)
        self._admitted = AdmittedBodies(max(ADMITTED_BYTES, LARGEST_AT_ONCE * max_bytes))
        self._long = LongBodies(gate.limits, gate.count_refusal)
        self._access_log = access_log
        self._pooling = pooling
        self._client_traces = client_traces
        self._traces = traces or RequestTraces(0)
        self._refusals = around_refusals(_refused)
        self._answers = around_refusals(_passed_on)

    @property
    def bytes_kept(self) -> int:
        """Bytes of buffered bodies of requests that are not admitted yet."""
        return self._bodies.size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "websocket":
            await self._open(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = scope[CONTEXT] = context_of(scope)
        with (
            followed_request(context, scope, self._traces) as followed,
            access_logged(scope, send) if self._access_log else nullcontext(send) as answer,
        ):
            await self._pass(context, followed, scope, receive, answer)

    async def _pass(
        self, context: RequestContext, followed: FollowedRequest | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        refused = _odd_path(context.path) or self._served_elsewhere(context.path, scope)
        if refused is not None:
            await self._refusals({**scope, ERROR: refused}, receive, send)
            return
        if scope["method"] == "OPTIONS":
            await self._app(scope, nothing_from(receive), send)
            return
        if context.path == LIVE:
            await _answer(send, 200, b"")
            return
        async with AsyncExitStack() as held:
            held.callback(context.prepared)
            try:
                body, pooled = await self._admit(context, followed, scope, receive, held)
            except TercetError as error:
                context.failed = error
                await self._refusals({**scope, ERROR: error}, receive, send)
            except ClientLeft:
                context.client_left = True
            else:
                if pooled is not None:
                    await self._answers({**scope, ANSWER: pooled}, receive, send)
                    return
                await self._serve(context, scope, nothing_from(receive) if body is None else body.receive, send)

    async def _admit(
        self, context: RequestContext, followed: FollowedRequest | None, scope: Scope, receive: Receive,
        held: AsyncExitStack,
    ) -> tuple[ReceivedBody | None, PooledAnswer | None]:  # fmt: skip
        """Check a request, read its body, and wait for its slot; return the body, and a pooling server's answer.

        ``held`` releases all of them. Raises :class:`~tercet.protocol.TercetError`, and :class:`ClientLeft`.
        """
        # Probes and admin GET requests do not hold up the end of the process.
        if context.path not in OPEN and not (context.path.startswith(API_PREFIX) and scope["method"] == "GET"):
            held.enter_context(self._shutdown.request())
        pooling = self._pooling if self._pooling is not None and self._pooling.take(context.path) else None
        with self._bodies.one() as kept:
            body = await self._enter(context, scope, receive, kept)
            if followed is not None:
                take_id_of_body(followed, scope)
            if body is not None and not context.path.startswith(API_PREFIX):
                held.callback(body.close)
                for_engines = pooling is None and context.path in GENERATING
                if for_engines:
                    self._divide(context)
                if not self._gate.is_open:
                    context.prepared()  # the wait for a slot may be long
                    slot = self._gate.slot(context.asked.priority, body.left, for_engines=for_engines)
                    async with kept.until_let_go():
                        await held.enter_async_context(slot)
                    if followed is not None:
                        followed.admitted()
                if context.preparation is not None and pooling is None:
                    await self._take_turn(context, scope, body, kept)
                elif pooling is None and not is_short(body.content):
                    await self._long.alone(self._client_of(scope))
                self._count_admitted(len(body.content), held)
        if body is None or pooling is None:
            return body, None
        context.prepared()
        pooled = await self._pooled(pooling, context, body, scope)
        held.callback(pooled.close)
        return body, pooled

    def _count_admitted(self, size: int, held: AsyncExitStack) -> None:
        """Count the body of a request until its end; raise :class:`~tercet.protocol.Saturated` if it does not fit."""
        try:
            held.enter_context(self._admitted.one(size))
        except Saturated:
            self._gate.count_refusal("bodies_full")
            raise

    def _served_elsewhere(self, path: str, scope: Scope) -> UnknownPath | None:
        """Return the error if only the router's other address serves this path, otherwise None."""
        at_admin = scope.get(AT_ADMIN, False)
        if is_admin_path(path):
            wrong = self._admin_apart and not at_admin
            return UnknownPath(f"{path} is only served at the router's --admin-listen address") if wrong else None
        wrong = at_admin and path not in OPEN
        return UnknownPath(f"{path} is for clients; the admin address does not serve it") if wrong else None

    def _divide(self, context: RequestContext) -> None:
        """Run a request's sequences in portions; raise :class:`~tercet.protocol.BadRequest` for too many sequences."""
        limits = self._gate.limits
        require_few_sequences(context.path, context.fields, limits.sequences)
        spares = None if self._gate.is_open else self._gate
        context.most_sequences = limits.sequences
        context.concurrency = RequestConcurrency(limits.at_once, spares, context.asked.priority).one

    async def _pooled(
        self, pooling: PoolingServers, context: RequestContext, body: ReceivedBody, scope: Scope
    ) -> PooledAnswer:
        """Return a pooling server's answer; raise :class:`ClientLeft` if the client has left."""
        method: str = scope["method"]
        asking = asyncio.ensure_future(
            pooling.answer(
                method.encode(), _target(scope, context.path), context.asked.model, body.content, scope["headers"],
                context.began,
            )
        )  # fmt: skip
        try:
            await asyncio.wait({asking, body.left()}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise ClientLeft
            return asking.result()
        except BaseException:
            close_result(asking)
            raise

    async def _enter(
        self, context: RequestContext, scope: Scope, receive: Receive, kept: HeldBody
    ) -> ReceivedBody | None:
        if context.path in READY:
            self._require_ready()
        if is_admin_path(context.path):
            self._admins.require(scope)
        elif context.path not in OPEN:
            self._require_client(context, scope)
        context.wants_trace = wants_trace(context.headers)
        if PROGRAM_HEADER in context.headers:
            self._check_program(context.headers[PROGRAM_HEADER])
        if scope["method"] not in WITH_BODY or context.path in OPEN:
            return None  # no body is buffered for a caller without a key
        body = await receive_body(context, scope, receive, self._max_bytes, kept)
        if not body.content or context.path.startswith(API_PREFIX):
            return body  # Tercet's own routes read their bodies
        try:
            if is_long(body.content):
                await self._take_turn(context, scope, body, kept)
            if context.form == JSON:
                await read_body(context, body, self._gate.limits.items)
        except BaseException:
            body.close()
            raise
        return body

    async def _take_turn(self, context: RequestContext, scope: Scope, body: ReceivedBody, kept: HeldBody) -> None:
        """Wait until a long body may be worked on: no other body of its client is, and no other body at this moment."""
        if context.preparation is None or context.preparation.has_ended:
            async with kept.until_let_go():
                context.preparation = await self._long.turn(self._client_of(scope), body.left)
        await self._long.alone(self._client_of(scope))

    def _client_of(self, scope: Scope) -> str:
        """Return the key that a client sent; its address if the router requires no key."""
        if self._keys:
            shown = "".join(value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization")
            return shown.partition(" ")[2]  # the scheme may be written in any case
        return (scope.get("client") or ("",))[0]

    def _require_client(self, context: RequestContext, scope: Scope) -> None:
        """Require a client key; for a trace, that of an administrator instead, unless clients may see traces."""
        try:
            if not self._client_traces and wants_trace(context.headers):
                self._admins.require_operator(scope)
                return
        except BadRequest:
            self._require_key(scope)
            raise
        except TercetError as refusal:
            self._require_key(scope)
            raise trace_refused("send the admin key in Authorization instead of a client key") from refusal
        self._require_key(scope)

    def _require_key(self, scope: Scope) -> None:
        refusal = "this router requires an API key: Authorization: Bearer KEY"
        shown = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
        self._keys.require(shown, refusal)

    async def _open(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a websocket; refuse it before it opens if the key is missing or wrong."""
        try:
            if (odd := _odd_path(path_of(scope))) is not None:
                raise odd
            self._require_key(scope)
        except TercetError:
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
            return
        await self._app(scope, receive, send)

    def _require_ready(self) -> None:
        self._shutdown.require_serving()
        self._gate.require_engines()

    async def _serve(self, context: RequestContext, scope: Scope, receive: Receive, send: Send) -> None:
        with serving(context):
            if self._fast is not None and await self._fast.serve(context, scope, send):
                return
            if context.fields and context.fields.get("tools"):
                send = ToolCallsSend(send, context)
            context.fields = None  # vLLM decodes the body again
            if context.wants_trace:
                send = TracingSend(send, context.traces)
            answer = ErrorSend(send, context)
            try:
                await self._app(scope, receive, answer)
            except Exception as error:
                if answer.ended:  # vLLM's layers have sent an error, and raise its cause afterwards
                    raise
                failed = context.failed or fault_of(error)
                if isinstance(failed, RouterFailed):
                    logger.exception("a request to %s failed", context.path)
                await answer.fail(failed)


def context_of(scope: Scope) -> RequestContext:
    """Return the context of a request, from its head."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    return RequestContext(path_of(scope), headers, connection=scope.get(CONNECTION))


def _odd_path(path: str) -> BadRequest | None:
    """Return the error if a path has control characters; a route's pattern would ignore a line break at its end."""
    if path.isprintable() or not any(ord(char) < FIRST_PRINTABLE or char == DELETE for char in path):
        return None
    return BadRequest(f"path: {path!r:.300} has control characters; remove them (%00 to %1F and %7F)", "path")


def _target(scope: Scope, path: str) -> bytes:
    """Return the path and query as the client wrote them, without the prefix of a proxy before this router."""
    written: bytes = scope.get("raw_path") or quote(path).encode()
    query: bytes = scope["query_string"]
    return written.removeprefix(scope.get("root_path", "").encode()) + (b"?" + query if query else b"")


# ---- refusals ------------------------------------------------------------------------------------------------


async def _refused(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error in the form of the requested API."""
    error: TercetError = scope[ERROR]
    await _answer(send, error.status, error_body(path_of(scope), error), error_headers(error))


async def _answer(send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    length = b"content-length", str(len(body)).encode()
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def _passed_on(scope: Scope, receive: Receive, send: Send) -> None:
    """Pass on a server's answer; leave it without an end if the server broke off, which closes the connection."""
    answer: PooledAnswer = scope[ANSWER]
    await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
    try:
        async for part in answer.parts():
            await send({"type": "http.response.body", "body": part, "more_body": True})
    except EngineUnreachable as error:
        logger.warning("%s", error.message)
        return
    await send({"type": "http.response.body", "body": b""})


def put_layers_before(
    app: Starlette, layers: ASGIApp, config: RouterConfig, state: SharedState, keys: RouterKeys, shutdown: Shutdown,
    pooling: PoolingServers, fast: FastPath | None = None,
    around_refusals: Callable[[ASGIApp], ASGIApp] = lambda app: app,
) -> Gate:  # fmt: skip
    """Make requests of ``app`` pass the router's layers and then ``layers``, its own; return the gate that admits them.

    ``fast`` and ``around_refusals`` are those of :class:`RouterApp`.
    """
    service, apart = state.service, config.admin_listen is not None
    gate = Gate(config.limits, service.fleet, service.metrics)
    front = RouterApp(
        with_metrics(layers, service.fleet, state.traces.exemplars), fast, gate, keys.clients, service.program_called,
        config.max_request_bytes, around_refusals, shutdown, config.access_log, pooling, keys.access, apart,
        state.traces.own, config.client_traces,
    )  # fmt: skip
    app.middleware_stack = with_page(front, state, keys, config.public_name, shutdown, apart)
    return gate
