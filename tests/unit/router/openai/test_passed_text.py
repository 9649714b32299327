"""What is told without the parser is what the parser would tell: the same deltas for any text in any outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tercet.router.openai.fast_path.parsed_text import COUNTED_AT_ONCE

from .conftest import parser_of
from .tool_texts import CALL, CITY, HERMES, KIMI, XML

TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "get_weather"}}]}
CALL_ID = re.compile(rb'"id":"[^"]+"')
WORDS = " The weather there is fine, so that a walk along the river would be a good idea in the afternoon."
PARSERS = [
    ("hermes", "qwen3"), ("hermes", None), (None, "qwen3"), ("hermes", "deepseek_r1"), ("qwen3_coder", "qwen3"),
    ("jamba", "qwen3"), ("kimi_k2", "kimi_k2"), ("minimax_m2", "minimax_m2"), ("mistral", "mistral"),
]  # fmt: skip
PIECES = (
    WORDS, CITY, HERMES, XML, KIMI, CALL, "<think>", "</think>", "<tool_call>", "</tool_call>", "<", "</", ">",
    "tool_call>", "{", "}", "}}", '"', "\\", "\n", "  ", "[", '{"name": "get_weather", "arguments": ', '{"city": "x',
    "1", ", ", '"arguments": ', "<|im_end|>", "functions.get_weather:0",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join)


@pytest.fixture(scope="module")
def tokenizer(agent_model: str) -> Any:
    """With the special tokens that parsers look for."""
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(agent_model)


class Told:
    """The deltas of two parsers for the same outputs: one reads all of them, the other what is not passed on."""

    def __init__(self, tokenizer: Any, tool: str | None, reasoning: str | None, **asked: Any) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        from tercet.router.openai.fast_path.parsed_text import ParsedDeltas, Parsing
        from tercet.router.openai.fast_path.sse_chunks import CHAT_FORMAT, ChunkWriter, installed

        made = parser_of(tokenizer, tool, reasoning)
        assert made is not None
        messages = [{"role": "user", "content": "Hello"}]
        self.request = ChatCompletionRequest.model_validate({"model": "m", "messages": messages, **asked})
        declared: Any = self.request.tools
        self.alone, self.parser = made(tokenizer, declared), made(tokenizer, declared)
        self.reads = 0
        is_shown = self.request.include_reasoning
        parsing = Parsing(self.request, lambda: self.parser, False, False, not is_shown, True, True)
        self.deltas = ParsedDeltas(parsing)
        self._events = ChunkWriter(installed(CHAT_FORMAT), "c", 0, "m").choice(0)
        self._prompt = tokenizer.encode("Hello", add_special_tokens=False)

    def both(self, text: str, token_ids: list[int], *, finished: bool) -> tuple[bytes | None, bytes | None]:
        from tercet.router.openai.fast_path.sse_chunks import delta_json

        delta = self.alone.parse_delta(
            delta_text=text, delta_token_ids=token_ids, request=self.request, prompt_token_ids=self._prompt,
            finished=finished,
        )  # fmt: skip
        expected = None if delta is None else delta_json(delta)
        return expected, self.passed(text, token_ids, finished=finished)

    def passed(self, text: str, token_ids: list[int], *, finished: bool) -> bytes | None:
        from tercet.router.openai.fast_path.parsed_text import Passed

        match None if finished else self.deltas.passes(text, token_ids):
            case Passed.CONTENT:
                return self._events.text_delta(text)
            case Passed.REASONING:
                return self._events.reasoning_delta(text)
            case Passed.ARGUMENTS:
                return self._events.arguments_delta(self.deltas.call, text)
            case None:
                self.reads += 1
                delta = self.deltas.read(text, token_ids, self._prompt, finished=finished)
                return None if delta is None else self._events.parsed_delta(delta)


def outputs(tokenizer: Any, text: str, widths: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Texts and tokens of outputs of these widths, again and again."""
    tokens, found, said = tokenizer.encode(text, add_special_tokens=False), list[tuple[str, list[int]]](), ""
    at = 0
    for width in cycle(widths):
        if at >= len(tokens):
            return found
        whole = tokenizer.decode(tokens[: at + width]).removesuffix("\N{REPLACEMENT CHARACTER}")
        found.append((whole[len(said) :], tokens[at : at + width]))
        said, at = max(said, whole, key=len), at + width
    return found


