"""An engine tries what is slow at its first use before it serves, and serves whatever comes of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from tercet.vllm_plugin.core.core_methods import CoreCalls, forget_grammar_backend
from tercet.vllm_plugin.edge import attached_engine
from tercet.vllm_plugin.edge.attached_engine import practise_first_uses


class Core(CoreCalls):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def call(self, method: Any, *args: Any) -> Any:
        self.asked.append(method)


class Client:
    """As much of ``AsyncLLM`` as one request needs; ``fails`` is what its answer begins with."""

    def __init__(self, fails: str = "", has_tokenizer: bool = True) -> None:
        self._fails = fails
        self.params: list[Any] = []
        self.at_once: list[int] = []
        self._running = 0
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(skip_tokenizer_init=not has_tokenizer))

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncGenerator[Any]:
        self.params.append(params)
        self._running += 1
        self.at_once.append(self._running)
        try:
            await asyncio.sleep(0)
            yield await self._answer()
        finally:
            self._running -= 1

    async def _answer(self) -> Any:
        if self._fails == "raises":
            raise ValueError("this model has no structured output")
        if self._fails == "hangs":
            await asyncio.Event().wait()
        choice = SimpleNamespace(token_ids=[1], finish_reason="length", stop_reason=None, logprobs=None)
        return SimpleNamespace(outputs=[choice], num_cached_tokens=0, prompt_logprobs=None)


async def warmed_up(client: Any) -> Core:
    core = Core()
    await asyncio.wait_for(practise_first_uses(client, core, "token"), 60)
    return core


async def test_one_token_is_generated_by_a_grammar_and_the_choice_of_a_backend_is_taken_back() -> None:
    client = Client()
    core = await warmed_up(client)
    params = client.params[-1]
    assert (params.structured_outputs.regex, params.max_tokens) == ("a", 1)
    assert core.asked == [forget_grammar_backend]


@pytest.mark.parametrize(("fails", "why"), [("raises", "no structured output"), ("hangs", "no answer")])
async def test_an_engine_that_cannot_serves_all_else_and_says_so(
    fails: str, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attached_engine, "FIRST_USE_SECONDS", 0.05)
    with caplog.at_level(logging.WARNING):
        core = await warmed_up(Client(fails))
    assert core.asked == [forget_grammar_backend]
    assert why in caplog.text


async def test_sampling_is_tried_for_one_and_for_two_at_once_and_log_probabilities_with_it() -> None:
    client = Client()
    await warmed_up(client)
    wanted = [(each.temperature, each.logprobs) for each in client.params]
    assert wanted == [(1.0, 1), (1.0, None), (1.0, None), (0.0, None)]
    assert client.at_once == [1, 1, 2, 1]


async def test_without_a_tokenizer_no_grammar_is_tried() -> None:
    client = Client(has_tokenizer=False)
    assert (await warmed_up(client)).asked == []
    assert client.params
    assert all(each.structured_outputs is None for each in client.params)


@pytest.mark.parametrize(("configured", "left"), [("auto", None), ("xgrammar", "a backend")])
def test_a_backend_that_the_flags_name_stays(configured: str, left: str | None) -> None:
    config = SimpleNamespace(structured_outputs_config=SimpleNamespace(backend=configured))
    manager = SimpleNamespace(vllm_config=config, backend="a backend", backend_name="a backend")
    core: Any = SimpleNamespace(structured_output_manager=manager)
    forget_grammar_backend(core)
    assert (manager.backend, manager.backend_name) == (left, left)
