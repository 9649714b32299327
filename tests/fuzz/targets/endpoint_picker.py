"""What a proxy says to the endpoint picker, by external processing."""

# pyright: reportAttributeAccessIssue=false
# Modules made from .proto files have no types.

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf.json_format import Error, MessageToDict, ParseDict
from google.protobuf.message import DecodeError

from tercet_gateway.exchange import EndpointPickerService
from tercet_gateway.protos import (
    BodySendMode,
    HeaderMap,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from tests.fuzz.fuzzing import Outcome, Target
from tests.fuzz.mutation import Case
from tests.unit.gateway.pickers import IDLE, House

MOST_BODY = 20_000
REFUSALS = {400, 404, 413, 415, 503}


class Messages:
    """Messages of external processing, as trees of plain values."""

    def tree(self, item: bytes) -> Any:
        try:
            return MessageToDict(ProcessingRequest.FromString(item), preserving_proto_field_name=True)
        except (Error, DecodeError) as error:
            raise ValueError("not a message") from error

    def item(self, tree: Any) -> bytes:
        try:
            return ParseDict(tree, ProcessingRequest()).SerializeToString()
        except (Error, AttributeError) as error:
            raise ValueError("no message can hold that") from error


class Aborted(Exception):
    """The stream ends with an error."""


class Context:
    """gRPC's, of one stream."""

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        assert code == grpc.StatusCode.INVALID_ARGUMENT, f"{code}: {details}"
        raise Aborted


class PickerRoom:
    """A picker over two engines; each case is a stream."""

    def __init__(self) -> None:
        self._house = House("decode", "prefill")
        self._service = EndpointPickerService(self._house.picker, self._house.metrics, MOST_BODY)

    async def run(self, case: Case) -> Outcome:
        self._house.now += 1
        for name in ("e0", "e1"):
            self._house.fleet.report(name, IDLE)

        async def messages() -> AsyncGenerator[Any]:
            for item in case:
                yield ProcessingRequest.FromString(item)  # raises what gRPC raises

        said: list[str] = []
        context: Any = Context()
        try:
            said.extend([_kind(reply) async for reply in self._service.process(messages(), context)])
        except Aborted:
            said = ["aborted"]
        assert said.count("immediate_response") <= 1
        assert "immediate_response" not in said[:-1], "more was said after a refusal"
        return Outcome(len(case), " ".join(said[:6]))


def _kind(reply: ProcessingResponse) -> str:
    assert ProcessingResponse.FromString(reply.SerializeToString()) == reply
    kind = reply.WhichOneof("response")
    assert kind, "an answer without a part"
    if kind == "immediate_response":
        assert reply.immediate_response.status.code in REFUSALS, reply.immediate_response.body
        assert json.loads(reply.immediate_response.body)["error"]["message"]
    return kind


@asynccontextmanager
async def _picker() -> AsyncGenerator[PickerRoom]:
    yield PickerRoom()


def _cases() -> list[Case]:
    completion = json.dumps({"model": "m", "prompt": "tell me " * 200, "max_tokens": 3, "priority": 1}).encode()
    chat = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "user": "u"}
    ).encode()
    whole = ProcessingRequest(request_body=HttpBody(body=completion, end_of_stream=True))
    halves = [
        ProcessingRequest(request_body=HttpBody(body=completion[:50])),
        ProcessingRequest(request_body=HttpBody(body=completion[50:], end_of_stream=True)),
    ]
    answered = ProcessingRequest(response_headers=HttpHeaders())
    trailers = ProcessingRequest(request_trailers=HttpTrailers())
    duplex, buffered = (_headers(mode) for mode in (BodySendMode.FULL_DUPLEX_STREAMED, BodySendMode.BUFFERED))
    said = ProcessingRequest(request_body=HttpBody(body=chat, end_of_stream=True))
    cases = [
        [duplex, whole, answered],
        [duplex, *halves, trailers, answered],
        [duplex, halves[0], trailers],
        [buffered, whole, answered],
        [_headers(BodySendMode.FULL_DUPLEX_STREAMED, "/v1/chat/completions"), said, answered],
        [_headers(BodySendMode.NONE), answered, ProcessingRequest(response_body=HttpBody(body=b"x"))],
        [_headers(BodySendMode.STREAMED), *halves, answered],
    ]
    return [[message.SerializeToString() for message in case] for case in cases]


def _headers(mode: int, path: str = "/v1/completions") -> ProcessingRequest:
    told = {":method": "POST", ":path": path, "x-request-id": "r", "x-llm-d-inference-fairness-id": "f"}
    headers = [HeaderValue(key=name, raw_value=value.encode()) for name, value in told.items()]
    message = ProcessingRequest(
        request_headers=HttpHeaders(headers=HeaderMap(headers=headers)),
        protocol_config=ProtocolConfiguration(request_body_mode=mode),
    )
    hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    hint["x-gateway-destination-endpoint-subset"] = ["10.0.0.1:8000", "10.0.0.2:8000"]
    return message


TARGETS = (Target("endpoint_picker", _cases, Messages(), _picker),)