@pytest.mark.parametrize(("tool", "reasoning"), PARSERS)
@given(
    text=TEXTS,
    widths=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    ends=st.booleans(),
    asked=st.sampled_from([{}, {"include_reasoning": False}, {"tool_choice": "none"}]),
)
@example(text=f"<think>{WORDS}</think>{WORDS}{HERMES}{WORDS}", widths=[1], ends=True, asked={})
@example(text=f"<think>{WORDS}</think>{HERMES}", widths=[1, 3], ends=False, asked={})
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_the_deltas_are_the_same(
    tokenizer: Any,
    tool: str | None,
    reasoning: str | None,
    text: str,
    widths: list[int],
    ends: bool,
    asked: dict[str, Any],
) -> None:
    tools = {"tools": [{"type": "function", "function": {"name": "get_weather"}}]} if tool else {}
    told = Told(tokenizer, tool, reasoning, **(asked if tool or "tool_choice" not in asked else {}), **tools)
    pieces = outputs(tokenizer, text, widths)
    for at, (piece, token_ids) in enumerate(pieces):
        expected, found = told.both(piece, token_ids, finished=ends and at == len(pieces) - 1)
        same = (None if one is None else CALL_ID.sub(b'"id":"x"', one) for one in (expected, found))
        assert len({*same}) == 1, (piece, expected, found)
    assert told.parser.count_reasoning_tokens(tuple(told.deltas.token_ids)) == told.alone.count_reasoning_tokens(
        tuple(token for _, token_ids in pieces for token in token_ids)
    )


@pytest.mark.parametrize(
    ("tool", "reasoning", "tools", "text", "most"),
    [
        ("hermes", "qwen3", TOOLS, f"<think>{WORDS * 4}", 3),
        ("hermes", "qwen3", {}, f"<think></think>{WORDS * 4}", 6),
        ("hermes", "qwen3", TOOLS, f"<think></think>{WORDS * 4}", 6),
        (None, "qwen3", {}, f"<think></think>{WORDS * 4}", 6),
        ("qwen3_coder", "qwen3", TOOLS, f"<think></think>{WORDS * 4}", 8),
        ("hermes", None, TOOLS, f"<tool_call>\n{json.dumps({'name': 'a', 'arguments': {'text': WORDS * 4}})}", 25),
    ],
)
def test_most_texts_are_passed_on(
    tokenizer: Any, tool: str | None, reasoning: str | None, tools: dict[str, Any], text: str, most: int
) -> None:
    told, pieces = Told(tokenizer, tool, reasoning, **tools), outputs(tokenizer, text, [1])
    for piece, token_ids in pieces:
        told.both(piece, token_ids, finished=False)
    assert told.reads <= most < len(pieces) / 2


@pytest.mark.parametrize(("tool", "text"), [("hermes", f"{WORDS * 6}{HERMES}"), ("qwen3_coder", f"{WORDS * 6}{XML}")])
def test_vllms_metric_counts_what_was_passed_on(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tool: str, text: str
) -> None:
    from vllm.parser import abstract_parser

    from tercet.router.openai.fast_path.parsed_text import ToolParserCalls

    counted: list[dict[bool, int]] = [{False: 0, True: 0}, {False: 0, True: 0}]
    whose = 0

    def count(_self: Any, times: int, is_tool_called: bool, _is_streaming: bool, _request: object) -> None:
        counted[whose][is_tool_called] += times

    monkeypatch.setattr(ToolParserCalls, "count", count)
    monkeypatch.setattr(abstract_parser, "record_tool_parser_invocation", ToolParserCalls())
    told, pieces = Told(tokenizer, tool, None, **TOOLS), outputs(tokenizer, text, [1])
    for piece, token_ids in pieces:
        whose = 0
        told.alone.parse_delta(
            delta_text=piece, delta_token_ids=token_ids, request=told.request, prompt_token_ids=[1], finished=False
        )
        whose = 1
        told.passed(piece, token_ids, finished=False)
    told.deltas.end()
    assert told.reads < len(pieces)
    assert counted[0] == counted[1]
    assert counted[0][False] > COUNTED_AT_ONCE


def test_a_parser_with_a_reader_of_another_kind_reads_all(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.parser.abstract_parser import DelegatingParser

    read = DelegatingParser.parse_delta
    monkeypatch.setattr(DelegatingParser, "parse_delta", lambda self, **given: read(self, **given))
    told, pieces = Told(tokenizer, "hermes", "qwen3"), outputs(tokenizer, f"<think>{WORDS}", [1])
    for piece, token_ids in pieces:
        told.both(piece, token_ids, finished=False)
    assert told.reads == len(pieces)
