"""Streams of agents on the fast path, beside vLLM's own: tools, reasoning, log probabilities, several choices."""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol import Output, TokenLogprob
from tercet.vllm_plugin.differences import OFFSETS_OF_SENT_TEXT
from tests.longest_wait import LONGEST_WAIT_S, wait_until

from .conftest import CHAT, COMPLETIONS, CREATED, LiveRouters, Step, body_of
from .tool_texts import ARGUMENTS, CITY, HERMES, PARAMETERS, said

TEXT = f'Once "upon" a\ttime in {CITY} \u4f60\u597d \U0001f469\u200d\U0001f4bb'
CALL_ID = re.compile(r'"id":"(chatcmpl-tool-|call_|functions\.)?[0-9A-Za-z_:.-]+","type"')
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}},
    },
}
USAGE = {"include_usage": True, "continuous_usage_stats": True}


@pytest.fixture(scope="module")
def routers(agent_routers: LiveRouters) -> LiveRouters:
    """Those of a model that calls tools."""
    return agent_routers


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How the outputs of streams on the fast path were written: here, or by vLLM's output processor."""
    from tercet.router.openai.fast_path.request_stream import ChoiceStream

    found: list[str] = []
    for name in ("_write_text", "_write_parsed", "_write_chunk", "_process"):
        write = getattr(ChoiceStream, name)

        def note(self: Any, *args: Any, name: str = name, write: Any = write) -> Any:
            found.append(name)
            return write(self, *args)

        monkeypatch.setattr(ChoiceStream, name, note)
    return found


def both(routers: LiveRouters, path: str, script: Sequence[Step], *, free: bool = False, **more: Any) -> str:
    fast, stock = routers.ask_both(path, body_of(path, **more), script, free)
    assert by_choice(fast) == by_choice(stock)
    return fast


def by_choice(events: str) -> dict[Any, list[str]]:
    """Events by choice: those of several come in any order. The ids of calls are random."""
    found: dict[Any, list[str]] = defaultdict(list)
    for line in CALL_ID.sub('"id":"x","type"', events).splitlines():
        event = {} if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))
        found[next((choice["index"] for choice in event.get("choices", ())), "all")].append(line)
    return found


def oddly(routers: LiveRouters, text: str, seed: int = 0) -> list[Step]:
    """Outputs of one to four tokens."""
    chosen, tokens, steps = random.Random(seed), routers.tokens(text), list[Step]()
    while tokens:
        width = chosen.choice((1, 1, 2, 4))
        steps.append(tokens[:width])
        tokens = tokens[width:]
    return steps


# ---- what chunks have beside their text ----------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "more",
    [{"return_token_ids": True}, {"stream_options": USAGE}, {"return_token_ids": True, "stream_options": USAGE},
     {"stream_options": {"continuous_usage_stats": True}}, {"return_prompt_text": True}],
)  # fmt: skip
def test_token_ids_and_counts(routers: LiveRouters, written: list[str], path: str, more: dict[str, Any]) -> None:
    script = [*oddly(routers, TEXT), "length"]
    both(routers, path, script, **more)
    assert len(written) - written.count("_process") == len(script) - 3  # all but the first and the last output


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("more", [{"return_token_ids": True}, {"stream_options": USAGE}])
@pytest.mark.parametrize("stop", [["time"], ["never"]])
def test_stop_strings(routers: LiveRouters, path: str, more: dict[str, Any], stop: list[str]) -> None:
    both(routers, path, [*oddly(routers, TEXT), "length"], stop=stop, **more)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_outputs_without_tokens(routers: LiveRouters, path: str) -> None:
    script = [[], routers.tokens("a b"), [], routers.tokens(" c"), [], "stop"]
    both(routers, path, script, free=True, return_token_ids=True, stream_options=USAGE)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("more", [{}, {"return_token_ids": True, "stream_options": USAGE}, {"stop": ["time"]}])
