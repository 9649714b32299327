"""What is said after the pick, streams that break off or say nonsense, and health."""

# pyright: reportAttributeAccessIssue=false, reportMissingModuleSource=false
# Modules made from .proto files have no types.

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import grpc.aio
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, HttpHeaders, HttpTrailers
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from .conftest import Target
from .envoy_side import BUFFERED, DUPLEX, STREAMED

BODY = json.dumps({"model": "m", "prompt": "tell me"}).encode()
"""For streams whose body no picker needs to understand."""
PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


async def still_picks(target: Target) -> bool:
    body = json.dumps({"model": target.model, "prompt": "tell me"}).encode()
    verdict = await target.envoy.request(body)
    return verdict.status == 0 and set(verdict.endpoints) <= target.endpoints


async def test_the_answers_headers_are_left_alone(target: Target, mode: int) -> None:
    async with target.envoy.stream(mode) as stream:
        await stream.send_headers("/v1/models", {}, ends=True)
        verdict = await stream.until_it_goes_on(has_body=False)
        before = dict(verdict.headers)
        await stream.send(served=verdict.endpoints[0], response_headers=HttpHeaders())
        assert await stream.read() == "response_headers"
        assert (verdict.headers, verdict.answer_headers) == (before, [])
        await stream.call.done_writing()
        assert await stream.read() == ""
        assert await stream.call.code() == grpc.StatusCode.OK


@pytest.mark.parametrize("served", ["first", "another", "a stranger", "something else", "nobody said"])
async def test_whoever_served_it_is_fine(target: Target, mode: int, served: str) -> None:
    async with target.envoy.stream(mode) as stream:
        await stream.send_headers("/v1/models", {}, ends=True)
        verdict = await stream.until_it_goes_on(has_body=False)
        told = {"first": verdict.endpoints[0], "another": verdict.endpoints[-1], "a stranger": "192.0.2.1:1"}
        other = {"another-key": "192.0.2.1:1"} if served == "something else" else None
        await stream.send(served=told.get(served), balancing=other, response_headers=HttpHeaders())
        assert await stream.read() == "response_headers"
        await stream.call.done_writing()
        assert await stream.read() == ""
        assert await stream.call.code() == grpc.StatusCode.OK


ANSWERS = {
    "JSON": ("application/json", [b'{"choices": [], ', b'"usage": {"completion_tokens": 10}}']),
    "no JSON": ("application/json", [b"no healthy ", b"upstream"]),
    "events": ("text/event-stream", [b"data: {}\n\n", b'data: {"usage": {"total_tokens": 17}}\n\ndata: [DONE]\n\n']),
    "bytes": ("application/octet-stream", [b"\xff\xfe\x00", b"x" * 100_000]),
}


@pytest.mark.parametrize("ends", ["with the last piece", "without content", "by trailers"])
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=list(ANSWERS))
async def test_an_answer_that_is_shown_after_all_is_left_as_it_is(
    target: Target, answer: tuple[str, list[bytes]], ends: str
) -> None:
    content_type, pieces = answer
    async with target.envoy.stream(DUPLEX) as stream:
        await stream.send_headers("/v1/models", {}, ends=True)
        await stream.until_it_goes_on(has_body=False)
        await stream.send_answer_headers({":status": "200", "content-type": content_type})
        assert await stream.read() == "response_headers"
        shown = [*pieces, b""] if ends == "without content" else pieces
        for place, piece in enumerate(shown, 1):
            last = place == len(shown) and ends != "by trailers"
            await stream.send(response_body=HttpBody(body=piece, end_of_stream=last))
        if ends == "by trailers":
            await stream.send(response_trailers=HttpTrailers())
        back, ended = await stream.answer_body(trailers=ends == "by trailers")
    assert (back, ended) == (b"".join(pieces), ends != "by trailers")


@pytest.mark.parametrize("mode", [BUFFERED, STREAMED], ids=["buffered", "streamed"])
async def test_an_answer_that_is_shown_piece_by_piece_is_left_as_it_is(target: Target, mode: int) -> None:
    async with target.envoy.stream(mode) as stream:
        await stream.send_headers("/v1/models", {}, ends=True)
        await stream.until_it_goes_on(has_body=False)
        await stream.send_answer_headers({":status": "200"})
        assert await stream.read() == "response_headers"
        pieces = [b"all of it"] if mode == BUFFERED else [b"one", b"two", b""]
        for place, piece in enumerate(pieces, 1):
            await stream.send(response_body=HttpBody(body=piece, end_of_stream=place == len(pieces)))
            common = (await stream.reply()).response_body.response
            assert common.status == common.CONTINUE
            assert not common.body_mutation.WhichOneof("mutation")
        await stream.send(response_trailers=HttpTrailers())
        assert (await stream.reply()).WhichOneof("response") == "response_trailers"


async def test_who_shows_the_answer_only(target: Target, mode: int) -> None:
    """Envoy's configuration may leave the request's headers out."""
    async with target.envoy.stream(mode) as stream:
        await stream.send_answer_headers({":status": "200"})
        assert await stream.read() == "response_headers"
        assert stream.verdict.metadata is None


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
    "parts",
    [[{}], [{"request_body": HttpBody(body=BODY, end_of_stream=True)}], [{"request_headers": HttpHeaders()}] * 2],
    ids=["empty", "body first", "headers twice"],
)
async def test_messages_that_no_proxy_sends(target: Target, parts: list[dict[str, Any]]) -> None:
    """An error of the stream, or a refusal; never endpoints, and never silence with the stream held open."""
    async with target.envoy.stream(DUPLEX) as stream:
        for part in parts:
            await stream.send(**part)
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
        async with asyncio.timeout(target.envoy.patience):
            assert await call.code() != grpc.StatusCode.OK
    finally:
        call.cancel()
    assert await still_picks(target)


@pytest.mark.parametrize("service", ["", "envoy.service.ext_proc.v3.ExternalProcessor", "liveness", "readiness"])
async def test_health(target: Target, service: str) -> None:
    answer = await HealthStub(target.health).Check(HealthCheckRequest(service=service))
    assert answer.status == HealthCheckResponse.SERVING


async def test_health_of_what_is_not_there(target: Target) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await HealthStub(target.health).Check(HealthCheckRequest(service="no.such.Service"))
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND
