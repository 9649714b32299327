"""Which prompts are tokenised without a thread."""

from __future__ import annotations

from typing import Any

import pytest

from tercet.router.short_prompts import SHORT, render_short_prompts_here


class Renderer:
    """What of vLLM's renderer is relied on."""

    def _tokenize_prompt(self, prompt: Any, params: Any) -> tuple[str, int, Any]:
        return "here", len(prompt["prompt"]), params

    async def _tokenize_prompt_async(self, prompt: Any, params: Any) -> tuple[str, int, Any]:
        return "thread", len(prompt["prompt"]), params

    def render_cmpl(self, prompts: Any, tok_params: Any, *, prompt_extras: Any) -> tuple[str, Any, Any, Any]:
        return "here", prompts, tok_params, prompt_extras

    async def render_cmpl_async(self, prompts: Any, tok_params: Any, *, prompt_extras: Any) -> Any:
        return "tasks", prompts, tok_params, prompt_extras


@pytest.mark.parametrize(("length", "where"), [(0, "here"), (SHORT, "here"), (SHORT + 1, "thread")])
async def test_by_length(length: int, where: str) -> None:
    renderer = Renderer()
    render_short_prompts_here(renderer)
    assert await renderer._tokenize_prompt_async({"prompt": "x" * length}, "params") == (where, length, "params")


@pytest.mark.parametrize(
    ("prompts", "where"),
    [
        ([{"prompt": "x" * SHORT}], "here"),
        ([{"prompt": "x" * (SHORT + 1)}], "tasks"),
        ([{"prompt": "x"}, {"prompt": "y"}], "tasks"),
        ([{"prompt": "x", "multi_modal_data": {}}], "tasks"),
        ([{"prompt_token_ids": [1]}], "tasks"),
        ([b"embeddings"], "tasks"),
    ],
)
async def test_one_short_text_is_rendered_without_tasks(prompts: list[Any], where: str) -> None:
    renderer = Renderer()
    render_short_prompts_here(renderer)
    assert await renderer.render_cmpl_async(prompts, "params", prompt_extras={}) == (where, prompts, "params", {})
