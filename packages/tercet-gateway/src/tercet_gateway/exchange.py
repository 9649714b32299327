"""One HTTP request as Envoy sends it by external processing, and the replies: a state machine without I/O.

Envoy's first message says how it sends bodies. With ``FULL_DUPLEX_STREAMED`` there is no reply before the body's end;
then the headers' reply is sent, with the endpoints, and the body goes back unchanged. With ``BUFFERED`` the headers get
a reply at once, and the endpoints come with the body's reply. If no body is shown before the headers must continue
(``NONE``, ``STREAMED``), the headers alone decide. Engines' answers are not changed. A proxy that only observes
(``observability_mode``) routes its request by itself and expects no reply: no endpoint is picked.

:class:`EndpointPickerService` is the gRPC service that Envoy calls: one stream for each HTTP request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from tercet.aio.incoming import LEAST_OF_BODY, SECONDS, Breach
from tercet.logs import lines_of_request
from tercet.protocol import (
    EngineError,
    EngineUnreachable,
    RequestTooLarge,
    RoleUnavailable,
    Saturated,
    ShuttingDown,
    TercetError,
    UnknownPath,
)
from tercet.protocol.errors import error_body
from tercet.protocol.headers import CONTROL_HEADERS as CONTROL
from tercet.protocol.headers import PREFILLER_HEADER as PREFILLER
from tercet.protocol.headers import PROBES, REQUEST_ID_HEADER, is_for_clients
from tercet.protocol.names import kept_name
from tercet.protocol.request_checks import DECIDING, WITH_BODY, forms_of, labelled
from tercet.protocol.spans import span_context_of, span_of, working_in
from tercet.router.request_bodies import LARGEST_AT_ONCE, BodiesHeld, HeldBody
from tercet.wire.serving.answers import breach_error
from tercet_gateway.endpoint_picker import EndpointPicker, Endpoints, PickerMetrics
from tercet_gateway.openai_call import MOST_READ, OpenAICall, asked_path, call_of, call_unread
from tercet_gateway.protos import (
    SERVICE,
    BodyMutation,
    BodyResponse,
    BodySendMode,
    CommonResponse,
    HeaderAppendAction,
    HeaderMutation,
    HeadersResponse,
    HeaderValue,
    HeaderValueOption,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    Struct,
    TrailersResponse,
)

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
METADATA, SUBSET_METADATA = "envoy.lb", "envoy.lb.subset_hint"
DROPPED = "x-llm-d-request-dropped-reason"
LONGEST_CHUNK = 62_000
"""Most bytes of body in one reply: Envoy refuses messages of more than 64 KiB."""
_OVERWRITE = HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
_DUPLEX, _BUFFERED = BodySendMode.FULL_DUPLEX_STREAMED, (BodySendMode.BUFFERED, BodySendMode.BUFFERED_PARTIAL)


class ExchangeBroken(Exception):
    """An error for messages that a correct proxy does not send, or does not send in this order."""


class Exchange:
    """The messages of one request, of whose body at most ``max_bytes`` are accepted.

    After :meth:`receive`, ``call`` is the call that needs endpoints, or None; ``candidates`` are the addresses that may
    be picked, None for all. Once the answer begins, ``served_in`` is the index of the endpoint that served it; None for
    another endpoint.
    """

    def __init__(self, max_bytes: int) -> None:
        self.call: OpenAICall | None = None
        self.candidates: Sequence[str] | None = None
        self.served_in: int | None = None
        self.answer_began = False
        self._max_bytes = max_bytes
        self._mode: int | None = None
        self._answer_mode: int = BodySendMode.NONE
        self._headers: Mapping[str, str] | None = None
        self._chunks: list[bytes] = []
        self._size = 0
        self._at_headers = False
        self._is_whole = False
        self._trailers_follow = False
        self._endpoints: Endpoints | None = None
        self._relabelled: Mapping[str, str] = {}

    @property
    def path(self) -> str:
        """Path of the request, without its query; empty before it is known."""
        return "" if self._headers is None else asked_path(self._headers)

    @property
    def holds(self) -> int:
        """Number of bytes of the body that are kept to be sent back."""
        return self._size if self._chunks else 0

    @property
    def awaits_pieces(self) -> bool:
        """True if the body arrives in pieces and has not ended."""
        return self._headers is not None and self._mode == _DUPLEX and not (self._is_whole or self._at_headers)

    # ---- messages from Envoy ---------------------------------------------------------------------------------

    def receive(self, message: ProcessingRequest) -> Sequence[ProcessingResponse]:
        """Handle a message; return the replies to send at once."""
        if message.observability_mode:
            return ()
        if self._mode is None:
            said = message.protocol_config
            self._mode = said.request_body_mode if message.HasField("protocol_config") else _DUPLEX
            self._answer_mode = said.response_body_mode
        kind = message.WhichOneof("request")
        if kind is None:
            raise ExchangeBroken("a message without a part of a request or a response")
        return getattr(self, f"_{kind}")(message)

    def _request_headers(self, message: ProcessingRequest) -> Sequence[ProcessingResponse]:
        if self._headers is not None:
            raise ExchangeBroken("headers of a second request on one stream")
        self._headers, deciding = headers_of(message)
        self.candidates = candidates_of(message)
        if self.path and not is_for_clients(self.path) and self.path not in PROBES:
            raise UnknownPath(
                f"{self.path:.200} is not for clients, so no engine is picked for it; use the engine's own port"
            )
        if not message.request_headers.end_of_stream and self._headers.get(":method") in WITH_BODY:
            label = labelled(deciding, forms_of(self.path))
            if label.fields != deciding:
                self._relabelled = {"content-type": label.content_type}
        announced = self._headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            raise self._too_large()
        if message.request_headers.end_of_stream or self._mode not in (_DUPLEX, *_BUFFERED):
            self._at_headers, self._is_whole = True, message.request_headers.end_of_stream
            self.call = call_of(self._headers, None)
        elif self._mode in _BUFFERED:
            return [ProcessingResponse(request_headers=HeadersResponse(response=CommonResponse()))]
        return ()

    def _request_body(self, message: ProcessingRequest) -> Sequence[ProcessingResponse]:
        if self._headers is None:
            raise ExchangeBroken("a body before the headers")
        if self._at_headers and self._mode != _DUPLEX:
            return [ProcessingResponse(request_body=BodyResponse(response=CommonResponse()))]
        if self._is_whole:
            return ()  # Envoy may report a body's end twice
        body = message.request_body
        self._size += len(body.body)
        if self._size > self._max_bytes:
            raise self._too_large()
        self._chunks.append(body.body)
        if body.end_of_stream or self._mode in _BUFFERED:
            self._complete(self._headers)
        return ()

    def _request_trailers(self, message: ProcessingRequest) -> Sequence[ProcessingResponse]:
        if self._headers is None:
            raise ExchangeBroken("trailers before the headers")
        if self._mode != _DUPLEX or self._is_whole:
            return [ProcessingResponse(request_trailers=TrailersResponse())]
        self._trailers_follow = True
        self._complete(self._headers)
        return ()

    def _complete(self, headers: Mapping[str, str]) -> None:
        self._is_whole = True
        if self._mode == BodySendMode.BUFFERED_PARTIAL:
            self.call = call_of(headers, None)
        elif self._size <= MOST_READ:
            self.call = call_of(headers, self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks))
        else:
            self.call = call_unread(headers, self._chunks, self._size)

    def _response_headers(self, message: ProcessingRequest) -> Sequence[ProcessingResponse]:
        self.answer_began = True
        served = _metadata(message, METADATA, SERVED)
        if self._endpoints is not None and isinstance(served, str) and served in self._endpoints.decode:
            self.served_in = list(self._endpoints.decode).index(served)
        return [ProcessingResponse(response_headers=HeadersResponse(response=CommonResponse()))]

    def _response_body(self, message: ProcessingRequest) -> Sequence[ProcessingResponse]:
        """Reply to an answer's body, unchanged; Envoy sends it only if it is configured so, and waits for a reply."""
        if self._answer_mode == _DUPLEX:
            body = message.response_body
            return list(_streamed("response_body", [body.body], body.end_of_stream))
        return [ProcessingResponse(response_body=BodyResponse(response=CommonResponse()))]

    def _response_trailers(self, message: ProcessingRequest) -> Sequence[ProcessingResponse]:
        return [ProcessingResponse(response_trailers=TrailersResponse())]

    def _too_large(self) -> RequestTooLarge:
        return RequestTooLarge(f"the request's body has more than {self._max_bytes} bytes, the largest accepted size")

    # ---- results of the picker -------------------------------------------------------------------------------

    def picked(self, endpoints: Endpoints) -> Iterable[ProcessingResponse]:
        """Return the replies that send the call to these endpoints, to be sent one by one."""
        self._endpoints, self.call = endpoints, None
        chunks, self._chunks = self._chunks, []  # the stream lasts until an engine answers, and need not keep them
        headers = {DESTINATION: ",".join(endpoints.decode), **self._relabelled}
        if endpoints.prefill:
            headers[PREFILLER] = endpoints.prefill
        stripped = [name for name in CONTROL if self._headers and name in self._headers and name not in headers]
        mutation = HeaderMutation(set_headers=_set(headers), remove_headers=stripped)
        common = CommonResponse(header_mutation=mutation, clear_route_cache=True)
        metadata = Struct()
        metadata.get_or_create_struct(METADATA)[DESTINATION] = headers[DESTINATION]
        if self._at_headers or self._mode == _DUPLEX:
            first = ProcessingResponse(request_headers=HeadersResponse(response=common), dynamic_metadata=metadata)
        else:
            first = ProcessingResponse(request_body=BodyResponse(response=common), dynamic_metadata=metadata)
        if self._at_headers or self._mode != _DUPLEX:
            return [first]
        last = [ProcessingResponse(request_trailers=TrailersResponse())] if self._trailers_follow else []
        return chain([first], _streamed("request_body", chunks, not self._trailers_follow), last)


