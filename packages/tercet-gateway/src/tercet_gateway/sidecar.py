"""``tercet sidecar``: a proxy to the decode engine and back, and its assembly.

Streams arrive unchanged, and end with an error if they are cut off.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from ssl import SSLContext
from typing import Any, cast

import aiohttp
from prometheus_client.exposition import generate_latest

from tercet.aio.files import descriptors_watched
from tercet.aio.tasks import signals_to
from tercet.fleet.members import CallsInFlight, UntilLost
from tercet.logs import lines_of_request, log_to_stderr, request_renamed
from tercet.protocol import (
    BadRequest,
    EngineError,
    EngineUnreachable,
    Revision,
    ShuttingDown,
    TercetError,
    Unauthorized,
    UnknownPath,
)
from tercet.protocol.access import secrets_of
from tercet.protocol.headers import (
    CONTROL_HEADERS,
    PREFILLER_HEADER,
    PROBES,
    REQUEST_ID_HEADER,
    TRACE_HEADER,
    is_for_clients,
)
from tercet.protocol.json_text import in_utf8, read_json
from tercet.protocol.names import AllowedPrefillers, kept_name
from tercet.protocol.request_checks import forms_of, labelled
from tercet.protocol.spans import TRACEPARENT, TRACESTATE, VerbTrace, span_context_of, span_of, working_in
from tercet.protocol.sse import EventSplitter, data_of, fault_in, object_of
from tercet.protocol.wire import API_PREFIX, JSON
from tercet.router.request_bodies import HeldBody
from tercet.wire.callers import (
    CHALLENGE_HEADER,
    BearerKeys,
    Callers,
    Prover,
    ShownHeaders,
    require_digest,
    require_own_call,
)
from tercet.wire.client import HttpEngine, engine_tls, remote_prefill
from tercet.wire.client.bounded_answers import reason_of
from tercet.wire.client.http_engine import KEEPALIVE_SECONDS
from tercet.wire.client.passing import (
    Fields,
    NotReadable,
    OriginAnswer,
    end_to_end,
    passed_on,
    passing_session,
    request,
    values,
)
from tercet.wire.client.remote_prefill import PrefillAttempts, RemotePrefill
from tercet.wire.exported_spans import exporting_spans
from tercet.wire.serving.answers import trace_refused, wants_trace
from tercet.wire.serving.server_access import is_loopback
from tercet_gateway.gateway_settings import SidecarConfig
from tercet_gateway.prefill_connectors import (
    KV_PARAMS,
    SPLIT_PATHS,
    DecodeRequest,
    NixlPrefill,
    PrefillConnector,
    SplitCall,
    TercetPrefill,
)
from tercet_gateway.proxied_calls import (
    ClientCall,
    HttpServer,
    ProxiedAnswer,
    RequestBodies,
    certificate_of,
    ended_later,
    is_stream,
    serving,
)

# The events of a response before the engine has computed anything.
_BEFORE = ("response.created", "response.queued", "response.in_progress")
logger = logging.getLogger("tercet.gateway")
# The client's headers for this sidecar, which are not passed on to the engine.
OURS = frozenset(name.encode() for name in (*CONTROL_HEADERS, TRACE_HEADER))
# The client's headers that an engine needs in requests which the sidecar sends for the client.
SHOWN = ("authorization", "x-request-id", "traceparent", "tracestate")
ASK_SECONDS = 10.0
UNASKED_BYTES = 64 * 1024
"""Largest body, in bytes, that is buffered without asking the engine whether it accepts the request's key."""
LONGEST_ID = 64
"""Most characters of a client's request id with which ids on engines begin."""


def _verb_of(http: ClientCall) -> str:
    """Return the path relative to the verbs' prefix."""
    return http.path.partition(API_PREFIX)[2]