def test_several_choices(routers: LiveRouters, written: list[str], path: str, more: dict[str, Any]) -> None:
    events = both(routers, path, [*routers.singly(TEXT), "length"], free=True, n=3, **more)
    assert by_choice(events).keys() == {0, 1, 2, "all"}
    assert written
    assert not routers.processor.request_states
    assert not routers.processor.parent_requests


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_error_ends_all_choices(routers: LiveRouters, path: str) -> None:
    found = [
        routers.ask(router, path, body_of(path, n=2), [*routers.singly("it went well"), "error"], True)
        for router in ("fast", "stock")
    ]
    assert found[0][1].splitlines()[-2:] == found[1][1].splitlines()[-2:]
    assert "the engine broke" in found[0][1]
    assert not routers.engine.running
    assert not routers.processor.parent_requests


# ---- log probabilities ---------------------------------------------------------------------------------------

OWN, OTHER = (TokenLogprob(7, -0.5, 1),), (TokenLogprob(8, -0.5, 1),)
PARTS = "\u4f60 \U0001f680\U0001f469\u200d\U0001f4bb z\u0331 <|im_start|> end"


@pytest.mark.parametrize("top", [0, 1, 4])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("width", [1, 3])
def test_log_probabilities(routers: LiveRouters, written: list[str], path: str, top: int, width: int) -> None:
    tokens = routers.tokens(TEXT + PARTS)
    script: list[Step] = [tokens[at : at + width] for at in range(0, len(tokens), width)]
    asked: dict[str, Any] = {"logprobs": top} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": top}
    events = both(routers, path, [*script, "stop"], stream_options=USAGE, **asked)
    assert '"logprobs":{' in events
    takes_vllms_path = path == COMPLETIONS and OFFSETS_OF_SENT_TEXT.is_here
    assert written.count("_write_chunk") == (0 if takes_vllms_path else len(script) - 2)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("kept", [1, 2, 3, None])
def test_the_first_and_the_last_log_probabilities_are_of_parts_of_characters(
    routers: LiveRouters, monkeypatch: pytest.MonkeyPatch, path: str, kept: int | None
) -> None:
    from tercet.router.openai.fast_path.token_texts import LogprobChunks

    asked: dict[str, Any] = {"logprobs": 2} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 2}
    tokens = routers.tokens("\U0001f680 and \U0001f680")[:-1][:kept]
    monkeypatch.delattr(LogprobChunks, "of_result")  # no result's are made of vLLM's objects
    both(routers, path, [*([token] for token in tokens), "length"], **asked)


@pytest.mark.parametrize(
    "more",
    [{"return_tokens_as_token_ids": True}, {"stop": ["upon"]}, {"stop": ["never"]}, {"n": 2}, {"stop": ["\U0001f680"]}],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_log_probabilities_and_more(routers: LiveRouters, path: str, more: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"logprobs": 2} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 2}
    both(routers, path, [*oddly(routers, TEXT + PARTS), "stop"], free=True, **asked, **more)


@pytest.mark.parametrize(
    ("positions", "takes"),
    [(None, False), ((), False), (((),), False), ((OTHER,), False), ((OWN,), True), ((OWN, ()), False),
     (((), OWN), False), ((OWN, OWN), False)],
)  # fmt: skip
def test_each_token_has_its_own_log_probability(positions: Any, takes: bool) -> None:
    from tercet.router.openai.fast_path.token_texts import LogprobChunks

    assert LogprobChunks.takes(LogprobChunks.__new__(LogprobChunks), Output((7,), logprobs=positions)) == takes


@given(value=st.floats(-9999.0, 1.0, width=32), text=st.text())
def test_numbers_are_written_as_vllm_does(value: float, text: str) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionLogProb

    from tercet.router.openai.fast_path.sse_chunks import encode
    from tercet.router.openai.fast_path.token_texts import piece_of

    piece, octets = piece_of(text), list(text.encode("utf-8", errors="replace"))
    stock = ChatCompletionLogProb(token=text, logprob=value, bytes=octets).model_dump_json(exclude_unset=True)
    assert piece.before + encode(value) + piece.after + b"}" == stock.encode()


