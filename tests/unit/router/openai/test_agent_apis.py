"""Streams of Messages and Responses on the fast path, beside vLLM's own: the same events but for their random ids."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tercet.vllm_plugin.differences import ENDS_OF_AGENTS_APIS
from tests.longest_wait import wait_until

from .conftest import MODEL, LiveRouters, Step
from .test_agent_streams import TEXT, oddly
from .test_agent_streams import TOOL as CHAT_TOOL
from .test_odd_outputs import ARGUMENTS, SAYS, TEXTS, outputs
from .tool_texts import CITY, HERMES, PARAMETERS

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
PATHS = [MESSAGES, RESPONSES]
RANDOM = re.compile(r'(?<=")(resp_|msg_|rs_|fc_|ctc_|call_|chatcmpl-tool-)?([0-9a-f]{16,32})(?=")')
TIMES = re.compile(r'"(created|completed)_at":\d+')
FUNCTION: dict[str, Any] = {**cast("dict[str, Any]", CHAT_TOOL["function"]), "description": "It looks outside."}
TOOLS = {
    MESSAGES: {"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]},
    RESPONSES: {"type": "function", **FUNCTION},
}
pytestmark = pytest.mark.skipif(ENDS_OF_AGENTS_APIS.is_here, reason="vLLM's own path serves them")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The routes of requests that took the fast path."""
    from tercet.router.openai.fast_path.request_stream import HttpMetrics

    found: list[str] = []
    monkeypatch.setattr(HttpMetrics, "observe", lambda _self, _scope, handler, _seconds: found.append(handler))
    return found


def body(path: str, **more: Any) -> dict[str, Any]:
    if path == MESSAGES:
        asked = {"max_tokens": 300, "messages": [{"role": "user", "content": "Hello"}]}
    else:
        asked = {"max_output_tokens": 300, "input": "Hello"}
    return {"model": MODEL, "stream": True, **asked, **more}


def both(parsing: LiveRouters, path: str, script: Sequence[Step], **more: Any) -> str:
    fast, stock = parsing.ask_both(path, body(path, **more), script, True)
    assert named_in_turn(fast).splitlines() == named_in_turn(stock).splitlines()
    return fast


def named_in_turn(events: str) -> str:
    """The events with random ids by the order in which they come."""
    seen: dict[str, str] = {}

    def in_turn(found: re.Match[str]) -> str:
        return seen.setdefault(found[0], f"{found[1] or ''}{len(seen)}")

    return TIMES.sub(r'"\1_at":0', RANDOM.sub(in_turn, events))


def kinds(events: str) -> list[str]:
    """The types of the events, those in a row once."""
    found = re.findall("^event: (.*)$", events, re.MULTILINE)
    return [kind for at, kind in enumerate(found) if not at or found[at - 1] != kind]


@pytest.mark.parametrize("path", PATHS)
def test_text(parsing: LiveRouters, taken: list[str], path: str) -> None:
    parsing.parse_with()
    events = both(parsing, path, [*oddly(parsing, TEXT), "stop"])
    assert kinds(events)[-1] in ("message_stop", "response.completed")
    wait_until(lambda: taken == [path])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("script", [[[], "stop"], [[1], "length"], [[], [], "length"]])
def test_short_answers(parsing: LiveRouters, path: str, script: Sequence[Step]) -> None:
    parsing.parse_with()
    both(parsing, path, script)
    parsing.parse_with(tool="hermes", reasoning="qwen3")
    both(parsing, path, script)


@pytest.mark.parametrize("stop", [["time"], ["never"], ["\U0001f680"]])
@pytest.mark.parametrize("reasoning", [None, "qwen3"])
def test_stop_strings(parsing: LiveRouters, stop: list[str], reasoning: str | None) -> None:
    parsing.parse_with(reasoning=reasoning)
    both(parsing, MESSAGES, [*oddly(parsing, f"</think>{TEXT}"), "length"], stop_sequences=stop)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ended", ["stop", "length", "error"])
@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9, 1.0])
def test_reasoning_and_tools(parsing: LiveRouters, path: str, ended: str, kept: float) -> None:
    parsing.parse_with(tool="hermes", reasoning="qwen3")
    script = oddly(parsing, f"<think>Hm, {CITY}?</think>Well. {HERMES} So.", 3)
    events = both(parsing, path, [*script[: int(kept * len(script))], ended], tools=[TOOLS[path]])
    if kept == 1.0 and ended == "stop":
        assert ("thinking_delta" if path == MESSAGES else "response.reasoning_text.delta") in events
        assert ("input_json_delta" if path == MESSAGES else "response.function_call_arguments.delta") in events
    if ended == "error":
        assert "the engine broke" in events


