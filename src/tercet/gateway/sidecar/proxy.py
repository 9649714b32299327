"""Requests and answers on their way to the decode engine and back; streams as they come, and never cut silently."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, cast

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from tercet.client.connection_errors import reason_of
from tercet.fleet.calls_in_flight import CallsInFlight, until_lost
from tercet.gateway.sidecar.prefill_legs import DecodeLeg, PrefillLeg
from tercet.gateway.sidecar.split_call import KV_PARAMS, SPLIT_PATHS, SplitCall
from tercet.gateway.sidecar.sse import Opening, WholeEvents, last_event
from tercet.protocol import BadRequest, EngineError, EngineUnreachable, RequestTooLarge, TercetError, Unauthorized
from tercet.protocol.call_proofs import CHALLENGE_HEADER, Callers, Prover, require_digest, secrets_of
from tercet.protocol.headers import CONTROL_HEADERS, PREFILLER_HEADER, TRACE_HEADER
from tercet.protocol.own_requests import ShownHeaders, require_own_call
from tercet.protocol.prefill_hosts import AllowedPrefillers
from tercet.protocol.trace import VerbTrace
from tercet.protocol.wire import PREFIX, UNREADABLE
from tercet.settings import SidecarConfig
from tercet.vllm_plugin.frontend.trace_answers import TracingSend, wants_trace

logger = logging.getLogger("tercet.gateway")
HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
     "upgrade", "host", "content-length", "expect"}
)  # fmt: skip
DROPPED = HOP_BY_HOP | {*CONTROL_HEADERS, TRACE_HEADER}
# Of a client's headers those that an engine needs to serve the legs that its client did not ask for.
SHOWN = ("authorization", "x-request-id", "traceparent", "tracestate")
FORWARD = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
EVENTS = "text/event-stream"
# In a request: the digest of its body, of which its caller has proved that it belongs to the fleet.
PROVED = web.RequestKey("tercet.proved", str)
LONGEST_ID = 64
"""Of a client's request id, characters that names on engines begin with."""


def _verb_of(http: web.Request) -> str:
    """The path below the verbs' prefix."""
    return http.path.partition(PREFIX)[2]


