"""The verbs over HTTP: the routes of every engine and store, whatever its verbs run on.

A server's application has a :class:`VerbServer` as ``app.state.tercet_verbs``; :data:`ROUTES` are its routes. A call
that fails is answered with its error, and one whose client has left ends where it waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tercet.logs import lines_of_call, logged_call
from tercet.protocol import (
    DeadlineExceeded,
    EngineStatus,
    Output,
    OutputStream,
    Sent,
    SequenceReport,
    TercetError,
    UnknownSequence,
)
from tercet.protocol.headers import INCARNATION_HEADER
from tercet.protocol.spans import LeaseReport
from tercet.protocol.wire import (
    API_PREFIX,
    AbortCall,
    ConnectCall,
    MoveCall,
    PrepRecvAnswer,
    PrepRecvCall,
    ReleaseAnswer,
    ReleaseCall,
    RemoteSendCall,
    SequenceCall,
    StartGenerateCall,
    require_incarnation,
)
from tercet.wire.callers import Callers, ShownHeaders, require_own_call
from tercet.wire.serving.http_server import call_in, error_response, json_response, unless_disconnected
from tercet.wire.streams import RouterConnection, RouterConnections

# Seconds for which a caller may leave an event unread, with all buffers full; then its sequence is ended.
UNREAD_SECONDS = 60.0
# Prompts of a million tokens are a few megabytes of JSON.
LONGEST_BODY = 64 * 1024 * 1024


class VerbCalls(Protocol):
    """The verbs of one engine or store: :class:`tercet.engine.verbs.EdgeVerbs`, or those of a simulated engine."""

    @property
    def incarnation(self) -> str: ...
    def model_of(self, call: SequenceCall, /) -> str: ...  # for the log
    def prep_recv(self, call: PrepRecvCall, /) -> Awaitable[PrepRecvAnswer]: ...
    def remote_send(self, call: RemoteSendCall, /) -> Coroutine[Any, Any, Sent]: ...
    def start_generate(self, call: StartGenerateCall, /) -> OutputStream | AsyncGenerator[Output, None]: ...

    # It returns once the engine has the sequence, whose outputs go to the router of ``link``, where it has ``number``.
    def stream(self, call: StartGenerateCall, link: RouterConnection, number: int, /) -> Awaitable[None]: ...
    def abort(self, seq_id: str, /) -> Awaitable[bool]: ...
    def release(self, lease: str, /) -> Awaitable[int]: ...
    def status(self) -> Awaitable[EngineStatus]: ...
    def sequences(self) -> Awaitable[Sequence[SequenceReport]]: ...
    def leases(self, seq_id: str, /) -> Sequence[LeaseReport]: ...
    def propose_move(self, seq_id: str, call: MoveCall, /) -> None: ...


@dataclass(frozen=True)
class VerbServer:
    """What an application serves under ``/tercet/v1``, and to whom."""

    verbs: VerbCalls
    connections: RouterConnections
    callers: Callers
    asks_for_a_key: str  # the refusal of a caller who shows none
    taker: str = "this engine"  # in refusals of larger bodies
    longest_body: int = LONGEST_BODY  # bytes

    def admit(self, http: Request) -> None:
        """Raise ``Unauthorized`` for a caller outside the fleet, ``Conflict`` for a call to an earlier incarnation."""
        # Without a secret a page in a browser could call this server in the name of its user.
        if not self.callers:
            require_own_call(ShownHeaders.of_asgi(http.scope["headers"]), http.client and http.client.host)
        path, shown = http.scope["path"].partition(API_PREFIX)[2], http.headers.getlist("authorization")
        http.state.tercet_digest = self.callers.require(shown, http.method, path, self.asks_for_a_key)
        require_incarnation(http.headers.get(INCARNATION_HEADER), self.verbs.incarnation)


class VerbRoute(NamedTuple):
    """One route; ``call`` is the type of its body, None without one."""

    method: str
    path: str
    answer: Callable[[Request], Awaitable[Response]]
    call: type[Any] | None


Handler = Callable[[VerbServer, Request, Any], Awaitable[Any]]


def verb_route(
    routes: list[VerbRoute], method: str, path: str, call: type[Any] | None = None
) -> Callable[[Handler], None]:
    """Add a route to ``routes``: its handler gets the server, an admitted request and its call.

    The value is answered as JSON, a ``Response`` as it is. Log lines meanwhile have the id of the call.
    """

    def add(handler: Handler) -> None:
        async def answer(http: Request) -> Response:
            server: VerbServer = http.app.state.tercet_verbs
            try:
                server.admit(http)
                read = None if call is None else await call_in(http, call, server.longest_body, server.taker)
                with lines_of_call(http.headers):
                    found = await handler(server, http, read)
            except TercetError as error:
                return error_response(error, server.callers)
            except ClientDisconnect:
                return Response(status_code=400)
            return found if isinstance(found, Response) else json_response(found)

        answer.__name__, answer.__doc__ = handler.__name__, handler.__doc__
        routes.append(VerbRoute(method, path, answer, call))

    return add


ROUTES = list[VerbRoute]()


def starlette_routes(routes: Sequence[VerbRoute]) -> list[Route]:
    """Return the routes of a Starlette application."""
    return [Route(API_PREFIX + each.path, each.answer, methods=[each.method]) for each in routes]


@verb_route(ROUTES, "POST", "/prep_recv", PrepRecvCall)
async def _prep_recv(server: VerbServer, http: Request, call: PrepRecvCall) -> Any:
    """Match `prompt[:end]` in the prefix cache and reserve blocks for the rest, under a lease."""
    with logged_call("prep_recv", call, http.headers, server.verbs.model_of(call)):
        return await server.verbs.prep_recv(call)


@verb_route(ROUTES, "POST", "/remote_send", RemoteSendCall)
async def _remote_send(server: VerbServer, http: Request, call: RemoteSendCall) -> Any:
    """Get the KV of `prompt[begin:end)` and push it into a reservation; optionally sample the first token."""
    with logged_call("remote_send", call, http.headers, server.verbs.model_of(call)):
        return await unless_disconnected(http, server.verbs.remote_send(call))


@verb_route(ROUTES, "POST", "/start_generate", StartGenerateCall)
async def _start_generate(server: VerbServer, http: Request, call: StartGenerateCall) -> Any:
    """Prefill `prompt[begin:]` and decode; server-sent events, one answer (`stream: false`), or a `router`'s stream."""
    if call.router is not None:
        link = await server.connections.connect(call.router.address, call.router.key)
        await server.verbs.stream(call, link, call.router.number)
        return {"accepted": True}
    outputs = server.verbs.start_generate(call)
    return await (event_stream(http, outputs) if call.stream else unless_disconnected(http, together(outputs)))


