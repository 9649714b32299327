"""How much text one call of a renderer takes: as much as any prompt of its model, and no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput

from tercet.protocol import DeadlineExceeded
from tercet.router.openai import program_client
from tercet.router.openai.program_client import ProgramClient
from tercet.router.openai.router_renderer import LEAST, LEAST_LISTED, PER_TOKEN, BoundedTexts

GENERATES = SimpleNamespace(max_total_tokens=8192)
LISTS = SimpleNamespace(max_total_tokens=None)


class Renderer:
    """Counts what it is asked for."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        self.calls = 0

    def _tokenize_prompt(self, prompt: Any, params: Any) -> Any:
        self.calls += 1
        return {**prompt, "prompt_token_ids": range(len(prompt["prompt"].split()))}

    def _detokenize_prompt(self, prompt: Any) -> Any:
        self.calls += 1
        return prompt

    async def _tokenize_prompt_async(self, prompt: Any, params: Any) -> Any:
        return self._tokenize_prompt(prompt, params)

    async def _detokenize_prompt_async(self, prompt: Any) -> Any:
        return self._detokenize_prompt(prompt)


def bounded(tokens: int) -> Any:
    """A renderer of a model of this length."""
    kind: Any = type("Bounded", (BoundedTexts, Renderer), {})
    return kind(SimpleNamespace(model_config=SimpleNamespace(max_model_len=tokens)), None)


@pytest.mark.parametrize(("tokens", "most"), [(512, LEAST), (1_000_000, 1_000_000 * PER_TOKEN)])
async def test_what_is_longer_than_any_prompt_is_refused(tokens: int, most: int) -> None:
    renderer = bounded(tokens)
    text, ids = {"prompt": "x" * most}, {"prompt_token_ids": range(most)}
    assert renderer._tokenize_prompt(text, LISTS) == await renderer._tokenize_prompt_async(text, LISTS)
    assert renderer._detokenize_prompt(ids) is await renderer._detokenize_prompt_async(ids) is ids
    calls = renderer.calls
    text, ids = {"prompt": "x" * (most + 1)}, {"prompt_token_ids": range(most + 1)}
    refused = pytest.raises(VLLMValidationError, match=f"{most + 1} (characters|tokens).* {most} ")
    with refused:
        renderer._tokenize_prompt(text, LISTS)
    with refused:
        await renderer._tokenize_prompt_async(text, LISTS)
    with refused:
        renderer._detokenize_prompt(ids)
    with refused:
        await renderer._detokenize_prompt_async(ids)
    assert renderer.calls == calls


@pytest.mark.parametrize(("tokens", "most"), [(512, LEAST_LISTED), (100_000, 200_000)])
async def test_an_answer_does_not_list_more_tokens_than_two_prompts_have(tokens: int, most: int) -> None:
    renderer = bounded(tokens)
    text, longer = {"prompt": "x " * most}, {"prompt": "x " * (most + 1)}
    for params in LISTS, GENERATES:
        assert len(renderer._tokenize_prompt(text, params)["prompt_token_ids"]) == most
    refused = pytest.raises(VLLMValidationError, match=f"{most + 1} tokens.* {most} ")
    with refused:
        renderer._tokenize_prompt(longer, LISTS)
    with refused:
        await renderer._tokenize_prompt_async(longer, LISTS)
    # What is generated from is cut to the model's length afterwards, or refused by it.
    assert len((await renderer._tokenize_prompt_async(longer, GENERATES))["prompt_token_ids"]) == most + 1


# What waits in vLLM's layer for a client that does not read is bounded.


def waiting(tokens: int, logprobs: int = 0) -> RequestOutput:
    at: Any = [dict.fromkeys(range(logprobs))] * tokens if logprobs else None
    choice = CompletionOutput(0, "", [1] * tokens, None, at)
    return RequestOutput("r", None, [1], None, [choice], finished=False)


def client_of(output: object) -> ProgramClient:
    programs: Any = None
    client = ProgramClient(programs)
    processor: Any = SimpleNamespace(request_states={"r": SimpleNamespace(queue=SimpleNamespace(output=output))})
    client.attach(processor)
    return client


@pytest.mark.parametrize("output", [None, waiting(100), waiting(25, 3), ValueError("an error")], ids=str)
async def test_what_is_taken_in_time_goes_on(output: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_client, "MOST_UNTAKEN", 100)
    client_of(output)._require_taken("r")
    client_of(output)._require_taken("somebody else")


@pytest.mark.parametrize("output", [waiting(101), waiting(26, 3)], ids=["tokens", "log probabilities"])
async def test_a_sequence_whose_client_does_not_read_ends(output: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_client, "MOST_UNTAKEN", 100)
    with pytest.raises(DeadlineExceeded, match="does not read"):
        client_of(output)._require_taken("r")
