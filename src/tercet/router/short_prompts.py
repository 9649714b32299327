"""Short prompts are tokenised on the event loop.

vLLM hands every prompt to a thread. That costs more than tokenising a short one does, and under load the thread waits
for the interpreter's lock for longer than the event loop would be held up.

Relies on a renderer tokenising a text prompt by its ``_tokenize_prompt_async``, which wraps ``_tokenize_prompt``.
"""

from __future__ import annotations

from typing import Any

# Characters; the built-in model's tokeniser takes 0.5 ms for so many.
SHORT = 1000


def tokenize_short_prompts_here(renderer: Any) -> None:
    """Let ``renderer`` leave the event loop for longer prompts only."""
    in_thread, here = renderer._tokenize_prompt_async, renderer._tokenize_prompt

    async def tokenize(prompt: Any, params: Any) -> Any:
        return here(prompt, params) if len(prompt["prompt"]) <= SHORT else await in_thread(prompt, params)

    renderer._tokenize_prompt_async = tokenize