@verb_route(ROUTES, "POST", "/connect", ConnectCall)
async def _connect(server: VerbServer, http: Request, call: ConnectCall) -> Any:
    """Connect to a router. The engine then sends token streams and load reports to that router."""
    await server.connections.connect(call.router.address, call.router.key)
    return {"connected": True}


@verb_route(ROUTES, "POST", "/abort", AbortCall)
async def _abort(server: VerbServer, http: Request, call: AbortCall) -> Any:
    """End all work of this engine for a sequence; unknown ids are ignored."""
    return {"aborted": await server.verbs.abort(call.seq_id)}


@verb_route(ROUTES, "POST", "/release", ReleaseCall)
async def _release(server: VerbServer, http: Request, call: ReleaseCall) -> Any:
    """End a lease; KV that arrived under it stays in the prefix cache."""
    return ReleaseAnswer(valid_end=await server.verbs.release(call.lease))


@verb_route(ROUTES, "GET", "/status")
async def _status(server: VerbServer, http: Request, call: None) -> Any:
    """Report this engine's load, and its leases and sends."""
    return await server.verbs.status()


@verb_route(ROUTES, "GET", "/sequences")
async def _sequences(server: VerbServer, http: Request, call: None) -> Any:
    """List the sequences that this engine generates now: id, tokens, blocks, whether it runs, age, and router."""
    return await server.verbs.sequences()


@verb_route(ROUTES, "GET", "/leases/{seq_id:path}")
async def _leases(server: VerbServer, http: Request, call: None) -> Any:
    """Tell the lives of a sequence's latest leases: seconds, ledger, state and cause of each step."""
    return server.verbs.leases(http.path_params["seq_id"])


@verb_route(ROUTES, "POST", "/sequences/{seq_id:path}/move", MoveCall)
async def _propose_move(server: VerbServer, http: Request, call: MoveCall) -> Any:
    """Pass a proposal to move a sequence on to the router that runs the sequence."""
    server.verbs.propose_move(http.path_params["seq_id"], call)
    return json_response({"accepted": True}, 202)


# ---- outputs ---------------------------------------------------------------------------------------------------------


class EventStream(StreamingResponse):
    """Values as server-sent events, then ``end``; ``rest`` is closed on every way out.

    An error after the first value is the last event. A caller that reads nothing for :data:`UNREAD_SECONDS` gets one.
    """

    def __init__(self, first: Any, rest: OutputStream | AsyncGenerator[Any, None], end: bytes = b"") -> None:
        super().__init__(self._events(first), media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._rest, self._end = rest, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            await super().__call__(scope, receive, send)

    async def _events(self, value: Any) -> AsyncGenerator[bytes]:
        loop, closing = asyncio.get_running_loop(), list[asyncio.Future[None]]()

        def give_up() -> None:  # while the caller has the event, ``rest`` does not run
            closing.append(asyncio.ensure_future(self._rest.aclose()))

        try:
            while value is not None:
                unread = loop.call_later(UNREAD_SECONDS, give_up)
                try:
                    yield _event(value)
                finally:
                    unread.cancel()
                if closing:
                    await closing[0]
                    raise DeadlineExceeded(f"the caller read nothing for {UNREAD_SECONDS:.0f} s")
                value = await anext(self._rest, None)
        except TercetError as error:
            yield _event(error.to_wire())
        if self._end:
            yield self._end


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def event_stream(
    http: Request, values: OutputStream | AsyncGenerator[Any, None], end: bytes = b""
) -> EventStream:  # fmt: skip
    """Return an answer with values as server-sent events, then ``end``.

    The first value is awaited before the status line is sent, so that invalid input is still answered with a 4xx.
    """
    try:
        return EventStream(await unless_disconnected(http, anext(values)), values, end)
    except BaseException:
        await values.aclose()
        raise


async def together(outputs: OutputStream | AsyncGenerator[Output, None]) -> Output:
    """Collect all outputs into one. Raises ``UnknownSequence`` if the sequence was aborted before its first token."""
    async with aclosing(outputs):
        found = [output async for output in outputs]
    tokens = tuple(token for output in found for token in output.token_ids)
    if not tokens:
        raise UnknownSequence("the sequence was aborted before its first token", "seq_id")
    return Output(
        token_ids=tokens,
        finish_reason=found[-1].finish_reason,
        stop_reason=found[-1].stop_reason,
        logprobs=tuple(at for output in found for at in output.logprobs or ())
        if any(output.logprobs is not None for output in found)
        else None,
        prompt_logprobs=found[0].prompt_logprobs,
        usage=found[0].usage,
    )