class Proxy:
    """The proxy for requests to one engine; ``connector`` sends it KV from ``allowed`` engines that requests name."""

    def __init__(
        self,
        config: SidecarConfig,
        session: aiohttp.ClientSession,
        connector: PrefillConnector,
        allowed: AllowedPrefillers,
        verbs_are_open: bool,
    ) -> None:
        self._under_way = CallsInFlight()
        self._session = session
        self._engine = config.engine
        self._connector = connector
        self._allowed = allowed
        self._callers = Callers(secrets_of(config.secret))
        self._secrets = BearerKeys(secrets_of(config.secret))
        self._client_traces = config.client_traces
        self._prover = Prover(config.secret)
        self._verbs_are_open = verbs_are_open
        self._refuses_params = config.connector == "nixl"
        self._bodies = RequestBodies(config.max_request_bytes)
        self._stuck_s = config.stuck_after_s
        self._idle_s = config.idle_timeout_s

    async def handle(self, http: ClientCall) -> None:
        """Answer as the engine does, or with an error in OpenAI's form."""
        given = {name: http.header(name) or "" for name in (REQUEST_ID_HEADER, TRACEPARENT, TRACESTATE)}
        answer = ProxiedAnswer(http)
        with lines_of_request(given[REQUEST_ID_HEADER]), working_in(span_context_of(given)):
            try:
                async with UntilLost(self._under_way):
                    await self._serve(http, answer)
            except TercetError as error:
                asks: Fields = ()
                if isinstance(error, Unauthorized) and http.path.startswith(API_PREFIX):
                    asks = [(CHALLENGE_HEADER.encode(), self._callers.challenge().encode())]
                await answer.fail(error, asks)

    def give_up(self, error: TercetError) -> None:
        """End running requests with ``error``."""
        self._under_way.lose(error)

    async def _serve(self, http: ClientCall, answer: ProxiedAnswer) -> None:
        digest = self._require_caller(http)
        with self._bodies.one() as body:
            if digest is not None:
                await self._read(http, body, is_known=True)
                require_digest(body.content, digest)
                await self._forward(http, answer, body, digest=digest)
                return
            form = ""
            if http.has_body and is_for_clients(http.path):  # bodies for other routes pass as they are
                form, http.fields, _ = labelled(http.fields, forms_of(http.path))
            if http.method == "POST" and http.path in SPLIT_PATHS:
                await self._split(http, answer, body)
            elif self._refuses_params and form == JSON:
                await self._read(http, body)
                self._fields(body.content)
                await self._forward(http, answer, body)
            else:
                await self._forward(http, answer, http.parts() if http.has_body else None)

    def _require_caller(self, http: ClientCall) -> str | None:
        """Raise :class:`~tercet.protocol.Unauthorized` for a verb whose caller is not a member of the fleet.

        Raise :class:`~tercet.protocol.UnknownPath` for another route that is not for clients, if other machines reach
        this sidecar: the engine may serve it on loopback only.

        Returns the digest of the body of a call that proved the secret without showing it; None for other requests. A
        loopback-only engine does not check keys, but the sidecar makes its verbs reachable from elsewhere, so it
        requires the fleet's secret.
        """
        if not http.path.startswith(API_PREFIX):
            if not self._verbs_are_open and not (is_for_clients(http.path) or http.path in PROBES):
                raise UnknownPath(
                    f"{http.path:.200} is not for clients, so a sidecar that other machines reach does not pass it on; "
                    "use the engine's own port"
                )
            return None
        if not self._callers and not self._verbs_are_open:
            raise BadRequest(f"{API_PREFIX}: this sidecar passes no verbs on without TERCET_SECRET; set it")
        refusal = "this sidecar requires its fleet's secret (TERCET_SECRET): Authorization: Bearer KEY"
        if not self._callers:
            require_own_call(ShownHeaders.of_asgi(http.fields), http.peer)
        shown = http.headers("authorization")
        return self._callers.require(shown, http.method, _verb_of(http), refusal)

    def _require_operator(self, http: ClientCall) -> None:
        """Raise :class:`~tercet.protocol.Forbidden` for a caller who may not see traces."""
        if self._client_traces or self._secrets.fits("".join(http.headers("authorization"))):
            return
        refused = trace_refused("send the fleet's secret in Authorization, or call a sidecar on 127.0.0.1 directly")
        if not self._verbs_are_open:  # an engine's pod may call a sidecar from loopback, too
            raise refused
        try:
            require_own_call(ShownHeaders.of_asgi(http.fields), http.peer)
        except TercetError as refusal:
            raise refused from refusal

    # ---- requests that may be split --------------------------------------------------------------------------

    async def _split(self, http: ClientCall, answer: ProxiedAnswer, body: HeldBody) -> None:
        await self._read(http, body)
        named = http.header(PREFILLER_HEADER)
        hosts = self._allowed.named(named) if named is not None and self._allowed else ()
        fields = self._fields(body.content) if hosts or self._refuses_params else {}
        if not hosts or not fields:
            await self._forward(http, answer, body)
            return
        traces = [VerbTrace()]
        if wants_trace({TRACE_HEADER: http.header(TRACE_HEADER) or "false"}):
            self._require_operator(http)
            answer.traces = traces
        request_id = kept_name(http.header(REQUEST_ID_HEADER) or "")
        if not request_id:  # the engine that decodes gets the same id
            request_id = request_renamed(uuid.uuid4().hex)
            http.fields = [*http.fields, (REQUEST_ID_HEADER.encode(), request_id.encode())]
        # Clients may choose equal ids: engines pin and free by ids, so these must be unique.
        seq_id = f"{kept_name(request_id, LONGEST_ID)}-{uuid.uuid4().hex}"
        shown = {name: value for name in SHOWN if (value := http.header(name)) is not None} | {"x-request-id": seq_id}
        call = SplitCall(http.path, body.content, fields, shown, request_id, seq_id)
        async with AsyncExitStack() as held:
            attributes = {"url.path": http.path, "tercet.seq_id": seq_id, "tercet.prefillers": [*hosts]}
            with span_of("prefill", attributes, "server") as span:
                shown |= {} if span is None else span.headers()
                prepared = await held.enter_async_context(self._connector.prefilled(call, hosts, traces[0]))
            await self._forward(http, answer, prepared, held)

    def _fields(self, body: bytes) -> Mapping[str, Any]:
        """Return the body's fields; empty for a body that is not an object, which the engine refuses.

        Raises :class:`~tercet.protocol.BadRequest` for unreadable bodies, and for fields that tell engines where to
        fetch KV: clients must not set them.
        """
        found = read_json(in_utf8(body))
        if not isinstance(found, dict):
            if self._refuses_params:
                raise BadRequest("the request's body is not a JSON object")
            return {}
        fields = cast("dict[str, Any]", found)
        if self._refuses_params and _has_params(fields):
            raise BadRequest(f"{KV_PARAMS}: tells engines where to fetch KV; clients must not set it", KV_PARAMS)
        return fields

    async def _read(self, http: ClientCall, body: HeldBody, is_known: bool = False) -> None:
        """Read the whole body; a long one only from a known client, or if the engine accepts the request's key."""
        length = self._bodies.announced(http)
        if not is_known and http.has_body and (length is None or length > UNASKED_BYTES):
            await self._require_key(http)
        await self._bodies.read(http, body)

    async def _require_key(self, http: ClientCall) -> None:
        """Raise :class:`~tercet.protocol.Unauthorized` if the engine does not accept the request's key."""
        shown = [(b"authorization", value.encode("latin-1")) for value in http.headers("authorization")]
        try:
            async with asyncio.timeout(ASK_SECONDS):
                response = await request(self._session, self._engine, "GET", b"/v1/models", shown, None)
                try:
                    while await response.part():
                        pass
                finally:
                    response.close()
        except NotReadable as error:
            raise EngineError(f"the engine's answer cannot be read: {error}") from error
        except OSError as error:
            raise EngineUnreachable(f"the engine does not answer: {reason_of(error)}") from error
        if response.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise Unauthorized("the engine does not accept the key of this request: Authorization: Bearer KEY")

    # ---- passing on ------------------------------------------------------------------------------------------

    async def _forward(
        self,
        http: ClientCall,
        answer: ProxiedAnswer,
        body: DecodeRequest | HeldBody | AsyncIterator[bytes] | None,
        held: AsyncExitStack | None = None,
        digest: str | None = None,
    ) -> None:
        """Send a request to the engine and pass its answer on; ``held`` is closed once the answer has begun.

        ``digest`` is the digest of the body of a call that was proved to this sidecar, which in turn proves it to the
        engine.
        """
        prepared = body if isinstance(body, DecodeRequest) else None
        buffered = body if isinstance(body, HeldBody) else None
        waiting, lost = _Waiting(), CallsInFlight()
        watching = asyncio.ensure_future(self._watch(waiting, lost))
        try:
            async with UntilLost(lost), AsyncExitStack() as stack:
                opening = b""
                if prepared is not None:
                    prepared.sent = True
                if prepared is None or prepared.local is None:
                    if buffered is not None:
                        async with buffered.until_let_go():
                            response = await self._asked(http, buffered.content, stack, digest=digest)
                        buffered.forget()
                    else:
                        asked, more = (body, {}) if prepared is None else (prepared.body, prepared.headers)
                        response = await self._asked(http, asked, stack, more)
                else:
                    opened = partial(self._opened, http, prepared, stack, waiting)
                    try:
                        response, opening = await prepared.while_there(opened)
                    except TercetError as error:  # the engine can compute all KV itself
                        prepared.failure = error
                        response = await self._asked(http, prepared.local, stack)
                await answer.begin(response)
                while chunk := opening or await _read(response, waiting):
                    opening = b""
                    if held is not None:
                        await held.aclose()
                        held = None
                    await answer.write(chunk)
                await answer.end()
        finally:
            watching.cancel()

    async def _opened(
        self, http: ClientCall, prepared: DecodeRequest, stack: AsyncExitStack, waiting: _Waiting
    ) -> tuple[OriginAnswer, bytes]:
        """Return the engine's answer with KV of another engine, and its part up to the first tokens."""
        response = await self._asked(http, prepared.body, stack)
        try:
            return response, await _opening(response, waiting)
        except BaseException:
            response.close()
            raise

    async def _asked(
        self, http: ClientCall, body: Any, stack: AsyncExitStack, more: Mapping[str, str] | None = None,
        digest: str | None = None,
    ) -> OriginAnswer:  # fmt: skip
        is_same = not isinstance(body, bytes)  # a buffered body is sent whole, even if it arrived in chunks
        drops = {*OURS, b"expect"} if not is_same or http.http_version == "1.0" else set(OURS)
        if digest is not None:
            drops.add(b"authorization")
        fields = passed_on(http.fields, drops) if is_same else end_to_end(http.fields, drops)
        fields += [(name.encode(), value.encode()) for name, value in (more or {}).items()]
        if not is_same:
            fields.append((b"Content-Length", str(len(body)).encode()))

        async def ask() -> OriginAnswer:
            proof = () if digest is None else self._proof(http, digest)
            return await request(self._session, self._engine, http.method, http.target, [*fields, *proof], body)

        try:
            response = await ask()
            if digest is not None and response.status == HTTPStatus.UNAUTHORIZED and self._is_met(response):
                response.close()
                response = await ask()
        except NotReadable as error:
            raise EngineError(f"the engine's answer cannot be read: {error}") from error
        except OSError as error:
            raise EngineUnreachable(f"the engine does not answer: {reason_of(error)}") from error
        stack.callback(response.close)
        return response

    def _proof(self, http: ClientCall, digest: str) -> Fields:
        """Return the proof for the engine of a call that was proved to this sidecar."""
        proved = self._prover.headers(http.method, _verb_of(http), digest)
        return [(name.encode(), value.encode("latin-1")) for name, value in proved.items()]

    def _is_met(self, response: OriginAnswer) -> bool:
        """True if the engine has sent a challenge that can be answered now."""
        asked = values(response.fields, CHALLENGE_HEADER.encode())
        return self._prover.meets([value.decode("latin-1") for value in asked])

    async def _watch(self, waiting: _Waiting, lost: CallsInFlight) -> None:
        """Poll the engine's status while it sends nothing; make the requests that wait for it fail once it is lost."""
        while True:
            await asyncio.sleep(self._stuck_s)
            silent = waiting.seconds
            if silent < self._stuck_s:
                continue
            try:
                if silent > self._idle_s:
                    raise EngineUnreachable(f"the engine has sent nothing for {silent:.0f} s")
                async with asyncio.timeout(self._stuck_s):
                    await self._connector.look()
            except TimeoutError:
                lost.lose(EngineUnreachable(f"the engine has sent nothing for {self._stuck_s:g} s"))
            except EngineUnreachable as error:
                lost.lose(error)
            except TercetError as error:  # an engine that answers is alive
                logger.debug("the engine answers: %s", error)


