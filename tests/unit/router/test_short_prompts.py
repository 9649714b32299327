"""Which prompts are tokenised without a thread."""

from __future__ import annotations

from typing import Any

import pytest

from tercet.router.short_prompts import SHORT, tokenize_short_prompts_here


class Renderer:
    """What of vLLM's renderer is relied on."""

    def _tokenize_prompt(self, prompt: Any, params: Any) -> tuple[str, int, Any]:
        return "here", len(prompt["prompt"]), params

    async def _tokenize_prompt_async(self, prompt: Any, params: Any) -> tuple[str, int, Any]:
        return "thread", len(prompt["prompt"]), params


@pytest.mark.parametrize(("length", "where"), [(0, "here"), (SHORT, "here"), (SHORT + 1, "thread")])
async def test_by_length(length: int, where: str) -> None:
    renderer = Renderer()
    tokenize_short_prompts_here(renderer)
    assert await renderer._tokenize_prompt_async({"prompt": "x" * length}, "params") == (where, length, "params")
