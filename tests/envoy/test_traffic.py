"""Requests through Envoy: streams, long and large ones, forged headers, bursts, and clients that leave."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from tests.longest_wait import LONGEST_WAIT_S

from .gateway import Gateway

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.verifies("endpoint picker behind Envoy", vllm=False),
]


async def served(at: Gateway) -> dict[str, float]:
    """By which of the endpoints, so far."""
    found = await at.metrics()
    kinds = ("first", "fallback", "other")
    return {kind: found.get(f'tercet_picker_served_total{{endpoint="{kind}"}}', 0.0) for kind in kinds}


async def first_serves_more(at: Gateway, than: float) -> None:
    """Return once the first endpoint has: the picker counts an exchange when it is over, which no client is told."""
    async with asyncio.timeout(LONGEST_WAIT_S):
        while (await served(at))["first"] <= than:
            await asyncio.sleep(0.02)


async def test_a_completion(shared: Gateway) -> None:
    before = await served(shared)
    status, answer = await shared.complete()
    assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
    await first_serves_more(shared, before["first"])
    assert (await served(shared))["other"] == before["other"]


async def test_a_long_stream_comes_as_it_is_generated(shared: Gateway) -> None:
    """What has been generated is there while the engine still works on the rest."""
    events: list[bytes] = []
    async with shared.streamed("tell me", 300) as answer:
        async for line in answer.content:
            if line.startswith(b"data: "):
                events.append(line)
                if len(events) in (1, 50):
                    assert any([await shared.running(name) for name in shared.engines]), "it comes when all is done"
    assert events[-1].strip() == b"data: [DONE]"
    assert len(events) == 301


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
    answers = [asyncio.create_task(shared.complete(f"{n}" * 300, max_tokens=1000)) for n in range(9)]
    try:
        async with asyncio.timeout(LONGEST_WAIT_S):
            while not all([await shared.running(name) for name in shared.engines]):
                assert not any(answer.done() for answer in answers), "no moment with some on each engine"
                await asyncio.sleep(0.02)
    finally:
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)


async def test_clients_that_leave_end_their_generation(shared: Gateway) -> None:
    async with shared.streamed("tell me", 4000) as answer:
        await answer.content.readline()
        answer.close()
    async with asyncio.timeout(LONGEST_WAIT_S):
        while any([await shared.running(name) for name in shared.engines]):
            await asyncio.sleep(0.05)
    with pytest.raises(asyncio.TimeoutError):
        await shared.session.post(
            "/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": 4000},
            timeout=aiohttp.ClientTimeout(total=0.3),
        )  # fmt: skip
    async with asyncio.timeout(LONGEST_WAIT_S):
        while any([await shared.running(name) for name in shared.engines]):
            await asyncio.sleep(0.05)