class _Waiting:
    """The time for which a request has been waiting for the engine."""

    def __init__(self) -> None:
        self.since: float | None = time.monotonic()

    @property
    def seconds(self) -> float:
        """Waiting time in seconds; 0 while the request waits for its client."""
        return 0.0 if self.since is None else time.monotonic() - self.since


async def _opening(response: OriginAnswer, waiting: _Waiting) -> bytes:
    """Return the answer of an engine that fetches KV, up to its first tokens; empty if it is not a stream.

    Raises :class:`~tercet.protocol.TercetError` if the engine could not fetch the KV, which it reports in an event of a
    stream.
    """
    if response.status >= 500:
        raise EngineError(f"the engine answers {response.status} with KV of another one")
    held, events = b"", EventSplitter()
    if response.status == 200 and is_stream(response):
        while chunk := await _read(response, waiting):
            held += chunk
            for event in events.split(chunk):
                if fault_in(event) is not None:
                    said = "the engine's answer with KV of another one ends in an error before its first token"
                    raise EngineError(said)
                if data_of(event) is not None and object_of(event).get("type") not in _BEFORE:
                    return held
    return held


async def _read(response: OriginAnswer, waiting: _Waiting) -> bytes:
    """Return the next part of the engine's answer; empty at the end.

    Raises :class:`~tercet.protocol.EngineUnreachable`.
    """
    waiting.since = time.monotonic()
    try:
        return await response.part()
    except (NotReadable, OSError) as error:
        raise EngineUnreachable(f"the engine was lost: {reason_of(error)}") from error
    finally:
        waiting.since = None