@given(
    ranks=st.lists(st.integers(0, 12), max_size=8, unique=True), own=st.integers(0, 20),
    most=st.none() | st.integers(-1, 9), is_sorted=st.booleans(),
)  # fmt: skip
def test_values_are_in_the_order_of_ranks(ranks: list[int], own: int, most: int | None, is_sorted: bool) -> None:
    from tercet.router.openai.fast_path.token_texts import values_by_token

    others = [rank for rank in (sorted(ranks) if is_sorted else ranks) if rank != own]
    position = [TokenLogprob(100, -0.5, own), *(TokenLogprob(rank, -float(rank), rank) for rank in others)]
    wanted = [rank for rank in sorted(others) if rank and (most is None or most < 0 or rank <= most)]
    assert [*values_by_token(position, most).items()] == [(100, -0.5), *((rank, -float(rank)) for rank in wanted)]


# ---- headers -------------------------------------------------------------------------------------------------


def test_browsers(routers: LiveRouters, written: list[str]) -> None:
    found: list[Any] = []
    for router in ("fast", "stock"):
        routers.engine.expect("browser", [*routers.singly("one two three"), "stop"], free=True)
        headers = {"x-request-id": "browser", "origin": "http://browser"}
        answer = httpx.post(routers.urls[router] + CHAT, json=body_of(CHAT), headers=headers, timeout=LONGEST_WAIT_S)
        found.append((dict(answer.headers, date=""), CREATED.sub("", answer.text)))
    assert found[0] == found[1]
    assert found[0][0]["access-control-allow-origin"] == "http://browser"
    assert found[0][0]["x-request-id"] == "browser"
    assert written


# ---- parsers -------------------------------------------------------------------------------------------------


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("choice", ["auto", "required", "none", NAMED])
@pytest.mark.parametrize("parallel", [None, False])
@pytest.mark.parametrize("parser", ["hermes", "jamba"])
def test_tool_choices(
    parsing: LiveRouters, written: list[str], parser: str, choice: Any, parallel: bool | None
) -> None:
    parsing.parse_with(tool=parser)
    text = said(parser)
    if parser == "jamba" and choice not in ("auto", "none"):  # vLLM makes its model say JSON then
        text = f"[{PARAMETERS}, {PARAMETERS}]" if choice == "required" else ARGUMENTS
    more = {} if parallel is None else {"parallel_tool_calls": parallel}
    events = both(
        parsing, CHAT, [*oddly(parsing, text), "stop"], free=True, tools=[TOOL], tool_choice=choice, **more
    )  # fmt: skip
    assert ('"tool_calls":[{' in events) == (choice != "none")
    assert ('"finish_reason":"tool_calls"' in events) == (choice in ("auto", "required"))
    assert "_write_parsed" in written


@pytest.mark.parametrize(
    "more", [{}, {"include_reasoning": False}, {"return_token_ids": True}, {"stream_options": USAGE}]
)
def test_reasoning_and_tools(parsing: LiveRouters, written: list[str], more: Any) -> None:
    parsing.parse_with(tool="hermes", reasoning="qwen3")
    script = [*oddly(parsing, f"<think>Hm, {CITY}?</think>Well. {HERMES}", 3), "stop"]
    events = both(parsing, CHAT, script, free=True, tools=[TOOL], **more)
    assert '"finish_reason":"tool_calls"' in events
    assert ('"reasoning":"' in events) == ("include_reasoning" not in more)
    is_alone = more in ({}, {"include_reasoning": False})
    assert ("_write_parsed" if is_alone else "_write_chunk") in written


def tool_parsers() -> list[str]:
    from vllm.tool_parsers import ToolParserManager

    return sorted(ToolParserManager.list_registered())


def reasoning_parsers() -> list[str]:
    from vllm.reasoning import ReasoningParserManager

    return sorted(ReasoningParserManager.list_registered())


