"""Bodies go on as they came, in pieces that Envoy takes, and nothing goes on before its time."""

from __future__ import annotations

import json

import pytest

from .conftest import Target
from .envoy_side import BUFFERED, DUPLEX, LONGEST_PIECE


def body_of(size: int) -> bytes:
    empty = len(json.dumps({"model": "m", "prompt": ""}))
    return json.dumps({"model": "m", "prompt": "x" * (size - empty)}).encode()


@pytest.mark.parametrize("size", [100, 61_999, 62_000, 62_001, 65_536, 200_000, 10_000_000])
async def test_a_body_comes_through_in_full_duplex(target: Target, size: int) -> None:
    body = body_of(size)
    verdict = await target.envoy.request(body)
    assert verdict.body == body
    assert verdict.ended
    assert max(verdict.pieces) < LONGEST_PIECE
    assert verdict.order[0] == "request_headers"


@pytest.mark.parametrize("size", [100, 200_000, 10_000_000])
async def test_a_buffered_body_is_left_alone(target: Target, size: int) -> None:
    verdict = await target.envoy.request(body_of(size), BUFFERED)
    assert verdict.order == ["request_headers", "request_body"]
    assert verdict.pieces == []
    assert verdict.metadata


@pytest.mark.parametrize("chunk", [1, 7, 100])
async def test_many_small_chunks(target: Target, chunk: int) -> None:
    body = body_of(2_000)
    verdict = await target.envoy.request(body, chunk=chunk)
    assert (verdict.body, verdict.ended) == (body, True)


async def test_nothing_goes_on_before_the_bodys_end(target: Target) -> None:
    async with target.envoy.stream(DUPLEX) as stream:
        await stream.send_headers("/v1/completions", {})
        await stream.send_body(body_of(100), 50, ends=False)
        assert await stream.silent()


async def test_an_end_without_content(target: Target) -> None:
    body = body_of(500)
    async with target.envoy.stream(DUPLEX) as stream:
        await stream.send_headers("/v1/completions", {})
        await stream.send_body(body, 200, ends=False)
        await stream.send_body(b"", 1)
        verdict = await stream.until_it_goes_on()
    assert (verdict.body, verdict.ended) == (body, True)


async def test_a_second_end_is_ignored(target: Target) -> None:
    async with target.envoy.stream(DUPLEX) as stream:
        await stream.send_headers("/v1/completions", {})
        await stream.send_body(body_of(500), 500)
        verdict = await stream.until_it_goes_on()
        await stream.send_body(b"", 1)
        assert await stream.silent()
    assert verdict.ended


async def test_trailers_after_a_body(target: Target) -> None:
    body = body_of(500)
    async with target.envoy.stream(DUPLEX) as stream:
        await stream.send_headers("/v1/completions", {})
        await stream.send_body(body, 500, ends=False)
        await stream.send_trailers()
        verdict = await stream.until_it_goes_on(trailers=True)
    assert (verdict.body, verdict.ended, verdict.order[-1]) == (body, False, "request_trailers")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"prompt": '])
async def test_a_body_that_is_no_request_is_the_clients_fault(target: Target, mode: int, body: bytes) -> None:
    verdict = await target.envoy.request(body, mode)
    assert 400 <= verdict.status < 500


async def test_a_refusal_is_json(target: Target, mode: int) -> None:
    verdict = await target.envoy.request(b"{", mode)
    assert verdict.refusal_headers["content-type"].startswith("application/json")
    assert json.loads(verdict.refusal)["error"]["message"]