CHOICES = [
    (MESSAGES, {"type": "any"}), (MESSAGES, {"type": "tool", "name": "get_weather"}), (MESSAGES, {"type": "none"}),
    (MESSAGES, {"type": "auto", "disable_parallel_tool_use": True}), (RESPONSES, "required"), (RESPONSES, "none"),
    (RESPONSES, {"type": "function", "name": FUNCTION["name"]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "choice"), CHOICES)
def test_tool_choices(parsing: LiveRouters, path: str, choice: Any) -> None:
    parsing.parse_with(tool="hermes", reasoning="qwen3")
    for text in (HERMES, f"[{PARAMETERS}, {PARAMETERS}]"):
        script = [*oddly(parsing, f"<think>Hm.</think>{text}", 5), "stop"]
        both(parsing, path, script, tools=[TOOLS[path]], tool_choice=choice)


@pytest.mark.parametrize(
    "more",
    [{"parallel_tool_calls": False}, {"include_reasoning": False}, {"instructions": "Be \u00fc.", "user": "me"},
     {"tools": [{"type": "custom", "name": "get_weather"}]}, {"store": False, "temperature": 0.5, "top_p": 0.9},
     {"reasoning": {"effort": "low"}, "truncation": "auto", "metadata": {"a": "b"}}],
)  # fmt: skip
def test_forms_of_responses(parsing: LiveRouters, taken: list[str], more: dict[str, Any]) -> None:
    parsing.parse_with(tool="hermes", reasoning="qwen3")
    script = [*oddly(parsing, f"<think>Hm.</think>{HERMES}", 5), "stop"]
    both(parsing, RESPONSES, script, **{"tools": [TOOLS[RESPONSES]], **more})
    wait_until(lambda: taken == [RESPONSES])


@pytest.mark.parametrize(
    "more", [{"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"enable_response_messages": True}]
)
def test_forms_that_are_left_to_vllm(parsing: LiveRouters, taken: list[str], more: dict[str, Any]) -> None:
    parsing.parse_with()
    script = [*parsing.singly("one two"), "stop"]
    assert '"type":"response.completed"' in both(parsing, RESPONSES, script, **more)
    assert taken == []


@pytest.mark.parametrize("path", PATHS)
def test_a_parser_that_fails(parsing: LiveRouters, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.parser.abstract_parser import DelegatingParser

    parsing.parse_with(tool="hermes", reasoning="qwen3")
    parse, calls = DelegatingParser.parse_delta, list[int]()

    def fail(self: Any, **given: Any) -> Any:
        calls.append(1)
        if len(calls) % 9 == 0:
            raise ValueError("it cannot be read")
        return parse(self, **given)

    monkeypatch.setattr(DelegatingParser, "parse_delta", fail)
    events = both(parsing, path, [*parsing.singly(f"<think>{TEXT}"), "stop"], tools=[TOOLS[path]])
    assert kinds(events)[-1] in ("error", "response.failed")
    wait_until(lambda: not parsing.engine.running)


@pytest.mark.parametrize("path", PATHS)
def test_requests_that_vllm_refuses(parsing: LiveRouters, path: str) -> None:
    parsing.engine.expect("refused", [[1], "stop"], free=True)
    answers = [
        parsing.ask(router, path, body(path, temperature=-1.0), [[1], "stop"], True, **{"x-request-id": "refused"})
        for router in ("fast", "stock")
    ]
    assert answers[0] == answers[1]
    assert answers[0][0] == 400


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("parser", ["hermes", "jamba", "kimi_k2", "qwen3_coder"])
@given(
    calls=st.lists(ARGUMENTS, max_size=3),
    before=TEXTS,
    kept=st.just(1.0) | st.floats(0, 1),
    widths=st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any),
    ended=st.sampled_from(["stop", "length"]),
)
@example(calls=['{"city": "0\\ud800\\udc00"}'], before="", kept=1.0, widths=[1], ended="stop")
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_calls_of_any_text_in_outputs_of_any_widths(
    parsing: LiveRouters, path: str, parser: str, calls: list[str], before: str, kept: float, widths: list[int],
    ended: str,
) -> None:  # fmt: skip
    parsing.parse_with(tool=parser, reasoning="qwen3")
    tokens = parsing.tokens(f"<think>Hm.</think>{before}{SAYS[parser](calls)}{before}")
    script = outputs(tokens[: int(kept * len(tokens))], widths) or [[]]
    both(parsing, path, [*script, ended], tools=[TOOLS[path]])


def test_numbers_and_ids_of_a_response_go_together(parsing: LiveRouters) -> None:
    parsing.parse_with(tool="hermes", reasoning="qwen3")
    script = [*parsing.singly(f"<think>Hm.</think>Well. {HERMES}"), "stop"]
    status, events = parsing.ask("fast", RESPONSES, body(RESPONSES, tools=[TOOLS[RESPONSES]]), script, True)
    found = [json.loads(line.removeprefix("data: ")) for line in events.splitlines() if line.startswith("data: ")]
    assert status == 200
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    whole = {item["id"]: item for item in found[-1]["response"]["output"]}
    for event in found:
        if "delta" in event:
            assert event["item_id"] in whole
    assert [item["type"] for item in whole.values()] == ["reasoning", "message", "function_call", "function_call"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "jamba"])
def test_text_after_a_call(parsing: LiveRouters, path: str, parser: str) -> None:
    parsing.parse_with(tool=parser, reasoning="qwen3")
    script = parsing.singly(f"<think>Hm.</think>Well. {SAYS[parser](['{}'])} So it is. {TEXT}")
    both(parsing, path, [*script, "stop"], tools=[TOOLS[path]])
