"""Tool calls in outputs of any widths, with any text in their arguments, broken or cut: bytes equal to vLLM's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from .conftest import LiveRouters, Step
from .test_agent_streams import CHAT, TOOL, both


def named(calls: Sequence[str], field: str = "arguments") -> list[str]:
    return [f'{{"name": "get_weather", "{field}": {arguments}}}' for arguments in calls]


def hermes(calls: Sequence[str]) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in named(calls))


def kimi(calls: Sequence[str]) -> str:
    found = "".join(
        f"<|tool_call_begin|>functions.get_weather:{at}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for at, arguments in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{found}<|tool_calls_section_end|>"


def xml(calls: Sequence[str]) -> str:
    return "".join(
        f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{arguments}\n</parameter>\n</function>\n</tool_call>"
        for arguments in calls
    )


SAYS: dict[str, Callable[[Sequence[str]], str]] = {
    "hermes": hermes,
    "jamba": lambda calls: f"<tool_calls>[{', '.join(named(calls))}]</tool_calls>",
    "kimi_k2": kimi,
    "llama3_json": lambda calls: "; ".join(named(calls, "parameters")),
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]get_weather[ARGS]{arguments}" for arguments in calls),
    "qwen3_coder": xml,
}
# Without what httpx takes for the end of a line, which is none in a stream of events.
LETTERS = st.characters(codec="utf-8", exclude_characters="\x85\u2028\u2029")
ODD_LETTERS = st.sampled_from('ab "\\{}[]<>/:,\n\t\u00fc\u4f60\u597d\u200d\U0001f680\U0001f469\u0331')
MARKUP = st.sampled_from(["</tool_call>", "<tool_call>", '"}}', "\\u00e9", "<|im_end|>", "null"])
TEXTS = st.text(ODD_LETTERS | LETTERS, max_size=16) | MARKUP
DAYS = st.lists(st.integers(-9, 99) | st.none(), max_size=3)
FIELDS = st.fixed_dictionaries(
    {"city": TEXTS}, optional={"days": DAYS, "more": st.dictionaries(TEXTS, TEXTS, max_size=1)}
)  # fmt: skip
ARGUMENTS = st.builds(json.dumps, FIELDS, ensure_ascii=st.booleans())
ASKED = {"parallel_tool_calls": False, "return_token_ids": True, "include_reasoning": False}


@pytest.mark.parametrize("parser", SAYS)
@given(
    calls=st.lists(ARGUMENTS, min_size=1, max_size=3),
    before=TEXTS,
    dropped=st.none() | st.floats(0, 1),
    kept=st.just(1.0) | st.floats(0, 1),
    widths=st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any),
    ended=st.sampled_from(["stop", "length"]),
    asked=st.sets(st.sampled_from([*ASKED])),
)
@example(
    calls=['{"city": "0\\ud800\\udc00"}'], before="", dropped=None, kept=1.0, widths=[1], ended="stop", asked=set()
)  # an escaped character is cut into halves
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_calls_of_any_text_in_outputs_of_any_widths(
    parsing: LiveRouters, parser: str, calls: list[str], before: str, dropped: float | None, kept: float,
    widths: list[int], ended: str, asked: set[str],
) -> None:  # fmt: skip
    """``dropped`` is where a letter is missing, ``kept`` how much of the answer the model says."""
    parsing.parse_with(tool=parser, reasoning="qwen3")
    text = f"<think>Hm.</think>{before}{SAYS[parser](calls)}"
    if dropped is not None:
        at = int(dropped * (len(text) - 1))
        text = text[:at] + text[at + 1 :]
    tokens = parsing.tokens(text)
    script = outputs(tokens[: int(kept * len(tokens))], widths) or [[]]
    more: dict[str, Any] = {name: ASKED[name] for name in asked}
    both(parsing, CHAT, [*script, ended], free=True, tools=[TOOL], stream_options={"include_usage": True}, **more)


def outputs(tokens: Sequence[int], widths: Sequence[int]) -> list[Step]:
    """The tokens in outputs of these widths, again and again."""
    found, left = list[Step](), list(tokens)
    for width in cycle(widths):
        if not left:
            return found
        found.append(left[:width])
        left = left[width:]
    return found
