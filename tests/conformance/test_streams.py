"""What is said after the pick, streams that break off or say nonsense, and health."""

# pyright: reportAttributeAccessIssue=false, reportMissingModuleSource=false
# Modules made from .proto files have no types.

from __future__ import annotations

import asyncio
import json

import grpc
import grpc.aio
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
)
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from .conftest import Target
from .envoy_side import DUPLEX, PATIENCE

BODY = json.dumps({"model": "m", "prompt": "tell me"}).encode()
PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


async def still_picks(target: Target) -> bool:
    verdict = await target.envoy.request(BODY)
    return verdict.status == 0 and set(verdict.endpoints) <= target.endpoints


async def test_the_answers_headers_are_left_alone(target: Target, mode: int) -> None:
    async with target.envoy.stream(mode) as stream:
        await stream.send_headers("/v1/models", {}, ends=True)
        verdict = await stream.until_it_goes_on(has_body=False)
        before = dict(verdict.headers)
        await stream.send(served=verdict.endpoints[0], response_headers=HttpHeaders())
        assert await stream.read() == "response_headers"
        assert verdict.headers == before
        await stream.call.done_writing()
        assert await stream.read() == ""
        assert await stream.call.code() == grpc.StatusCode.OK


@pytest.mark.parametrize("served", ["first", "another", "a stranger", "nobody said"])
async def test_whoever_served_it_is_fine(target: Target, mode: int, served: str) -> None:
    async with target.envoy.stream(mode) as stream:
        await stream.send_headers("/v1/models", {}, ends=True)
        verdict = await stream.until_it_goes_on(has_body=False)
        told = {"first": verdict.endpoints[0], "another": verdict.endpoints[-1], "a stranger": "192.0.2.1:1"}
        await stream.send(served=told.get(served), response_headers=HttpHeaders())
        assert await stream.read() == "response_headers"
        await stream.call.done_writing()
        assert await stream.read() == ""
        assert await stream.call.code() == grpc.StatusCode.OK


async def test_an_answer_that_is_shown_after_all_is_left_as_it_is(target: Target, mode: int) -> None:
    async with target.envoy.stream(mode) as stream:
        await stream.send_headers("/v1/models", {}, ends=True)
        await stream.until_it_goes_on(has_body=False)
        await stream.send(response_headers=HttpHeaders())
        assert await stream.read() == "response_headers"
        pieces = [b"data: 1\n\n", b"data: 2\n\n"] if mode == DUPLEX else [b"all of it"]
        back = b""
        for place, piece in enumerate(pieces, 1):
            await stream.send(response_body=HttpBody(body=piece, end_of_stream=place == len(pieces)))
            common = (await stream.reply()).response_body.response
            assert common.status == common.CONTINUE
            assert common.body_mutation.HasField("streamed_response") == (mode == DUPLEX)
            back += common.body_mutation.streamed_response.body if mode == DUPLEX else piece
        assert back == b"".join(pieces)
        await stream.send(response_trailers=HttpTrailers())
        assert (await stream.reply()).WhichOneof("response") == "response_trailers"


async def test_who_only_watches_gets_no_answers(target: Target) -> None:
    """In observability mode Envoy has sent the request on already, and reads nothing."""
    async with target.envoy.stream(DUPLEX) as stream:
        await stream.send(observability_mode=True, request_headers=HttpHeaders())
        await stream.send(observability_mode=True, request_body=HttpBody(body=BODY, end_of_stream=True))
        await stream.call.done_writing()
        assert await stream.read() == ""
        assert await stream.call.code() == grpc.StatusCode.OK


async def test_a_stream_that_says_nothing(target: Target) -> None:
    async with target.envoy.stream(DUPLEX) as stream:
        await stream.call.done_writing()
        assert await stream.read() == ""
        assert await stream.call.code() == grpc.StatusCode.OK


async def test_a_client_that_leaves(target: Target) -> None:
    for size in (0, 1, 500_000):
        async with target.envoy.stream(DUPLEX) as stream:
            await stream.send_headers("/v1/completions", {})
            if size:
                await stream.send_body(b"x" * size, 50_000, ends=False)
    assert await still_picks(target)


@pytest.mark.parametrize(
    "messages",
    [
        [ProcessingRequest()],
        [ProcessingRequest(request_body=HttpBody(body=BODY, end_of_stream=True))],
        [ProcessingRequest(request_headers=HttpHeaders())] * 2,
    ],
    ids=["empty", "body first", "headers twice"],
)
async def test_messages_that_no_proxy_sends(target: Target, messages: list[ProcessingRequest]) -> None:
    """An error of the stream, or a refusal; never endpoints, and never silence with the stream held open."""
    async with target.envoy.stream(DUPLEX) as stream:
        for message in messages:
            await stream.call.write(message)
        await stream.call.done_writing()
        try:
            while await stream.read():
                pass
        except grpc.aio.AioRpcError:
            pass
        assert stream.verdict.metadata is None
    assert await still_picks(target)


@pytest.mark.parametrize("payload", [b"\xff", b"\x08", b"\x12\xff\xff\xff\xff\x0f", b"GET / HTTP/1.1\r\n\r\n"])
async def test_bytes_that_are_no_message(target: Target, payload: bytes) -> None:
    call = target.channel.stream_stream(PROCESS)()
    try:
        await call.write(payload)
        async with asyncio.timeout(PATIENCE):
            assert await call.code() != grpc.StatusCode.OK
    finally:
        call.cancel()
    assert await still_picks(target)


@pytest.mark.parametrize("service", ["", "envoy.service.ext_proc.v3.ExternalProcessor", "liveness", "readiness"])
async def test_health(target: Target, service: str) -> None:
    answer = await HealthStub(target.channel).Check(HealthCheckRequest(service=service))
    assert answer.status == HealthCheckResponse.SERVING


async def test_health_of_what_is_not_there(target: Target) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await HealthStub(target.channel).Check(HealthCheckRequest(service="no.such.Service"))
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND
