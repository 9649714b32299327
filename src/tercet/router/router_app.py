"""The router's ASGI application: what every request passes, once, before it is served.

Its key, its size, the program that it names, and a place if the fleet has room for it. Then a stream takes the
fast path; Tercet's routes and all others are in vLLM's application.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tercet.decisions.sessions import closes_session, session_in_body
from tercet.fleet.admission import ClientLeft, Gate
from tercet.fleet.bodies_held import LARGEST_AT_ONCE, BodiesHeld, HeldBody
from tercet.fleet.long_bodies import LongBodies, is_long
from tercet.fleet.portions import Portions
from tercet.protocol import EngineUnreachable, RouterFailed, TercetError, UnknownPath
from tercet.protocol.bearer import BearerKeys
from tercet.protocol.error_forms import error_body
from tercet.protocol.headers import PROGRAM_HEADER, SESSION_FINAL_HEADER
from tercet.protocol.json_text import in_utf8, read_json
from tercet.protocol.openai_routes import GENERATING
from tercet.protocol.wire import API_PREFIX
from tercet.router.access_log import access_logged
from tercet.router.admin_access import AT_ADMIN, AdminAccess, is_admin_path, path_of
from tercet.router.body_items import require_few_items, require_readable, require_small_structures
from tercet.router.followed_requests import followed_request, take_id_of_body
from tercet.router.pooling import PooledAnswer, PoolingServers, close_result
from tercet.router.request_traces import FollowedRequest, RequestTraces
from tercet.router.sequence_count import require_few_sequences
from tercet.router.shutdown import Shutdown
from tercet.wire.serving.client_connection import CONNECTION
from tercet.wire.serving.error_answers import ErrorSend, error_headers, fault_of
from tercet.wire.serving.request_body import read_whole
from tercet.wire.serving.request_context import (
    CONTEXT,
    NOTHING,
    Asked,
    RequestContext,
    serving,
)
from tercet.wire.serving.tool_calls import ToolCallsSend
from tercet.wire.serving.trace_answers import TracingSend, wants_trace

if TYPE_CHECKING:
    from tercet.vllm_plugin.fast_path.entry import FastPath

logger = logging.getLogger("tercet.router")
# Where refusals are on their way through the layers around them.
ERROR = "tercet.error"
# The same, of answers of pooling servers.
ANSWER = "tercet.answer"
# As on a vLLM server, for probes and for those who scrape metrics; they tell nothing of what clients send.
LIVE = "/live"
READY = frozenset({"/health", "/ping"})
OPEN = READY | {LIVE, "/load", "/version", "/metrics", "/metrics/"}
# Of websockets: the server refuses what it was asked for.
POLICY_VIOLATION = 1008
WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class RouterApp:
    """Refuses what may not come in, and has the rest served: by ``fast`` or by ``app``.

    Refusals have the form of the API that is asked.

    ``check_program`` raises for names of no program; ``around_refusals`` adds what refusals, and answers
    of pooling servers, need to reach a browser.
    ``shutdown`` counts every request, and refuses all once it has begun; without one this router does not stop.
    ``access_log``: have each request logged. ``pooling`` takes requests for embeddings and their like, if there is any.
    ``keys`` are those of clients, ``admins`` says who may call the router's own routes. ``admin_apart``: these are
    served at a separate address, and nowhere else. ``traces`` get what happens to requests for engines.
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
        self._long = LongBodies(gate.limits, gate.count_refusal)
        self._access_log = access_log
        self._pooling = pooling
        self._traces = traces or RequestTraces(0)
        self._refusals = around_refusals(_refused)
        self._answers = around_refusals(_passed_on)

    @property
    def bytes_kept(self) -> int:
        """Of bodies of clients that have not come in yet."""
        return self._bodies.size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "websocket":
            await self._open(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = scope[CONTEXT] = context_of(scope)
        with followed_request(context, scope, self._traces) as followed, ExitStack() as around:
            if self._access_log:
                send = around.enter_context(access_logged(scope, send))
            await self._pass(context, followed, scope, receive, send)

    async def _pass(
        self, context: RequestContext, followed: FollowedRequest | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if (elsewhere := self._served_elsewhere(context.path, scope)) is not None:
            await self._refusals({**scope, ERROR: elsewhere}, receive, send)
            return
        if scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        if context.path == LIVE:
            await _answer(send, 200, b"")
            return
        pooled: PooledAnswer | None = None
        async with AsyncExitStack() as held:
            held.callback(context.prepared)
            try:
                if self._is_counted(context, scope):
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
                            context.prepared()  # it may wait for long
                            place = self._gate.place(context.asked.priority, body.left, for_engines=for_engines)
                            async with kept.until_let_go():
                                await held.enter_async_context(place)
                            if followed is not None:
                                followed.admitted()
                        if context.preparation is not None and pooling is None:
                            await self._take_turn(context, scope, body, kept)
                if body is not None and pooling is not None:
                    context.prepared()
                    pooled = await self._pooled(pooling, context, body, scope)
                    held.callback(pooled.close)
            except TercetError as error:
                context.failed = error
                await self._refusals({**scope, ERROR: error}, receive, send)
            except ClientLeft:
                context.client_left = True
            else:
                if pooled is not None:
                    await self._answers({**scope, ANSWER: pooled}, receive, send)
                    return
                await self._serve(context, scope, _nothing_from(receive) if body is None else body.receive, send)

    def _served_elsewhere(self, path: str, scope: Scope) -> UnknownPath | None:
        """Why there is nothing at this path of this address, if another address has it."""
        at_admin = scope.get(AT_ADMIN, False)
        if is_admin_path(path):
            wrong = self._admin_apart and not at_admin
            return UnknownPath(f"{path} is not served here, but at the router's --admin-listen") if wrong else None
        wrong = at_admin and path not in OPEN
        return UnknownPath(f"{path} is for clients, and not served at the admin address") if wrong else None

    def _divide(self, context: RequestContext) -> None:
        """Its sequences come in by portions. Raises :class:`~tercet.protocol.BadRequest` if there are too many."""
        limits = self._gate.limits
        require_few_sequences(context.path, context.fields, limits.sequences)
        spares = None if self._gate.is_open else self._gate
        context.most_sequences = limits.sequences
        context.portions = Portions(limits.at_once, spares, context.asked.priority)

    async def _pooled(
        self, pooling: PoolingServers, context: RequestContext, body: ReceivedBody, scope: Scope
    ) -> PooledAnswer:
        """Raises :class:`ClientLeft` if the client has left."""
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
            self._require_key(scope)
        context.wants_trace = wants_trace(context.headers)
        if PROGRAM_HEADER in context.headers:
            self._check_program(context.headers[PROGRAM_HEADER])
        if scope["method"] not in WITH_BODY or context.path in OPEN:
            return None  # nothing is kept for a caller without a key
        body = await receive_body(context, receive, self._max_bytes, kept)
        if not body.content or not is_json(context):
            return body
        try:
            if is_long(body.content):
                await self._take_turn(context, scope, body, kept)
            await read_body(context, body, self._gate.limits.items)
        except BaseException:
            body.close()
            raise
        return body

    async def _take_turn(self, context: RequestContext, scope: Scope, body: ReceivedBody, kept: HeldBody) -> None:
        """Return when a long body may be worked on: no other of its client is, and no other at this moment."""
        if context.preparation is None or context.preparation.has_ended:
            async with kept.until_let_go():
                context.preparation = await self._long.turn(self._client_of(scope), body.left)
        await self._long.alone()

    def _client_of(self, scope: Scope) -> str:
        """The key that a client has shown; its address where none is asked for."""
        if self._keys:
            shown = "".join(value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization")
            return shown.partition(" ")[2]  # the scheme may be written in any case
        return (scope.get("client") or ("",))[0]

    def _require_key(self, scope: Scope) -> None:
        refusal = "this router asks for its API key: Authorization: Bearer KEY"
        shown = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
        self._keys.require(shown, refusal)

    async def _open(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have a websocket served; without a key it is closed before it opens."""
        try:
            self._require_key(scope)
        except TercetError:
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
            return
        await self._app(scope, receive, send)

    def _is_counted(self, context: RequestContext, scope: Scope) -> bool:
        """Whether it is a request that is finished before this process ends, and not a look at how it does."""
        return context.path not in OPEN and not (context.path.startswith(API_PREFIX) and scope["method"] == "GET")

    def _require_ready(self) -> None:
        self._shutdown.require_serving()
        self._gate.require_engines()

    async def _serve(self, context: RequestContext, scope: Scope, receive: Receive, send: Send) -> None:
        with serving(context):
            if self._fast is not None and await self._fast.serve(context, scope, send):
                return
            if context.fields and context.fields.get("tools"):
                send = ToolCallsSend(send, context)
            context.fields = None  # vLLM reads the body by itself
            if context.wants_trace:
                send = TracingSend(send, context.traces)
            answer = ErrorSend(send, context)
            try:
                await self._app(scope, receive, answer)
            except Exception as error:
                if answer.ended:  # vLLM's layers have answered, and say afterwards by what they were called
                    raise
                failed = context.failed or fault_of(error)
                if isinstance(failed, RouterFailed):
                    logger.exception("a request for %s failed", context.path)
                await answer.fail(failed)


def context_of(scope: Scope) -> RequestContext:
    """What is known of a request before its body."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    return RequestContext(path_of(scope), headers, connection=scope.get(CONNECTION))


def _target(scope: Scope, path: str) -> bytes:
    """What is asked for as the client wrote it, with its query; without what a proxy before this router adds."""
    written: bytes = scope.get("raw_path") or quote(path).encode()
    query: bytes = scope["query_string"]
    return written.removeprefix(scope.get("root_path", "").encode()) + (b"?" + query if query else b"")


# ---- bodies --------------------------------------------------------------------------------------------------


class ReceivedBody:
    """A body that was read whole, for the application to receive again."""

    def __init__(self, content: bytes, receive: Receive) -> None:
        self.content = content
        self._content: bytes | None = content
        self._receive = receive
        self._next: asyncio.Future[Message] | None = None

    def replace(self, content: bytes) -> None:
        """Have the application receive this in its place."""
        self.content = self._content = content

    async def receive(self) -> Message:
        """ASGI's ``receive``: the body, then whatever comes."""
        if self._content is not None:
            content, self._content = self._content, None  # vLLM has its own copy from now on
            return {"type": "http.request", "body": content, "more_body": False}
        return await (self._receive() if self._next is None else asyncio.shield(self._next))

    def left(self) -> asyncio.Future[Message]:
        """Done once the client has closed its connection."""
        self._next = self._next or asyncio.ensure_future(self._receive())
        return self._next

    def close(self) -> None:
        """Stop waiting for the client."""
        if self._next is not None:
            self._next.cancel()


def _nothing_from(receive: Receive) -> Receive:
    """ASGI's ``receive`` of a request whose body is not read: empty, then each message that is not part of a body."""
    began = False

    async def received() -> Message:
        nonlocal began
        if not began:
            began = True
            return {"type": "http.request", "body": b"", "more_body": False}
        while (message := await receive())["type"] == "http.request":
            pass
        return message

    return received


def _again(first: Message, receive: Receive) -> Receive:
    """ASGI's ``receive`` with a message that was received already."""
    left = [first]

    async def received() -> Message:
        return left.pop() if left else await receive()

    return received


async def receive_body(context: RequestContext, receive: Receive, limit: int, kept: HeldBody) -> ReceivedBody:
    """The body; ``kept`` counts its bytes.

    Raises :class:`~tercet.protocol.RequestTooLarge`, :class:`~tercet.protocol.Saturated` if all bodies together are too
    large, and :class:`ClientLeft` if that happens before its end.
    """
    announced = context.headers.get("content-length", "")
    taker = "this router (--max-request-bytes)"
    first = await receive()
    if first["type"] == "http.request" and first.get("more_body", False):
        async with kept.until_let_go():
            content = await read_whole(_again(first, receive), announced, limit, taker, kept.add)
    else:  # as most are
        content = await read_whole(_again(first, receive), announced, limit, taker, kept.add)
    if content is None:
        raise ClientLeft
    return ReceivedBody(content, receive)


async def read_body(context: RequestContext, body: ReceivedBody, most_items: int) -> None:
    """Read what ``context`` goes by in a body of JSON, which is in UTF-8 afterwards, whatever encoding it came in.

    Raises :class:`~tercet.protocol.BadRequest` for content that is not valid JSON, and for JSON that takes too long.
    """
    content = in_utf8(body.content)
    if content is not body.content:
        body.replace(content)
    require_readable(content)
    found = read_json(content)
    if isinstance(found, (dict, list)):
        await require_few_items(context.path, content, found, most_items)
    if isinstance(found, dict):
        context.fields = cast("dict[str, Any]", found)
        await require_small_structures(content, context.fields)
        context.asked = asked_by(context.fields)
        if closes_session(context.fields):
            context.headers = {**context.headers, SESSION_FINAL_HEADER: "true"}


def is_json(context: RequestContext) -> bool:
    """Whether the router reads a body: Tercet's routes read theirs themselves, and vLLM takes JSON alone.

    One that is compressed goes to pooling servers as it is, and vLLM refuses it.
    """
    if context.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        return False
    kind = context.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    return not context.path.startswith(API_PREFIX) and (kind == "application/json" or kind.endswith("+json"))


def asked_by(fields: dict[str, Any]) -> Asked:
    """What a body asks for; nothing by a field of another type, which vLLM refuses, or does not read."""
    found: dict[str, Any] = {}
    if (session := session_in_body(fields)) is not None:
        found["session_name"] = session
    for name, kind in _ASKED:
        if name in fields:
            with suppress(msgspec.ValidationError):
                found[name] = msgspec.convert(fields[name], kind, strict=False)
    return Asked(**found) if found else NOTHING


_ASKED = tuple((field.name, field.type) for field in msgspec.structs.fields(Asked) if field.name != "session_name")


# ---- refusals ------------------------------------------------------------------------------------------------


async def _refused(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error, in the form of the API that is asked."""
    error: TercetError = scope[ERROR]
    await _answer(send, error.status, error_body(path_of(scope), error), error_headers(error))


async def _answer(send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    length = b"content-length", str(len(body)).encode()
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def _passed_on(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer as a server did; without an end if it broke off, at which the connection to the client is closed."""
    answer: PooledAnswer = scope[ANSWER]
    await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
    try:
        async for part in answer.parts():
            await send({"type": "http.response.body", "body": part, "more_body": True})
    except EngineUnreachable as error:
        logger.warning("%s", error.message)
        return
    await send({"type": "http.response.body", "body": b""})