def _has_params(fields: Mapping[str, Any]) -> bool:
    """True if a body has the parameters anywhere: vLLM reads some from ``sampling_params`` or ``vllm_xargs``."""
    left: list[Mapping[str, Any]] = [fields]
    while left:
        for name, value in left.pop().items():
            if name == KV_PARAMS and value is not None:
                return True
            if isinstance(value, dict):
                left.append(cast("Mapping[str, Any]", value))
    return False


LAST_SECONDS = 30.0
"""Seconds for running requests after the stop signal; a second signal ends them."""
DRAIN_SECONDS = 10.0
"""Seconds to fetch KV for clients that have left."""
METRICS = "/sidecar/metrics"
CONNECT_SECONDS = 5.0
MOST_ANSWER_HEAD = 1024 * 1024
"""Largest head of the engine's answers, in bytes."""


def serve(config: SidecarConfig) -> None:
    """Run the sidecar until SIGINT or SIGTERM.

    After the first signal it finishes running requests; a second one ends it at once.
    """
    import uvloop

    log_to_stderr(config.log_level, config.log_format)
    with exporting_spans("tercet-sidecar"):
        uvloop.run(_serve(config))


async def _serve(config: SidecarConfig) -> None:
    stopped, hurried = asyncio.Event(), asyncio.Event()
    with signals_to(stopped.set, hurried.set):
        async with descriptors_watched(), sidecar(config) as server:
            logger.info("proxying %s on port %d", config.engine, server.port)
            await stopped.wait()
            await server.finish(LAST_SECONDS, hurried)


