"""The router's ASGI application, which every request passes once before it is served.

It checks the key, the size and the program that the request names, and waits for a slot if the fleet is full. Then a
stream takes the fast path; vLLM's application serves all other requests and contains Tercet's routes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AsyncExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tercet.fleet.admission import BEHIND_CLIENTS, ClientLeft, Gate, RequestConcurrency
from tercet.logs import FIELDS, REQUEST_ID, access_logger, lines_of_request, request_id, request_renamed
from tercet.protocol import BadRequest, EngineUnreachable, RouterFailed, Saturated, TercetError, UnknownPath
from tercet.protocol.errors import error_body
from tercet.protocol.headers import GENERATING, PROGRAM_HEADER, REQUEST_ID_HEADER
from tercet.protocol.names import kept_name
from tercet.protocol.request_checks import WITH_BODY
from tercet.protocol.spans import entered, span_context_of, working_in
from tercet.protocol.wire import API_PREFIX, JSON
from tercet.router.observe.metrics import with_metrics
from tercet.router.observe.request_traces import FollowedRequest, RequestTraces, request_attributes
from tercet.router.page.page_app import PageApp, is_of_page, page_of
from tercet.router.pooling import PooledAnswer, PoolingServers, close_result
from tercet.router.request_bodies import (
    ADMITTED_BYTES,
    LARGEST_AT_ONCE,
    AdmittedBodies,
    BodiesHeld,
    HeldBody,
    LongBodies,
    ReceivedBody,
    is_long,
    is_short,
    nothing_from,
    read_body,
    receive_body,
    require_few_sequences,
)
from tercet.router.serve.shutdown import Shutdown
from tercet.router.state.shared_state import SharedState
from tercet.settings import RouterConfig
from tercet.wire.callers import BearerKeys
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
    OF_BATCH,
    AdminAccess,
    RequestContext,
    RouterKeys,
    is_admin_path,
    path_of,
    serving,
)

if TYPE_CHECKING:
    from tercet.router.openai.fast_path.request_stream import FastPath

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
    """

    def __init__(
        self, app: ASGIApp, fast: FastPath | None, gate: Gate, keys: BearerKeys | Sequence[str],
        # Raises for an unknown program.
        check_program: Callable[[str], object], max_bytes: int,
        # Adds the layers (CORS) that errors and answers of pooling servers need to reach a browser.
        around_refusals: Callable[[ASGIApp], ASGIApp] = lambda app: app,
        # Counts every request, and refuses all after it has begun; None for a router that does not stop.
        shutdown: Shutdown | None = None,
        access_log: bool = False,
        # Serves embeddings, scores and reranking.
        pooling: PoolingServers | None = None,
        admins: AdminAccess | None = None,
        # True if only a separate address serves admin routes.
        admin_apart: bool = False,
        # Records requests for engines.
        traces: RequestTraces | None = None,
        # True if clients may see the trace of their request in its answer.
        client_traces: bool = False,
        page: PageApp | None = None,
    ) -> None:  # fmt: skip
        self._app, self._page = app, page
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
        if scope["type"] == "websocket":
            await self._open(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = path_of(scope)
        if self._page is not None and is_of_page(path):
            await self._page(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        context = scope[CONTEXT] = RequestContext(
            path, headers, connection=scope.get(CONNECTION), background=OF_BATCH in scope
        )
        with (
            followed_request(context, scope, self._traces) as followed,
            access_logged(scope, send) if self._access_log else nullcontext(send) as answer,
        ):
            await self._pass(context, followed, scope, receive, answer)

    async def _pass(
        self, context: RequestContext, followed: FollowedRequest | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        # With an address for administrators, each address refuses the paths that only the other one serves.
        refused: TercetError | None = _odd_path(context.path)
        at_admin = scope.get(AT_ADMIN, False)
        if refused is None and is_admin_path(context.path):
            if self._admin_apart and not at_admin:
                refused = UnknownPath(f"{context.path} is only served at the router's --admin-listen address")
        elif refused is None and at_admin and context.path not in OPEN:
            refused = UnknownPath(f"{context.path} is for clients; the admin address does not serve it")
        if refused is not None:
            await self._refusals({**scope, ERROR: refused}, receive, send)
            return
        if scope["method"] == "OPTIONS":
            await self._app(scope, nothing_from(receive), send)
            return
        if context.path == LIVE:
            await _answer(send, 200, b"")
            return
        # What a request holds, in the order of taking: its count for the shutdown, its body, its slot, the bytes of its
        # body among those admitted, and a pooling server's answer. All of it is given back here, whatever happens.
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
        # Until it is admitted, a body counts among the buffered ones, of which the largest is dropped when they are too
        # many; from then on among the admitted ones, which are only refused.
        with self._bodies.one() as kept:
            body = await self._enter(context, scope, receive, kept)
            if followed is not None:
                take_id_of_body(followed, scope)
            if body is not None and not context.path.startswith(API_PREFIX):
                held.callback(body.close)
                for_engines = pooling is None and context.path in GENERATING
                priority = BEHIND_CLIENTS if context.background else context.asked.priority
                if for_engines:  # its sequences run in portions
                    limits = self._gate.limits
                    require_few_sequences(context.path, context.fields, limits.sequences)
                    spares = None if self._gate.is_open else self._gate
                    context.most_sequences = limits.sequences
                    context.concurrency = RequestConcurrency(limits.at_once, spares, priority).one
                if not self._gate.is_open:
                    context.prepared()  # the wait for a slot may be long
                    slot = self._gate.slot(priority, body.left, for_engines=for_engines)
                    async with kept.until_let_go():
                        await held.enter_async_context(slot)
                    if followed is not None:
                        followed.waited = time.monotonic() - context.began
                # A long body gave its turn back for the wait for a slot, which may be long, and takes another one now.
                if context.preparation is not None and pooling is None:
                    await self._take_turn(context, scope, body, kept)
                elif pooling is None and not is_short(body.content):
                    await self._long.alone(self._client_of(scope))
                try:  # counts the body until the request's end
                    held.enter_context(self._admitted.one(len(body.content)))
                except Saturated:
                    self._gate.count_refusal("bodies_full")
                    raise
        if body is None or pooling is None:
            return body, None
        context.prepared()
        pooled = await self._pooled(pooling, context, body, scope)
        held.callback(pooled.close)
        return body, pooled

    async def _pooled(
        self, pooling: PoolingServers, context: RequestContext, body: ReceivedBody, scope: Scope
    ) -> PooledAnswer:
        """Return a pooling server's answer; raise :class:`ClientLeft` if the client has left."""
        method: str = scope["method"]
        # The path and query as the client wrote them, without the prefix of a proxy before this router.
        written: bytes = scope.get("raw_path") or quote(context.path).encode()
        query: bytes = scope["query_string"]
        target = written.removeprefix(scope.get("root_path", "").encode()) + (b"?" + query if query else b"")
        model, fields = context.asked.model, scope["headers"]
        asking = asyncio.ensure_future(
            pooling.answer(method.encode(), target, model, body.content, fields, context.began)
        )
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
        # From the cheapest check to the dearest: what is refused anyway must not cost a key, a body or a slot.
        if context.path in READY:
            self._shutdown.require_serving()
            self._gate.fleet.health.require_answers()
        if is_admin_path(context.path):
            self._admins.require(scope)
        elif context.path not in OPEN and OF_BATCH not in scope:  # the client of a batch has shown a key with it
            # A client key; for a trace, that of an administrator instead, unless clients may see traces. A caller who
            # lacks both keys gets the error about the client key: the request needs it before anything can be traced.
            try:
                needs_client_key = self._client_traces or not wants_trace(context.headers)
                if not needs_client_key:
                    self._admins.require_operator(scope)
            except BadRequest:
                self._require_key(scope)
                raise
            except TercetError as refusal:
                self._require_key(scope)
                raise trace_refused("send the admin key in Authorization instead of a client key") from refusal
            if needs_client_key:
                self._require_key(scope)
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
        if (owner := scope.get(OF_BATCH)) is not None:
            return f"batches of {owner}"
        if self._keys:
            shown = "".join(value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization")
            return shown.partition(" ")[2]  # the scheme may be written in any case
        return (scope.get("client") or ("",))[0]

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

    async def _serve(self, context: RequestContext, scope: Scope, receive: Receive, send: Send) -> None:
        with serving(context):
            if self._fast is not None and await self._fast.serve(context, scope, send):
                return
            # The session's next turn comes soon after a tool call, so its context is kept: only the answer shows one.
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


def _odd_path(path: str) -> BadRequest | None:
    """Return the error if a path has control characters; a route's pattern would ignore a line break at its end."""
    if path.isprintable() or not any(ord(char) < FIRST_PRINTABLE or char == DELETE for char in path):
        return None
    return BadRequest(f"path: {path!r:.300} has control characters; remove them (%00 to %1F and %7F)", "path")


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
    app: FastAPI, layers: ASGIApp, config: RouterConfig, state: SharedState, gate: Gate, keys: RouterKeys,
    shutdown: Shutdown, pooling: PoolingServers, fast: FastPath | None = None,
    around_refusals: Callable[[ASGIApp], ASGIApp] = lambda app: app,
) -> None:  # fmt: skip
    """Make requests of ``app`` pass the router's layers, with the ``gate``, and then ``layers``, its own.

    ``fast`` and ``around_refusals`` are those of :class:`RouterApp`.
    """
    service, apart = state.service, config.admin_listen is not None
    if state.batches is not None:
        state.batches.install(app, gate, keys.clients)
    page = page_of(state, keys, config.public_name, shutdown, apart)
    app.middleware_stack = RouterApp(
        with_metrics(layers, service.fleet, state.traces.exemplars), fast, gate, keys.clients, service.program_called,
        config.max_request_bytes, around_refusals, shutdown, config.access_log, pooling, keys.access, apart,
        state.traces.own, config.client_traces, page,
    )  # fmt: skip
    page.history.begin()


# Maximum characters of a path that are logged; a longer one is logged as its beginning and a digest.
LONGEST_PATH = 512
WORDS = "%(method)s %(path)s %(status)d in %(seconds).3f s from %(client)s"
WITH_MODEL = ", model %(model)s"
WITH_TOKENS = ", %(prompt_tokens)d + %(output_tokens)d tokens"


@contextmanager
def access_logged(scope: Scope, send: Send) -> Generator[Send]:
    """Yield the function to send the answer with; at the end of the context, log the request.

    ``status`` is 0 if no answer began, for example because the client left; ``seconds`` is the time from the request's
    head to the answer's end. ``request_id`` is the header ``x-request-id``, or the answer's id without that header.
    ``model`` is the model that the body names. Tokens are those of all sequences that the request has started, as far
    as the client has them. Query strings, other headers and the rest of bodies are not logged.
    """
    began = time.monotonic()
    path = kept_name(scope["path"], LONGEST_PATH)
    found: dict[str, Any] = {"method": scope["method"], "path": path, "status": 0, "seconds": 0.0}
    found["client"] = (scope.get("client") or ("",))[0]

    async def noted(message: Message) -> None:
        if message["type"] == "http.response.start":
            found["status"] = message["status"]
        await send(message)

    try:
        yield noted
    finally:
        found["seconds"] = round(time.monotonic() - began, 4)
        context: RequestContext | None = scope.get(CONTEXT)
        if context is not None and context.asked.model:
            found["model"] = kept_name(context.asked.model)
        if context is not None and (sequences := context.sequences):
            found["prompt_tokens"] = sum(each.request.num_tokens for each in sequences)
            found["output_tokens"] = sum(len(each.tokens) for each in sequences)
            found[REQUEST_ID] = request_id() or kept_name(sequences[0].request.seq_id)
        words = WORDS + (WITH_MODEL if "model" in found else "") + (WITH_TOKENS if "output_tokens" in found else "")
        access_logger.info(words, found, extra={FIELDS: found})


# Maximum characters of a client's id in its answer, where each token repeats it.
LONGEST_IN_ANSWERS = 8192
_HEADER = REQUEST_ID_HEADER.encode()


@contextmanager
def followed_request(context: RequestContext, scope: Scope, traces: RequestTraces) -> Generator[FollowedRequest | None]:
    """Name the request in log lines while entered, and record it in ``traces`` if engines generate for it.

    Such a request gets an id if its client gave none, and a shorter one if it is too long for answers; vLLM and engines
    then see the id as if the client had sent it.
    """
    given = context.headers.get(REQUEST_ID_HEADER, "")
    if context.path not in GENERATING or scope["method"] != "POST":
        with lines_of_request(given), working_in(span_context_of(context.headers)):
            yield None
        return
    named = _in_answers(given) if given else secrets.token_hex(16)
    if named != given:
        _set_request_id(context, scope, named)
    with lines_of_request(given or named):
        caller = span_context_of(context.headers)
        place = entered(caller, f"POST {context.path}", request_attributes(context.path, "", request_id()))
        with working_in(place), traces.following(context, request_id(), caller, place) as followed:
            followed.is_id_made = not given
            yield followed


def take_id_of_body(followed: FollowedRequest, scope: Scope) -> None:
    """Use the id that a client without the header wrote into the body; the layer behind prefers the header.

    An id that cannot be a header stays in the body only; log lines then keep the id that the router made.
    """
    # The body is read after the request has got an id by its header, or one that was made.
    named = (followed.context.fields or {}).get("request_id")
    if not followed.is_id_made or not isinstance(named, str):
        return
    in_answers = _in_answers(named)
    if in_answers.isascii() and in_answers.isprintable():
        _set_request_id(followed.context, scope, in_answers)
        followed.request_id = request_renamed(named)
    else:
        context = followed.context
        context.headers = {name: value for name, value in context.headers.items() if name != REQUEST_ID_HEADER}
        scope["headers"] = [each for each in scope["headers"] if each[0] != _HEADER]


def _in_answers(named: str) -> str:
    return named if len(named) <= LONGEST_IN_ANSWERS else kept_name(named, LONGEST_IN_ANSWERS)


def _set_request_id(context: RequestContext, scope: Scope, named: str) -> None:
    context.headers = {**context.headers, REQUEST_ID_HEADER: named}
    scope["headers"] = [*(each for each in scope["headers"] if each[0] != _HEADER), (_HEADER, named.encode())]
