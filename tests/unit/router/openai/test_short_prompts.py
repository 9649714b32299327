"""Which prompts are tokenised without a thread."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from vllm.renderers.params import ChatParams

from tercet.router.openai.router_renderer import SHORT, ShortPrompts, encoder_of

from .conftest import LiveRouters
from .vocabulary import SPECIAL, tokenizer

TOKENIZER = tokenizer()
ENCODE = encoder_of(TOKENIZER)


class VLLMs:
    """What of vLLM's renderer is relied on."""

    tokenizer: Any = None
    lookups = 0

    def get_eos_token_id(self) -> int:
        self.lookups += 1
        return 7

    def _tokenize_prompt(self, prompt: Any, params: Any) -> tuple[str, int, Any]:
        return "here", len(prompt["prompt"]), params

    async def _tokenize_prompt_async(self, prompt: Any, params: Any) -> tuple[str, int, Any]:
        return "thread", len(prompt["prompt"]), params

    def render_cmpl(self, prompts: Any, tok_params: Any, *, prompt_extras: Any) -> tuple[str, Any, Any, Any]:
        return "here", prompts, tok_params, prompt_extras

    async def render_cmpl_async(self, prompts: Any, tok_params: Any, *, prompt_extras: Any) -> Any:
        return "tasks", prompts, tok_params, prompt_extras

    def render_chat(self, conversations: Any, chat_params: Any, tok_params: Any, *, prompt_extras: Any) -> Any:
        return "here", conversations, chat_params, tok_params, prompt_extras

    async def render_chat_async(
        self, conversations: Any, chat_params: Any, tok_params: Any, *, prompt_extras: Any
    ) -> Any:
        return "tasks", conversations, chat_params, tok_params, prompt_extras


Renderer: Any = type("Renderer", (ShortPrompts, VLLMs), {})


def test_the_end_token_is_looked_up_once() -> None:
    renderer = Renderer()
    renderer.render_short_prompts_here()
    assert [renderer.get_eos_token_id() for _ in range(3)] == [7] * 3
    assert renderer.lookups == 1


@pytest.mark.parametrize(("length", "where"), [(0, "here"), (SHORT, "here"), (SHORT + 1, "thread")])
async def test_by_length(length: int, where: str) -> None:
    renderer = Renderer()
    renderer.render_short_prompts_here()
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
    renderer.render_short_prompts_here()
    assert await renderer.render_cmpl_async(prompts, "params", prompt_extras={}) == (where, prompts, "params", {})


# ---- chats -------------------------------------------------------------------------------------------------------

IMAGE = {"type": "image_url", "image_url": {"url": "http://x"}}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": {"type": "object"}}}


def said(content: Any, **more: Any) -> list[Any]:
    return [{"role": "user", "content": content, **more}]


def nested(depth: int) -> Any:
    found: Any = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("messages", "more", "where"),
    [
        (said("x" * (SHORT // 2)), {}, "here"),
        (said("x" * SHORT), {}, "tasks"),
        (said([{"type": "text", "text": "x"}, "y"]), {}, "here"),
        (said([{"type": "text", "text": "x" * SHORT}]), {}, "tasks"),
        (said([{"type": "text", "text": "x"}, IMAGE]), {}, "tasks"),
        (said([{"type": "text", "text": "x", "image_url": "http://x"}]), {}, "tasks"),
        (said([{"text": "x"}]), {}, "tasks"),
        (said(iter([{"type": "text", "text": "x"}])), {}, "tasks"),
        (said({"text": "x"}), {}, "tasks"),
        (said(None, tool_calls=[{"id": "c", "function": {"name": "paint", "arguments": "{}"}}]), {}, "here"),
        (said(None, tool_calls=iter([])), {}, "tasks"),
        (said("x", name="y" * SHORT), {}, "tasks"),
        (said("x"), {"tools": [TOOL], "add_generation_prompt": True, "documents": None}, "here"),
        (said("x"), {"tools": [TOOL] * 20}, "tasks"),
        (said("x"), {"y" * SHORT: 1}, "tasks"),
        (said("x"), {"numbers": [1] * SHORT}, "tasks"),
        (said("x"), {"nested": nested(5)}, "here"),
        (said("x"), {"nested": nested(5 * SHORT)}, "tasks"),
        (said("x") * SHORT, {}, "tasks"),
        (("x",), {}, "tasks"),
        (["x"], {}, "tasks"),
    ],
)
async def test_one_short_chat_is_rendered_without_tasks(messages: Any, more: dict[str, Any], where: str) -> None:
    renderer, given = Renderer(), SimpleNamespace(chat_template_kwargs=more)
    renderer.render_short_prompts_here()
    args = [messages], given, "params"
    assert await renderer.render_chat_async(*args, prompt_extras={}) == (where, *args, {})


async def test_several_chats_are_rendered_in_tasks() -> None:
    renderer, given = Renderer(), SimpleNamespace(chat_template_kwargs={})
    renderer.render_short_prompts_here()
    found = await renderer.render_chat_async([said("x"), said("y")], given, "params", prompt_extras={})
    assert found[0] == "tasks"


async def test_a_template_of_a_client_does_not_run_on_the_event_loop() -> None:
    renderer, given = Renderer(), SimpleNamespace(chat_template_kwargs={})
    renderer.render_short_prompts_here(trusts_templates=True)
    assert (await renderer.render_chat_async([said("x")], given, "params", prompt_extras={}))[0] == "tasks"
    assert (await renderer.render_cmpl_async([{"prompt": "x"}], "params", prompt_extras={}))[0] == "here"


@pytest.mark.parametrize("content", ["the fox", [{"type": "text", "text": "the"}, {"type": "text", "text": "fox"}]])
@pytest.mark.parametrize("more", [{}, {"tools": [TOOL]}, {"add_generation_prompt": False}])
def test_a_chat_is_rendered_as_vllm_does(routers: LiveRouters, content: Any, more: dict[str, Any]) -> None:
    renderer = routers.chats[0].renderer
    assert renderer._chats_here
    assert type(renderer).render_chat_async is ShortPrompts.render_chat_async

    async def rendered(render: Any) -> Any:
        given = ChatParams(None, "auto", {"add_generation_prompt": True, "continue_final_message": False, **more})
        conversations, prompts = await render([said(content)], given, prompt_extras={"cache_salt": "s"})
        for prompt in prompts:
            del prompt["arrival_time"]
        return conversations, prompts

    async def both() -> Any:
        vllms = cast(Any, super(ShortPrompts, renderer)).render_chat_async
        return await rendered(vllms), await rendered(renderer.render_chat_async)

    expected, found = asyncio.run_coroutine_threadsafe(both(), routers.loop).result(60)
    assert found == expected
    assert found[1][0]["prompt_token_ids"]


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


class Asking(VLLMs):
    """Tokenises as vLLM's does; ``asked`` are the texts that came as far as ``transformers``."""

    def __init__(self) -> None:
        self.tokenizer, self.asked = TOKENIZER, list[str]()

    def _tokenize_prompt(self, prompt: Any, params: Any) -> Any:
        self.asked.append(prompt["prompt"])
        return {"prompt_token_ids": TOKENIZER(prompt["prompt"], **params.get_encode_kwargs()).input_ids, **prompt}


RealRenderer: Any = type("RealRenderer", (ShortPrompts, Asking), {})


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
    renderer.render_short_prompts_here()
    assert await renderer._tokenize_prompt_async(prompt, wanted) == expected
    assert renderer.asked == ([prompt["prompt"]] if asked else [])