# They need a package, or a template in the tokenizer, which are not here.
UNTRIED = {"beam", "cohere_command3", "cohere_command4", "hf"}


def lacks_rust(tool: str) -> bool:
    """Whether the parser is written in Rust, and the build of vLLM has no such part, as that of 0.31 for CPUs."""
    rust = "vllm.tool_parsers.rust_tool_parser"  # not in each version
    if find_spec(rust) is None or find_spec("vllm._rust_tool_parser") is not None:
        return False
    from vllm.tool_parsers import ToolParserManager

    return issubclass(ToolParserManager.get_tool_parser(tool), import_module(rust).RustToolParser)


def try_parser(parsing: LiveRouters, script: Sequence[Step], **names: str) -> str:
    (name,) = names.values()
    if "tool" in names and lacks_rust(name):
        pytest.skip(f"{name} is not part of this build")
    try:
        parsing.parse_with(**names)
    except (TypeError, ImportError):
        assert name in UNTRIED
        pytest.skip(f"{name} cannot be used here")
    assert name not in UNTRIED
    more = {"tools": [TOOL]} if "tool" in names else {}
    return both(parsing, CHAT, script, free=True, stream_options={"include_usage": True}, **more)


@pytest.mark.parametrize("name", tool_parsers())
def test_each_tool_parser(parsing: LiveRouters, written: list[str], name: str) -> None:
    try_parser(parsing, [*oddly(parsing, said(name), len(name)), "stop"], tool=name)
    assert written


@pytest.mark.parametrize("name", reasoning_parsers())
def test_each_reasoning_parser(parsing: LiveRouters, written: list[str], name: str) -> None:
    text = f"<think>Is it {CITY}?</think>\n\nIt is: {CITY}."
    try_parser(parsing, [*oddly(parsing, text, len(name)), "stop"], reasoning=name)
    assert written


@pytest.mark.parametrize("n", [1, 2])
def test_each_choice_has_one_parser(parsing: LiveRouters, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    parsing.parse_with(tool="hermes", reasoning="qwen3")
    make, made = OpenAIServingChat._make_parser, list[Any]()

    def recorded(*args: Any) -> Any:
        made.append(make(*args))
        return made[-1]

    monkeypatch.setattr(OpenAIServingChat, "_make_parser", recorded)
    parsing.ask("fast", CHAT, body_of(CHAT, n=n, tools=[TOOL]), [*parsing.singly("Hm."), "stop"], True)
    assert len(made) == n
    parsing.ask("stock", CHAT, body_of(CHAT, n=n, tools=[TOOL]), [*parsing.singly("Hm."), "stop"], True)
    assert len(made) == 2 * n + 1  # vLLM makes one more, which reads the prompt


def test_a_parser_that_fails(parsing: LiveRouters, monkeypatch: pytest.MonkeyPatch) -> None:
    parsing.parse_with(tool="hermes")
    from vllm.parser.abstract_parser import DelegatingParser

    parse, calls = DelegatingParser.parse_delta, list[int]()

    def fail(self: Any, **given: Any) -> Any:
        calls.append(1)
        if len(calls) % 4 == 0:
            raise ValueError("it cannot be read")
        return parse(self, **given)

    monkeypatch.setattr(DelegatingParser, "parse_delta", fail)
    events = both(parsing, CHAT, [*parsing.singly(TEXT), "stop"], free=True, tools=[TOOL])
    assert "it cannot be read" in events
    wait_until(lambda: not parsing.engine.running)


def test_a_cut_stream_of_tools(parsing: LiveRouters) -> None:
    parsing.parse_with(tool="hermes")
    script = parsing.singly(HERMES)
    events = both(parsing, CHAT, [*script[: len(script) // 2], "length"], free=True, tools=[TOOL])
    assert '"finish_reason":"length"' in events
    events = both(parsing, CHAT, [*script[: len(script) // 2], "error"], free=True, tools=[TOOL])
    assert "the engine broke" in events
