"""Which prompts are tokenised without a thread."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tercet.vllm_plugin.fast_path.short_prompts import SHORT, encoder_of, render_short_prompts_here

from .vocabulary import SPECIAL, tokenizer

TOKENIZER = tokenizer()
ENCODE = encoder_of(TOKENIZER)


class Renderer:
    """What of vLLM's renderer is relied on."""

    tokenizer: Any = None

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


# ---- past transformers -------------------------------------------------------------------------------------------


@given(text=st.text(max_size=40) | st.just(f"the fox{SPECIAL} and the dog"), special=st.booleans())
def test_the_ids_are_those_of_transformers(text: str, special: bool) -> None:
    assert ENCODE is not None
    assert ENCODE(text, special) == list(TOKENIZER(text, add_special_tokens=special).input_ids)


def test_what_others_ask_of_the_tokenizer_changes_nothing() -> None:
    assert ENCODE is not None
    assert len(TOKENIZER("the quick brown fox", truncation=True, max_length=2).input_ids) == 2
    assert ENCODE("the quick brown fox", True) == TOKENIZER("the quick brown fox").input_ids


def test_a_tokenizer_that_does_more_is_asked_itself(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="tercet")
    kind: Any = PreTrainedTokenizerFast
    polite = tokenizer()
    ask = {"__call__": lambda self, text, **options: kind.__call__(self, f"Please: {text}", **options)}
    polite.__class__ = type("Polite", (kind,), ask)
    assert encoder_of(polite) is None
    assert "short prompts cost more" in caplog.text
    assert encoder_of(None) is None
    assert encoder_of(object()) is None


class RealRenderer(Renderer):
    """Tokenises as vLLM's does; ``asked`` are the texts that came as far as ``transformers``."""

    def __init__(self) -> None:
        self.tokenizer, self.asked = TOKENIZER, list[str]()

    def _tokenize_prompt(self, prompt: Any, params: Any) -> Any:
        self.asked.append(prompt["prompt"])
        return {"prompt_token_ids": TOKENIZER(prompt["prompt"], **params.get_encode_kwargs()).input_ids, **prompt}


def params(offsets: Any = False, **options: Any) -> Any:
    return SimpleNamespace(return_token_offsets=offsets, get_encode_kwargs=lambda: options)


FITS: dict[str, Any] = {"truncation": True, "max_length": 100, "add_special_tokens": True}
PROMPT = {"prompt": "the lazy dog"}


@pytest.mark.parametrize(
    ("prompt", "wanted", "asked"),
    [
        (PROMPT, params(**FITS), False),
        (PROMPT, params(truncation=False, max_length=None, add_special_tokens=False), False),
        (PROMPT, params(**{**FITS, "max_length": 2}), True),
        (PROMPT, params(truncation=False, add_special_tokens=False), True),
        (PROMPT, params(**FITS, stride=0), True),
        (PROMPT, params(offsets=True, **FITS), True),
        ({**PROMPT, "cache_salt": "x"}, params(**FITS), True),
    ],
)
async def test_transformers_is_asked_for_the_unusual(prompt: Any, wanted: Any, asked: bool) -> None:
    renderer = RealRenderer()
    expected = RealRenderer()._tokenize_prompt(prompt, wanted)
    render_short_prompts_here(renderer)
    assert await renderer._tokenize_prompt_async(prompt, wanted) == expected
    assert renderer.asked == ([prompt["prompt"]] if asked else [])
