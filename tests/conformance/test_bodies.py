"""Bodies go on as they came, in pieces that Envoy takes, and nothing goes on before its time."""

from __future__ import annotations

import json

import pytest

from .conftest import Target
from .envoy_side import BUFFERED, DUPLEX, LONGEST_PIECE, PARTIAL, STREAMED


def body_of(target: Target, size: int) -> bytes:
    empty = len(json.dumps({"model": target.model, "prompt": ""}))
    return json.dumps({"model": target.model, "prompt": "x" * max(0, size - empty)}).encode()


@pytest.mark.parametrize("size", [100, 61_999, 62_000, 62_001, 65_536, 200_000, 10_000_000])
async def test_a_body_comes_through_in_full_duplex(target: Target, size: int) -> None:
    body = body_of(target, size)
    verdict = await target.envoy.request(body)
    assert verdict.body == body
    assert verdict.ended
    assert max(verdict.pieces) < LONGEST_PIECE
    assert verdict.order[0] == "request_headers"


@pytest.mark.parametrize("size", [100, 200_000, 10_000_000])
async def test_a_buffered_body_is_left_alone(target: Target, size: int) -> None:
    verdict = await target.envoy.request(body_of(target, size), BUFFERED)
    assert verdict.order == ["request_headers", "request_body"]
    assert verdict.pieces == []
    assert verdict.metadata


@pytest.mark.parametrize("size", [100, 200_000])
async def test_a_body_that_is_cut_is_left_alone(target: Target, size: int) -> None:
    """Of a large body Envoy shows the beginning in this mode, which is no JSON: no reason to refuse it."""
    verdict = await target.envoy.request(body_of(target, size)[: size // 2], PARTIAL)
    assert verdict.order == ["request_headers", "request_body"]
    assert verdict.pieces == []
    assert set(verdict.endpoints) <= target.endpoints


@pytest.mark.parametrize("chunk", [100, 60_000])
async def test_a_streamed_body_is_answered_piece_by_piece(target: Target, chunk: int) -> None:
    """Its headers have gone to the engine by then, so that the endpoints must be in the answer to them."""
    body = body_of(target, 3 * chunk)
    verdict = await target.envoy.request(body, STREAMED, chunk=chunk)
    assert verdict.order == ["request_headers"] + ["request_body"] * 3
    assert verdict.pieces == []
    assert set(verdict.endpoints) <= target.endpoints


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 7, 100])
async def test_many_small_chunks(target: Target, chunk: int) -> None:
    body = body_of(target, 2_000)
    verdict = await target.envoy.request(body, chunk=chunk)
    assert (verdict.body, verdict.ended) == (body, True)


@pytest.mark.parametrize("waits", [True, False], ids=["Envoy waits", "Envoy waits for nobody"])
async def test_nothing_goes_on_before_the_bodys_end(target: Target, waits: bool) -> None:
    async with target.envoy.stream(DUPLEX, waits) as stream:
        await stream.send_headers("/v1/completions", {})
        await stream.send_body(body_of(target, 100), 50, ends=False)
        assert await stream.silent()


async def test_an_end_without_content(target: Target) -> None:
    body = body_of(target, 500)
    async with target.envoy.stream(DUPLEX) as stream:
        await stream.send_headers("/v1/completions", {})
        await stream.send_body(body, 200, ends=False)
        await stream.send_body(b"", 1)
        verdict = await stream.until_it_goes_on()
    assert (verdict.body, verdict.ended) == (body, True)


async def test_a_second_end_is_ignored(target: Target) -> None:
    async with target.envoy.stream(DUPLEX) as stream:
        await stream.send_headers("/v1/completions", {})
        await stream.send_body(body_of(target, 500), 500)
        verdict = await stream.until_it_goes_on()
        await stream.send_body(b"", 1)
        assert await stream.silent()
    assert verdict.ended


async def test_trailers_after_a_body(target: Target) -> None:
    body = body_of(target, 500)
    async with target.envoy.stream(DUPLEX) as stream:
        await stream.send_headers("/v1/completions", {})
        await stream.send_body(body, 500, ends=False)
        await stream.send_trailers()
        verdict = await stream.until_it_goes_on(trailers=True)
    assert (verdict.body, verdict.ended, verdict.order[-1]) == (body, False, "request_trailers")


async def test_trailers_and_no_body(target: Target) -> None:
    """Picked for or refused, and not left waiting for a body."""
    async with target.envoy.stream(DUPLEX) as stream:
        await stream.send_headers("/v1/completions", {})
        await stream.send_trailers()
        verdict = await stream.until_it_goes_on(trailers=True)
    assert set(verdict.endpoints) <= target.endpoints if not verdict.status else 400 <= verdict.status < 500


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"prompt": '])
async def test_a_body_that_is_no_request_is_the_clients_fault(target: Target, reading_mode: int, body: bytes) -> None:
    verdict = await target.envoy.request(body, reading_mode)
    assert 400 <= verdict.status < 500


async def test_a_refusal_is_json(target: Target, reading_mode: int) -> None:
    verdict = await target.envoy.request(b"{", reading_mode)
    assert verdict.refusal_headers["content-type"].startswith("application/json")
    assert json.loads(verdict.refusal)["error"]["message"]
