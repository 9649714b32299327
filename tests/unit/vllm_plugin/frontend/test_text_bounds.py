"""How much text one call of a renderer takes: as much as any prompt of its model, and no more."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from tercet.vllm_plugin.frontend.text_bounds import LEAST, PER_TOKEN, bound_texts


class Renderer:
    """Counts what it is asked for."""

    def __init__(self) -> None:
        self.calls = 0

    def _tokenize_prompt(self, prompt: Any, params: Any) -> Any:
        self.calls += 1
        return prompt

    def _detokenize_prompt(self, prompt: Any) -> Any:
        self.calls += 1
        return prompt

    async def _tokenize_prompt_async(self, prompt: Any, params: Any) -> Any:
        return self._tokenize_prompt(prompt, params)

    async def _detokenize_prompt_async(self, prompt: Any) -> Any:
        return self._detokenize_prompt(prompt)


@pytest.mark.parametrize(("tokens", "most"), [(512, LEAST), (1_000_000, 1_000_000 * PER_TOKEN)])
async def test_what_is_longer_than_any_prompt_is_refused(tokens: int, most: int) -> None:
    renderer = Renderer()
    bound_texts(renderer, tokens)
    text, ids = {"prompt": "x" * most}, {"prompt_token_ids": range(most)}
    assert renderer._tokenize_prompt(text, None) is await renderer._tokenize_prompt_async(text, None) is text
    assert renderer._detokenize_prompt(ids) is await renderer._detokenize_prompt_async(ids) is ids
    calls = renderer.calls
    text, ids = {"prompt": "x" * (most + 1)}, {"prompt_token_ids": range(most + 1)}
    refused = pytest.raises(VLLMValidationError, match=f"{most + 1} (characters|tokens).* {most} ")
    with refused:
        renderer._tokenize_prompt(text, None)
    with refused:
        await renderer._tokenize_prompt_async(text, None)
    with refused:
        renderer._detokenize_prompt(ids)
    with refused:
        await renderer._detokenize_prompt_async(ids)
    assert renderer.calls == calls
