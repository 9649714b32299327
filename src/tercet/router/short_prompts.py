"""Short prompts are tokenised on the event loop.

vLLM hands every prompt to a thread, and to a task for each step on its way. That costs more than tokenising a short one
does, and under load the thread waits for the interpreter's lock for longer than the event loop would be held up.

Relies on a renderer tokenising a text prompt by its ``_tokenize_prompt_async``, which wraps ``_tokenize_prompt``, and
on its ``render_cmpl`` returning what ``render_cmpl_async`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Characters; the built-in model's tokeniser takes 0.5 ms for so many.
SHORT = 1000
# What a prompt of text alone, as vLLM parses it, consists of.
TEXT = {"prompt"}


def render_short_prompts_here(renderer: Any) -> None:
    """Let ``renderer`` leave the event loop for longer prompts only."""
    in_thread, here = renderer._tokenize_prompt_async, renderer._tokenize_prompt
    render_in_tasks, render = renderer.render_cmpl_async, renderer.render_cmpl

    async def tokenize(prompt: Any, params: Any) -> Any:
        return here(prompt, params) if len(prompt["prompt"]) <= SHORT else await in_thread(prompt, params)

    async def render_completion(prompts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if len(prompts) == 1 and _is_short_text(prompts[0]):
            return render(prompts, *args, **kwargs)
        return await render_in_tasks(prompts, *args, **kwargs)

    renderer._tokenize_prompt_async, renderer.render_cmpl_async = tokenize, render_completion


def _is_short_text(prompt: Any) -> bool:
    return isinstance(prompt, dict) and prompt.keys() == TEXT and len(prompt["prompt"]) <= SHORT
