"""Requests that are too large for a router, or whose pictures are for an engine: refused in words, leaving nothing.

The engines compute in bfloat16, and what they take has room for one picture in that, and not in float32 or as base64.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Generator
from typing import Any

import aiohttp
import pytest

from tercet.protocol import Request, RequestTooLarge
from tercet.wire.client import HttpEngine
from tests.engines.conftest import Fleet, get_json, settled, start_fleet
from tests.engines.moving import ask
from tests.engines.prompts import chat, tokens_of

from .images import SIDE, picture, vision_checkpoint

# Three colours in 16 bits, and what says which pixels there are, in 64.
PICTURE_BYTES = SIDE * SIDE * (3 * 2 + 8)
ENGINE_TAKES = PICTURE_BYTES + 100_000
ROUTER_TAKES = 600_000
FIELDS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Generator[Fleet]:
    config = json.dumps({"kv_connector_extra_config": {"max_request_bytes": ENGINE_TAKES}})
    args = (
        "--program-arg", "min_send=1", "--max-request-bytes", str(ROUTER_TAKES), "--dtype", "bfloat16", "--",
        "--max-model-len", "1024", "--max-num-batched-tokens", "256", "--limit-mm-per-prompt", '{"image": 3}',
        "--kv-transfer-config", config,
    )  # fmt: skip
    running = start_fleet(tmp_path_factory.mktemp("large"), *args, model=str(vision_checkpoint()))
    yield running
    running.stop()


def content(*numbers: int) -> list[dict[str, Any]]:
    pictures = [{"type": "image_url", "image_url": {"url": picture(number)}} for number in numbers]
    return [*pictures, {"type": "text", "text": "What is this?"}]


async def nothing_left(fleet: Fleet) -> None:
    assert (await ask(fleet, "GET", "/sequences"))[1] == []
    for role in ("prefill", "decode"):
        async with HttpEngine(role, fleet.engine_url(role)) as engine:
            await settled(engine)
    assert not any(engine["in_flight"] for engine in get_json(f"{fleet.url}/tercet/v1/engines"))


async def test_a_picture_travels_as_the_engines_compute(fleet: Fleet) -> None:
    model = get_json(f"{fleet.url}/v1/models")["data"][0]["id"]
    for number in (1, 2):
        expected = tokens_of(
            await chat(fleet.engine_url("prefill"), content(number), model=model, cache_salt="alone", **FIELDS)
        )
        for program in ("data_parallel", "disaggregated"):
            headers = {"x-tercet-program": program}
            salt = uuid.uuid4().hex
            answer = await chat(fleet.url, content(number), headers, model=model, cache_salt=salt, **FIELDS)
            assert len(tokens_of(answer)) == FIELDS["max_tokens"]
            if program == "data_parallel":  # the same steps; others round otherwise in bfloat16
                assert tokens_of(answer) == expected
    await nothing_left(fleet)


@pytest.mark.parametrize("stream", [False, True])
async def test_pictures_that_are_too_large_for_an_engine(fleet: Fleet, stream: bool) -> None:
    model = get_json(f"{fleet.url}/v1/models")["data"][0]["id"]
    body = {
        "model": model, "messages": [{"role": "user", "content": content(1, 2)}], "stream": stream,
        "cache_salt": uuid.uuid4().hex, **FIELDS,
    }  # fmt: skip
    url, headers = f"{fleet.url}/v1/chat/completions", {"x-tercet-program": "disaggregated"}
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as answer:
        said = await answer.text()
    if stream:
        assert answer.status == 200
        said = next(line for line in said.splitlines() if "error" in line).removeprefix("data: ")
    else:
        assert answer.status == 413, said
    error = json.loads(said)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"], error["param"], error["type"]) == ("request_too_large", "mm_features", "RequestTooLarge")
    assert "max_request_bytes" in error["message"]
    await nothing_left(fleet)


async def test_a_body_that_is_too_large_for_the_router(fleet: Fleet) -> None:
    model = get_json(f"{fleet.url}/v1/models")["data"][0]["id"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = {"model": model, "prompt": "x" * ROUTER_TAKES}
        async with aiohttp.ClientSession() as session, session.post(f"{fleet.url}{path}", json=body) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["code"], error["type"]) == (413, "request_too_large", "RequestTooLarge")
        assert "--max-request-bytes" in error["message"]
    await nothing_left(fleet)


async def test_a_call_that_is_too_large_for_an_engine(fleet: Fleet) -> None:
    request = Request(seq_id=uuid.uuid4().hex, prompt=(1000,) * ENGINE_TAKES)
    async with HttpEngine("decode", fleet.engine_url("decode")) as engine:
        with pytest.raises(RequestTooLarge, match=r"prompt: too large for decode: .*max_request_bytes") as refused:
            async with engine.prep_recv(request):
                pass
        assert refused.value.param == "prompt"
        with pytest.raises(RequestTooLarge):
            async for _ in engine.start_generate(request):
                pass
    await nothing_left(fleet)