def refusal(error: TercetError, path: str = "") -> ProcessingResponse:
    """Return the reply that refuses a request for ``path``: Envoy answers with the error JSON of the path's API."""
    headers = {"content-type": "application/json"}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if isinstance(error, Saturated):
        headers[DROPPED] = "rejected-ttl-expired" if error.waited else "rejected-saturated"
    elif isinstance(error, ShuttingDown):
        headers[DROPPED] = "rejected-shutting-down"
    elif isinstance(error, (EngineUnreachable, RoleUnavailable)):
        headers[DROPPED] = "rejected-no-endpoints"
    return ProcessingResponse(
        immediate_response=ImmediateResponse(
            status={"code": error.status},
            headers=HeaderMutation(set_headers=_set(headers)),
            body=error_body(path, error),
            details=f"endpoint_picker_{error.code}",
        )
    )


def _set(headers: Mapping[str, str]) -> Sequence[HeaderValueOption]:
    return [
        HeaderValueOption(header=HeaderValue(key=name, raw_value=value.encode()), append_action=_OVERWRITE)
        for name, value in headers.items()
    ]


def _streamed(part: str, chunks: Sequence[bytes], ends: bool) -> Iterator[ProcessingResponse]:
    """Yield a body in pieces that Envoy accepts; the last one is marked as the end if the body ``ends``."""
    places = [(chunk, start) for chunk in chunks for start in range(0, len(chunk), LONGEST_CHUNK)] or [(b"", 0)]
    for number, (chunk, start) in enumerate(places, 1):
        last = ends and number == len(places)
        streamed = StreamedBodyResponse(body=chunk[start : start + LONGEST_CHUNK], end_of_stream=last)
        common = CommonResponse(body_mutation=BodyMutation(streamed_response=streamed))
        yield ProcessingResponse(**{part: BodyResponse(response=common)})


