"""Requests through Envoy: streams, long and large ones, forged headers, bursts, and clients that leave."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from .gateway import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def served(at: Gateway) -> dict[str, float]:
    """By which of the endpoints, so far."""
    found = await at.metrics()
    kinds = ("first", "fallback", "other")
    return {kind: found.get(f'tercet_picker_served_total{{endpoint="{kind}"}}', 0.0) for kind in kinds}


async def first_serves_more(at: Gateway, than: float) -> None:
    """Return once the first endpoint has: the picker counts an exchange when it is over, which no client is told."""
    async with asyncio.timeout(30):
        while (await served(at))["first"] <= than:
            await asyncio.sleep(0.02)


async def test_a_completion(shared: Gateway) -> None:
    before = await served(shared)
    status, answer = await shared.complete()
    assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
    await first_serves_more(shared, before["first"])
    assert (await served(shared))["other"] == before["other"]


async def test_a_long_stream_comes_token_by_token(shared: Gateway) -> None:
    events: list[bytes] = []
    gaps: list[float] = []
    loop = asyncio.get_running_loop()
    async with shared.streamed("tell me", 60) as answer:
        last = loop.time()
        async for line in answer.content:
            if line.startswith(b"data: "):
                events.append(line)
                gaps.append(loop.time() - last)
                last = loop.time()
    assert events[-1].strip() == b"data: [DONE]"
    assert len(events) == 61
    assert sum(gap > 0.001 for gap in gaps) > 30, "the answer came in one piece"


@pytest.mark.parametrize("size", [200_000, 10_000_000])
async def test_large_bodies(shared: Gateway, size: int) -> None:
    status, answer = await shared.complete([1, 2, 3], user="x" * size)
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 3)


async def test_a_body_in_many_chunks(shared: Gateway) -> None:
    body = json.dumps({"model": "m", "prompt": "x" * 3000, "max_tokens": 2}).encode()

    async def chunks():
        for start in range(0, len(body), 7):
            yield body[start : start + 7]
            if start % 700 == 0:
                await asyncio.sleep(0.001)

    async with shared.session.post("/v1/completions", data=chunks()) as answer:
        assert answer.status == 200, await answer.text()


async def test_a_request_without_a_body(shared: Gateway) -> None:
    async with shared.session.get("/v1/models") as answer:
        assert (await answer.json())["data"][0]["id"] == "m"


async def test_refusals_of_picker_and_engine_reach_the_client(shared: Gateway) -> None:
    async with shared.session.post("/v1/completions", data=b"{") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "bad_request")
    status, answer = await shared.complete(model="another")
    assert (status, answer["error"]["param"]) == (400, "model")


async def test_a_client_does_not_choose_the_endpoint(shared: Gateway) -> None:
    before = await served(shared)
    headers = {"x-gateway-destination-endpoint": "192.0.2.1:1", "x-prefiller-host-port": "192.0.2.1:1"}
    status, _ = await shared.complete(headers=headers)
    assert status == 200
    await first_serves_more(shared, before["first"])


async def test_a_burst_is_spread(shared: Gateway) -> None:
    answers = [asyncio.create_task(shared.complete(f"{n}" * 300, max_tokens=100)) for n in range(9)]
    async with asyncio.timeout(30):
        while not all([await shared.running(name) for name in shared.engines]):
            assert not all(answer.done() for answer in answers), "no moment with some on each engine"
            await asyncio.sleep(0.02)
    assert {status for status, _ in await asyncio.gather(*answers)} == {200}


async def test_clients_that_leave_end_their_generation(shared: Gateway) -> None:
    async with shared.streamed("tell me", 4000) as answer:
        await answer.content.readline()
        answer.close()
    async with asyncio.timeout(10):
        while any([await shared.running(name) for name in shared.engines]):
            await asyncio.sleep(0.05)
    with pytest.raises(asyncio.TimeoutError):
        await shared.session.post(
            "/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": 4000},
            timeout=aiohttp.ClientTimeout(total=0.3),
        )  # fmt: skip
    async with asyncio.timeout(10):
        while any([await shared.running(name) for name in shared.engines]):
            await asyncio.sleep(0.05)