class Proxy:
    """Everything that is asked of one engine; ``leg`` brings KV to it, from those of ``allowed`` that requests name."""

    def __init__(
        self,
        config: SidecarConfig,
        session: aiohttp.ClientSession,
        leg: PrefillLeg,
        allowed: AllowedPrefillers,
        verbs_are_open: bool,
    ) -> None:
        self._under_way = CallsInFlight()
        self._url = config.engine.rstrip("/")
        self._session = session
        self._leg = leg
        self._allowed = allowed
        self._callers = Callers(secrets_of(config.secret))
        self._prover = Prover(config.secret)
        self._verbs_are_open = verbs_are_open
        self._refuses_params = config.connector == "nixl"
        self._max_bytes = config.max_request_bytes
        self._stuck_s = config.stuck_after_s
        self._idle_s = config.idle_timeout_s

    async def handle(self, http: web.Request) -> web.StreamResponse:
        """The engine's answer, or an error in OpenAI's form."""
        answer = _Answer(http)
        try:
            async with until_lost(self._under_way):
                await self._serve(http, answer)
        except Unauthorized as error:
            failed = await answer.fail(error)
            if not failed.prepared:
                failed.headers[CHALLENGE_HEADER] = self._callers.challenge()
            return failed
        except TercetError as error:
            return await answer.fail(error)
        return answer.response

    def give_up(self, error: TercetError) -> None:
        """What is under way ends with ``error``."""
        self._under_way.lose(error)

    async def _serve(self, http: web.Request, answer: _Answer) -> None:
        digest = self._require_caller(http)
        if digest is not None:
            body = await self._body(http)
            require_digest(body, digest)
            http[PROVED] = digest
            await self._forward(http, answer, body)
        elif http.method == "POST" and http.path in SPLIT_PATHS:
            await self._split(http, answer)
        elif self._refuses_params and _may_be_json(http):
            body = await self._body(http)
            self._fields(body)
            await self._forward(http, answer, body)
        else:
            await self._forward(http, answer, http.content if http.body_exists else None)

    def _require_caller(self, http: web.Request) -> str | None:
        """Raises :class:`~tercet.protocol.Unauthorized` for a stranger at the engine's verbs.

        Returns the digest of the body of a call that was proved and not shown the secret.
        An engine that this machine alone can reach asks nobody for a key; through here others would reach it.
        """
        if not http.path.startswith(PREFIX):
            return None
        if not self._callers and not self._verbs_are_open:
            raise BadRequest(f"{PREFIX}: this sidecar has no TERCET_SECRET, and passes no verbs on without one")
        refusal = "this sidecar asks for its fleet's secret (TERCET_SECRET): Authorization: Bearer KEY"
        if not self._callers:
            require_own_call(ShownHeaders(http.headers.items()), http.remote)
        shown = http.headers.getall("authorization", [])
        return self._callers.require(shown, http.method, _verb_of(http), refusal)

    # ---- requests that may be split --------------------------------------------------------------------------

    async def _split(self, http: web.Request, answer: _Answer) -> None:
        body = await self._body(http)
        named = http.headers.get(PREFILLER_HEADER)
        hosts = self._allowed.named(named) if named is not None and self._allowed else ()
        fields = self._fields(body)
        if not hosts or not fields:
            await self._forward(http, answer, body)
            return
        traces = [VerbTrace()]
        if wants_trace({name.lower(): value for name, value in http.headers.items()}):
            answer.traces = traces
        request_id = http.headers.get("x-request-id") or uuid.uuid4().hex
        # Clients may choose the same id: what engines pin and free by name has one that nobody else has.
        seq_id = f"{request_id[:LONGEST_ID]}-{uuid.uuid4().hex}"
        shown = {name: http.headers[name] for name in SHOWN if name in http.headers} | {"x-request-id": seq_id}
        call = SplitCall(http.path, body, fields, shown, request_id, seq_id)
        async with AsyncExitStack() as held:
            prepared = await held.enter_async_context(self._leg.prefilled(call, hosts, traces[0]))
            await self._forward(http, answer, prepared, held)

    def _fields(self, body: bytes) -> Mapping[str, Any]:
        """The body's fields; none for one that cannot be read.

        Raises :class:`~tercet.protocol.BadRequest` for what may say where engines fetch KV, which is not for clients to
        say: what cannot be read here may be read there, such as numbers and encodings that are not JSON's.
        """
        try:
            fields = msgspec.json.decode(body, type=dict[str, Any])
        except UNREADABLE as error:
            if self._refuses_params:
                raise BadRequest(f"the request's body is no JSON object: {error}") from error
            return {}
        if self._refuses_params and _has_params(fields):
            raise BadRequest(f"{KV_PARAMS}: says where engines fetch KV, which is not for clients to say", KV_PARAMS)
        return fields

    async def _body(self, http: web.Request) -> bytes:
        chunks, size = list[bytes](), 0
        async for chunk in http.content.iter_any():
            chunks.append(chunk)
            size += len(chunk)
            if size > self._max_bytes:
                raise RequestTooLarge(f"the request's body has more than {self._max_bytes} bytes")
        return b"".join(chunks)

    # ---- passing on ------------------------------------------------------------------------------------------

    async def _forward(
        self,
        http: web.Request,
        answer: _Answer,
        body: DecodeLeg | bytes | aiohttp.StreamReader | None,
        held: AsyncExitStack | None = None,
    ) -> None:
        """Ask the engine and pass its answer on; ``held`` is closed once that has begun."""
        prepared = body if isinstance(body, DecodeLeg) else None
        waiting, lost = _Waiting(), CallsInFlight()
        watching = asyncio.ensure_future(self._watch(waiting, lost))
        try:
            async with until_lost(lost), AsyncExitStack() as stack:
                opening = b""
                if prepared is not None:
                    prepared.sent = True
                if prepared is None or prepared.local is None:
                    response = await self._asked(http, body if prepared is None else prepared.body, stack)
                else:
                    opened = partial(self._opened, http, prepared, stack, waiting)
                    try:
                        response, opening = await prepared.while_there(opened)
                    except TercetError as error:  # nothing is lost that the engine cannot compute itself
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
        self, http: web.Request, prepared: DecodeLeg, stack: AsyncExitStack, waiting: _Waiting
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """The engine's answer with KV of another one, and what it says with its first tokens."""
        response = await self._asked(http, prepared.body, stack)
        try:
            return response, await _opening(response, waiting)
        except BaseException:
            response.close()
            raise

    async def _asked(self, http: web.Request, body: Any, stack: AsyncExitStack) -> aiohttp.ClientResponse:
        dropped = DROPPED | {"authorization"} if PROVED in http else DROPPED
        headers = [(name, value) for name, value in http.headers.items() if name.lower() not in dropped]
        if isinstance(body, aiohttp.StreamReader) and "content-length" in http.headers:
            headers.append(("content-length", http.headers["content-length"]))
        url = URL(self._url + http.rel_url.raw_path_qs, encoded=True)
        try:
            response = await self._session.request(
                http.method, url, data=body, headers=[*headers, *self._proof(http)], timeout=FORWARD,
                allow_redirects=False,
            )  # fmt: skip
            if PROVED in http and self._prover.meets(response.headers.getall(CHALLENGE_HEADER, [])):
                response.close()
                response = await self._session.request(
                    http.method, url, data=body, headers=[*headers, *self._proof(http)], timeout=FORWARD,
                    allow_redirects=False,
                )  # fmt: skip
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineUnreachable(f"the engine does not answer: {reason_of(error)}") from error
        stack.callback(response.close)
        return response

    def _proof(self, http: web.Request) -> Sequence[tuple[str, str]]:
        """Of a call that was proved here: the same, for the engine."""
        return tuple(self._prover.headers(http.method, _verb_of(http), http[PROVED]).items()) if PROVED in http else ()

    async def _watch(self, waiting: _Waiting, lost: CallsInFlight) -> None:
        """Ask the engine how it is while it says nothing; what waits for it fails once it is lost."""
        while True:
            await asyncio.sleep(self._stuck_s)
            silent = waiting.seconds
            if silent < self._stuck_s:
                continue
            try:
                if silent > self._idle_s:
                    raise EngineUnreachable(f"the engine has said nothing for {silent:.0f} s")
                await self._require_well()
            except EngineUnreachable as error:
                lost.lose(error)
            except TercetError as error:  # it answers, so it is there
                logger.debug("the engine answers: %s", error)

    async def _require_well(self) -> None:
        try:
            async with asyncio.timeout(self._stuck_s):
                await self._leg.look()
        except TimeoutError:
            raise EngineUnreachable(f"the engine has said nothing for {self._stuck_s:g} s") from None