# ---- reading messages ----------------------------------------------------------------------------------------


def headers_of(message: ProcessingRequest) -> tuple[dict[str, str], list[tuple[bytes, bytes]]]:
    """Return the request's headers, values of a repeated one joined by commas; and those that decide a body's form."""
    found: dict[str, str] = {}
    deciding: list[tuple[bytes, bytes]] = []
    for header in message.request_headers.headers.headers:
        name, content = header.key.lower(), header.raw_value or header.value.encode()
        value = content.decode("latin-1")
        found[name] = f"{found[name]},{value}" if name in found else value
        if name in DECIDING:
            deciding.append((name.encode(), content))
    return found, deciding


def candidates_of(message: ProcessingRequest) -> Sequence[str] | None:
    """Return the endpoints that the proxy allows, given as a list, joined by commas, or both; None if it gives none.

    Empty if the metadata has an unexpected type: if a restriction that cannot be parsed were ignored, the request could
    be routed to an engine that it forbids.
    """
    given = _metadata(message, SUBSET_METADATA, SUBSET)
    if given is None:
        return None
    parts = given if isinstance(given, list) else [given]
    return [each.strip() for part in parts for each in part.split(",") if each.strip()]


def _metadata(message: ProcessingRequest, namespace: str, key: str) -> str | list[str] | None:
    """Return a string or a list of strings in the metadata; empty for another type, None if it is missing."""
    known = message.metadata_context.filter_metadata
    if namespace not in known:
        return None
    fields = known[namespace].fields
    if key not in fields:
        return None
    value = fields[key]
    if value.HasField("list_value"):
        return [each.string_value for each in value.list_value.values]
    return value.string_value


logger = logging.getLogger("tercet.gateway")