@dataclass
class SidecarServer:
    """A serving sidecar: its port, and its shutdown."""

    port: int
    _proxy: Proxy
    _server: HttpServer
    _connector: PrefillConnector

    async def finish(self, seconds: float, hurried: asyncio.Event) -> None:
        """Accept no new requests, and return when all requests have ended.

        Requests that still run after ``seconds``, or when ``hurried`` is set, end with an error; a client has two
        seconds to read it.
        """
        error = ShuttingDown("this sidecar is shutting down, and ended the request")
        async with ended_later(self._server, seconds, hurried, partial(self._proxy.give_up, error)):
            await _unless(hurried, self._connector.finish(DRAIN_SECONDS))


async def _unless(hurried: asyncio.Event, work: Coroutine[Any, Any, object]) -> None:
    """Wait until the ``work`` is done, or ``hurried`` is set."""
    tasks = {asyncio.ensure_future(work), asyncio.ensure_future(hurried.wait())}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def require_usable(config: SidecarConfig) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for certificates that cannot be used."""
    engine_tls(config.engine_tls.ca, config.engine_tls.cert, config.engine_tls.key)
    certificate_of(config.tls_cert, config.tls_key)


@asynccontextmanager
async def sidecar(config: SidecarConfig) -> AsyncGenerator[SidecarServer]:
    """Serve in this context.

    Raises :class:`~tercet.protocol.BadRequest` for a port in use, and for a certificate that cannot be used.
    """
    tls = engine_tls(config.engine_tls.ca, config.engine_tls.cert, config.engine_tls.key)
    session = passing_session(tls, keep_alive_s=KEEPALIVE_SECONDS, connect_s=CONNECT_SECONDS, max_head=MOST_ANSWER_HEAD)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(session)
        connector = await stack.enter_async_context(_connector(config, session, tls))
        proxy = Proxy(config, session, connector, config.allowed_prefillers(), is_loopback(config.host))

        async def handle(http: ClientCall) -> None:
            if http.path == METRICS and http.method in ("GET", "HEAD"):
                body = b"".join(generate_latest(each) for each in remote_prefill.METRICS)
                await http.answer(HTTPStatus.OK, body, "text/plain")
            else:
                await proxy.handle(http)

        tls_shown = certificate_of(config.tls_cert, config.tls_key)
        server = await stack.enter_async_context(serving(handle, config.host, config.port, tls_shown))
        yield SidecarServer(server.port, proxy, server, connector)


@asynccontextmanager
async def _connector(
    config: SidecarConfig, session: aiohttp.ClientSession, tls: SSLContext | None
) -> AsyncGenerator[PrefillConnector]:
    attempts = PrefillAttempts(config.prefill_budget)
    url = config.engine.rstrip("/")
    https = url.startswith("https:")
    if config.connector == "nixl":
        connector = NixlPrefill(url, session, attempts, https)
        try:
            yield connector
        finally:
            await connector.draining.close()
        return
    async with HttpEngine(url, url, secret=config.secret, tls=tls) as engine:

        async def ours() -> Revision:
            return (await engine.status()).revision

        async with RemotePrefill(attempts, ours, config.secret, https, tls) as remote:
            yield TercetPrefill(engine, session, remote, config.stuck_after_s)