class _Waiting:
    """For how long the engine has been waited for, while it is."""

    def __init__(self) -> None:
        self.since: float | None = time.monotonic()

    @property
    def seconds(self) -> float:
        """0 while its client is what is waited for."""
        return 0.0 if self.since is None else time.monotonic() - self.since


async def _opening(response: aiohttp.ClientResponse, waiting: _Waiting) -> bytes:
    """What an engine that fetches KV says before its first tokens, and with them; empty if it is asked for no stream.

    Raises :class:`~tercet.protocol.TercetError` if it could not fetch the KV. In a stream it says that in an event.
    """
    if response.status >= 500:
        raise EngineError(f"the engine answers {response.status} with KV of another one")
    opening = Opening()
    if response.status == 200 and response.headers.get("content-type", "").startswith(EVENTS):
        while chunk := await _read(response, waiting):
            came_to = opening.came_to(chunk)
            if came_to == "failure":
                raise EngineError("the engine's answer with KV of another one ends in an error before its first token")
            if came_to == "tokens":
                break
    return opening.held


async def _read(response: aiohttp.ClientResponse, waiting: _Waiting) -> bytes:
    """What the engine says next; empty at the end. Raises :class:`~tercet.protocol.EngineUnreachable`."""
    waiting.since = time.monotonic()
    try:
        return await response.content.readany()
    except (aiohttp.ClientError, HttpProcessingError, TimeoutError, OSError) as error:
        raise EngineUnreachable(f"the engine was lost: {reason_of(error)}") from error
    finally:
        waiting.since = None


class _Answer:
    """One answer to a client. ``traces``, if any, are added to it."""

    def __init__(self, http: web.Request) -> None:
        self.response = web.StreamResponse()
        self.traces: Sequence[VerbTrace] = ()
        self._http = http
        self._events: WholeEvents | None = None
        self._began = False
        self._send: Any = None

    async def begin(self, upstream: aiohttp.ClientResponse) -> None:
        """Its status and headers are the engine's."""
        headers = [(name, value) for name, value in upstream.headers.items() if name.lower() not in HOP_BY_HOP]
        length = upstream.headers.get("content-length")
        is_stream = upstream.headers.get("content-type", "").startswith(EVENTS)
        self._events = WholeEvents() if is_stream else None
        if length is not None:
            headers.append(("content-length", length))
        message = {
            "type": "http.response.start",
            "status": upstream.status,
            "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers],
        }
        self._send = TracingSend(self._write_message, self.traces) if self.traces else self._write_message
        await self._send(message)

    async def write(self, chunk: bytes) -> None:
        """Pass on what the engine sent."""
        passed = chunk if self._events is None else self._events.passed(chunk)
        if passed:
            await self._send({"type": "http.response.body", "body": passed, "more_body": True})

    async def end(self) -> None:
        """The engine's answer is whole."""
        rest = b"" if self._events is None else self._events.rest()
        await self._send({"type": "http.response.body", "body": rest, "more_body": False})
        await self.response.write_eof()

    async def fail(self, error: TercetError) -> web.StreamResponse:
        """It is an error, or ends in one; an answer that is no stream, and had begun, breaks off."""
        if not self._began:
            return web.Response(
                body=msgspec.json.encode(error.to_wire()), status=error.status, content_type="application/json"
            )
        logger.warning("an answer broke off: %s: %s", error.code, error.message)
        if self._events is not None:
            await self.response.write(last_event(self._http.path, error))
            await self.response.write_eof()
        elif self._http.transport is not None:
            self._http.transport.abort()
        return self.response

    async def _write_message(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.response.set_status(message["status"])
            for name, value in message["headers"]:
                self.response.headers.add(name.decode("latin-1"), value.decode("latin-1"))
            self._began = True
            await self.response.prepare(self._http)
        elif message.get("body"):
            await self.response.write(message["body"])


def _may_be_json(http: web.Request) -> bool:
    """Whether vLLM may take the body for JSON: it does without a content type, too."""
    return http.body_exists and "json" in http.headers.get("content-type", "json").lower()


def _has_params(fields: Mapping[str, Any]) -> bool:
    """Whether a body has the parameters anywhere: vLLM takes some from ``sampling_params`` or ``vllm_xargs``."""
    left: list[Mapping[str, Any]] = [fields]
    while left:
        for name, value in left.pop().items():
            if name == KV_PARAMS and value is not None:
                return True
            if isinstance(value, dict):
                left.append(cast("Mapping[str, Any]", value))
    return False
