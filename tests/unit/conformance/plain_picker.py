"""A small endpoint picker that shares nothing with Tercet's, and breaks the protocol in one way if it is told to.

Endpoints come in turn. What it breaks is named in :mod:`.faults`, each at the place where it is asked for.
"""

# pyright: reportAttributeAccessIssue=false, reportMissingModuleSource=false, reportIncompatibleMethodOverride=false
# Modules made from .proto files have no types.

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import (
    ExternalProcessorServicer,
    add_ExternalProcessorServicer_to_server,
)
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

NAME = "x-gateway-destination-endpoint"
FORGED = NAME, "x-prefiller-host-port"
DUPLEX, BUFFERED, PARTIAL = (
    ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.BUFFERED, ProcessingMode.BUFFERED_PARTIAL,
)  # fmt: skip


class Refused(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Broken(Exception):
    """Messages that no proxy sends."""


class PlainPicker(ExternalProcessorServicer):
    """``fault`` is what it does wrong; nothing, if empty. ``full``: what names an objective is dropped."""

    def __init__(self, endpoints: Sequence[str], fault: str = "", full: bool = False) -> None:
        self.endpoints = endpoints
        self.fault = fault
        self.full = full
        self.turn = itertools.count()

    async def Process(self, messages: AsyncIterator[ProcessingRequest], context: Any) -> AsyncGenerator[Any]:
        call = Call(self)
        try:
            async for message in messages:
                if not message.observability_mode or self.fault == "answers who only watches":
                    for reply in call.replies(message):
                        yield reply
        except Refused as refused:
            body = json.dumps({"error": {"message": "no"}}).encode()
            if self.fault == "refuses in words":
                body = b"no"
            headers = HeaderMutation(set_headers=[_header("content-type", "application/json")])
            immediate = ImmediateResponse(status={"code": refused.status}, body=body, headers=headers)
            yield ProcessingResponse(immediate_response=immediate)
        except Broken:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "out of order")