class EndpointPickerService:
    """``envoy.service.ext_proc.v3.ExternalProcessor`` on a :class:`~tercet_gateway.endpoint_picker.EndpointPicker`."""

    def __init__(self, picker: EndpointPicker, metrics: PickerMetrics, max_bytes: int) -> None:
        self._picker = picker
        self._metrics = metrics
        self._max_bytes = max_bytes
        self._bodies = BodiesHeld(LARGEST_AT_ONCE * max_bytes)

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler that a gRPC server needs for this service."""
        process = grpc.stream_stream_rpc_method_handler(
            self.process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": process})

    async def process(
        self, request_iterator: AsyncIterator[ProcessingRequest], context: Any
    ) -> AsyncGenerator[ProcessingResponse]:
        """Yield the replies to one request's messages."""
        exchange = Exchange(self._max_bytes)
        pace = _Pace(request_iterator, exchange)
        self._metrics.streams.inc()
        try:
            with self._bodies.one() as kept:
                async for message in pace.all(kept):
                    for reply in exchange.receive(message):
                        yield reply
                    if exchange.holds > kept.size:
                        kept.add(exchange.holds - kept.size)
                    if exchange.call is not None:
                        async with kept.until_let_go():
                            endpoints = await self._pick(exchange, exchange.call)
                        for reply in exchange.picked(endpoints):
                            yield reply
                        kept.forget()
        except TercetError as error:
            self._metrics.failed(error.status)
            yield refusal(error, exchange.path)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no headers arrived within {SECONDS:g} s")
        except (ExchangeBroken, DecodeError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except asyncio.CancelledError:
            raise
        except Exception:  # a user's plugin may raise any error: other requests continue
            with lines_of_request("" if exchange.call is None else exchange.call.headers.get(REQUEST_ID_HEADER, "")):
                logger.exception("picking for a request failed")
            self._metrics.failed(EngineError.status)
            yield refusal(EngineError("the endpoint picker failed; its log has the traceback"), exchange.path)
        finally:
            self._metrics.streams.dec()
            if exchange.answer_began:
                self._metrics.served(exchange.served_in)

    async def _pick(self, exchange: Exchange, call: OpenAICall) -> Endpoints:
        """Pick, with log lines and a span for the request."""
        headers = call.headers
        attributes: dict[str, Any] = {
            "url.path": kept_name(exchange.path), "gen_ai.request.model": kept_name(call.body.model or ""),
        }  # fmt: skip
        with (
            lines_of_request(headers.get(REQUEST_ID_HEADER, "")),
            working_in(span_context_of(headers)),
            span_of("pick", attributes, "server") as span,
        ):
            picked = await self._picker.pick(call, exchange.candidates)
            if span is not None:
                attributes |= {"tercet.decode": [*picked.decode], "tercet.prefill": picked.prefill}
            return picked


class _Pace:
    """The messages of one stream: the first one must arrive in time, and a buffered body at a minimum rate."""

    def __init__(self, messages: AsyncIterator[ProcessingRequest], exchange: Exchange) -> None:
        self._messages = messages
        self._exchange = exchange
        self._loop = asyncio.get_running_loop()
        # The end of the interval in which the rate is checked, None before the first; and the bytes at its begin.
        self._check_at: float | None = None
        self._held_before = 0

    async def all(self, kept: HeldBody) -> AsyncGenerator[ProcessingRequest]:
        """Yield messages.

        Raises ``TimeoutError`` if none arrives, and :class:`~tercet.protocol.TercetError` for a slow body.
        """
        async with asyncio.timeout(SECONDS):
            message = await anext(self._messages, None)
        while message is not None:
            yield message
            message = await (self._piece(kept) if self._exchange.awaits_pieces else anext(self._messages, None))

    async def _piece(self, kept: HeldBody) -> ProcessingRequest | None:
        """Return the next message while a body arrives; None at the stream's end."""
        patience = asyncio.timeout(None)
        self._check_later(patience)
        try:
            async with kept.until_let_go(), patience:
                return await anext(self._messages, None)
        except TimeoutError:
            raise breach_error(Breach.SLOW_BODY) from None
        finally:
            self._timer.cancel()

    def _check_later(self, patience: asyncio.Timeout) -> None:
        """Call :meth:`_check` at the end of the present interval, which may begin now."""
        if self._check_at is None:
            self._check_at, self._held_before = self._loop.time() + SECONDS, self._exchange.holds
        self._timer = self._loop.call_at(self._check_at, self._check, patience)

    def _check(self, patience: asyncio.Timeout) -> None:
        """End the wait for a message if too little of the body arrived in the interval; begin the next otherwise."""
        if self._exchange.holds - self._held_before < LEAST_OF_BODY:
            patience.reschedule(self._loop.time())
        else:
            self._check_at = None
            self._check_later(patience)