class Call:
    """One request."""

    def __init__(self, picker: PlainPicker) -> None:
        self.picker = picker
        self.mode: int | None = None
        self.headers: dict[str, str] | None = None
        self.candidates: Sequence[str] = ()
        self.body = b""
        self.is_done = False

    def has(self, fault: str) -> bool:
        return self.picker.fault == fault

    def replies(self, message: ProcessingRequest) -> Iterator[ProcessingResponse]:
        if self.mode is None:
            self.mode = message.protocol_config.request_body_mode
        kind = message.WhichOneof("request")
        if kind is None:
            raise Broken
        yield from getattr(self, f"on_{kind}")(message)

    # ---- requests ------------------------------------------------------------------------------------------------

    def on_request_headers(self, message: ProcessingRequest) -> Iterator[ProcessingResponse]:
        if self.headers is not None:
            raise Broken
        given = message.request_headers.headers.headers
        self.headers = {each.key.lower(): (each.raw_value or each.value.encode()).decode("latin-1") for each in given}
        self.candidates = self._candidates(message)
        at_once = message.request_headers.end_of_stream or self.mode not in (DUPLEX, BUFFERED, PARTIAL)
        if at_once or (self.mode == DUPLEX and self.has("answers headers before the body's end")):
            self.is_done = bool(at_once)
            yield self._picked("request_headers")
        elif self.mode != DUPLEX:
            yield ProcessingResponse(request_headers=HeadersResponse(response=CommonResponse()))

    def on_request_body(self, message: ProcessingRequest) -> Iterator[ProcessingResponse]:
        if self.headers is None:
            if not self.has("picks for a body without headers"):
                raise Broken
            self.headers, self.candidates = {}, self.picker.endpoints
        if self.is_done and self.mode != DUPLEX:
            if not self.has("leaves streamed bodies without an answer"):
                yield ProcessingResponse(request_body=BodyResponse(response=CommonResponse()))
            return
        if self.is_done:
            if self.has("answers a second end"):
                yield _body("request_body", b"", True)
            return
        self.body += message.request_body.body
        if message.request_body.end_of_stream or self.mode != DUPLEX:
            yield from self._whole(ends=True)

    def on_request_trailers(self, message: ProcessingRequest) -> Iterator[ProcessingResponse]:
        if self.headers is None:
            raise Broken
        if self.mode == DUPLEX and not self.is_done:
            yield from self._whole(ends=self.has("ends a body that trailers follow"))
        yield ProcessingResponse(request_trailers=TrailersResponse())

    def _whole(self, ends: bool) -> Iterator[ProcessingResponse]:
        self.is_done = True
        if self.mode != PARTIAL or self.has("reads bodies that are cut"):
            self._require_request()
        if self.mode != DUPLEX:
            yield self._picked("request_body")
            return
        if not self.has("answers headers before the body's end"):
            yield self._picked("request_headers")
        if self.has("answers bodies plainly in full duplex"):
            yield ProcessingResponse(request_body=BodyResponse(response=CommonResponse()))
            return
        size = 100_000 if self.has("sends large pieces") else 60_000
        body = self.body[: 2**20] if self.has("cuts long bodies") else self.body
        for start in range(0, len(body), size) or [0]:
            yield _body("request_body", body[start : start + size], ends and start + size >= len(body))

    def _require_request(self) -> None:
        try:
            found = json.loads(self.body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise Refused(500 if self.has("takes bad bodies for its own fault") else 400)

    # ---- picking -------------------------------------------------------------------------------------------------

    def _candidates(self, message: ProcessingRequest) -> Sequence[str]:
        hint = message.metadata_context.filter_metadata.get("envoy.lb.subset_hint")
        endpoints = self.picker.endpoints
        if hint is None or f"{NAME}-subset" not in hint.fields or self.has("passes candidates over"):
            return endpoints
        value = hint.fields[f"{NAME}-subset"]
        if value.HasField("list_value"):
            parts = [each.string_value for each in value.list_value.values]
            if self.has("takes candidates as text only"):
                return endpoints
        else:
            parts = [value.string_value]
        if not self.has("does not take lists apart") or not value.HasField("list_value"):
            parts = [each.strip() for part in parts for each in part.split(",")]
        found = [each for each in endpoints if each in parts]
        if not found and self.has("takes no candidates for all"):
            return endpoints
        return found

    def _picked(self, part: str) -> ProcessingResponse:
        headers = self.headers or {}
        objective = headers.get("x-gateway-inference-objective")
        if self.picker.full and objective and not self.has("keeps what may be dropped"):
            raise Refused(429)
        if objective and self.has("refuses objectives that it does not know"):
            raise Refused(400)
        if not self.candidates:
            raise Refused(500 if self.has("says 500 without endpoints") else 503)
        number = 0 if self.has("picks the same one always") else next(self.picker.turn)
        first = number % len(self.candidates)
        endpoints = [*self.candidates[first:], *self.candidates[:first]][:2]
        if self.has("names hosts without ports"):
            endpoints = [each.partition(":")[0] for each in endpoints]
        told = (" " if self.has("joins endpoints by spaces") else ",").join(endpoints)
        common = CommonResponse(clear_route_cache=not self.has("keeps the route"))
        option = _header(NAME, told)
        if self.has("sets headers as text"):
            option = HeaderValueOption(header=HeaderValue(key=NAME, value=told))
        common.header_mutation.set_headers.append(option)
        if not self.has("believes clients"):
            common.header_mutation.remove_headers.extend(name for name in FORGED if name in headers and name != NAME)
        if part == "request_body" and self.has("writes buffered bodies anew"):
            common.body_mutation.body = self.body + b" "
        response = BodyResponse if part == "request_body" else HeadersResponse
        return ProcessingResponse(**{part: response(response=common)}, dynamic_metadata=self._metadata(told))

    def _metadata(self, told: str) -> Struct:
        metadata = Struct()
        if not self.has("says nothing in metadata"):
            own = metadata.get_or_create_struct("envoy.lb")
            own[NAME] = "192.0.2.9:9" if self.has("says another thing in metadata") else told
        if self.has("writes to namespaces of others"):
            metadata.get_or_create_struct("envoy.filters.http.rbac")["allowed"] = True
        return metadata

    # ---- answers -------------------------------------------------------------------------------------------------

    def on_response_headers(self, message: ProcessingRequest) -> Iterator[ProcessingResponse]:
        common = CommonResponse()
        if self.has("writes on answers"):
            common.header_mutation.set_headers.append(_header("x-served-by", "picker"))
        yield ProcessingResponse(response_headers=HeadersResponse(response=common))

    def on_response_body(self, message: ProcessingRequest) -> Iterator[ProcessingResponse]:
        body = message.response_body
        if self.mode != DUPLEX:
            yield ProcessingResponse(response_body=BodyResponse(response=CommonResponse()))
            return
        content = body.body
        for start in range(0, len(content), 60_000) or [0]:
            last = body.end_of_stream and start + 60_000 >= len(content)
            yield _body(
                "response_body", content[start : start + 60_000], last and not self.has("swallows answers' ends")
            )

    def on_response_trailers(self, message: ProcessingRequest) -> Iterator[ProcessingResponse]:
        yield ProcessingResponse(response_trailers=TrailersResponse())


def _header(name: str, value: str) -> HeaderValueOption:
    return HeaderValueOption(header=HeaderValue(key=name, raw_value=value.encode()))


def _body(part: str, content: bytes, last: bool) -> ProcessingResponse:
    streamed = StreamedBodyResponse(body=content, end_of_stream=last)
    common = CommonResponse(body_mutation=BodyMutation(streamed_response=streamed))
    return ProcessingResponse(**{part: BodyResponse(response=common)})


@asynccontextmanager
async def serving_plainly(
    endpoints: Sequence[str], fault: str = "", full: bool = False, credentials: grpc.ServerCredentials | None = None
) -> AsyncGenerator[int]:
    """Its port."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 2**25), ("grpc.so_reuseport", 0)])
    add_ExternalProcessorServicer_to_server(PlainPicker(endpoints, fault, full), server)
    told = health.aio.HealthServicer()
    add_HealthServicer_to_server(told, server)
    for name in ("liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
        if not (name == "readiness" and fault == "does not say whether it is ready"):
            await told.set(name, HealthCheckResponse.SERVING)
    address = "127.0.0.1:0"
    port = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)
