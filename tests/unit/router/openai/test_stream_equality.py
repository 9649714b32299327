"""The fast path and vLLM's own, fed with the same outputs: the same events, to the byte."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from .conftest import CHAT, COMPLETIONS, LiveRouters, Step, body_of

TEXT = (
    'Once "upon" a\ttime\n\\ there was a <b>r\u00f6uter</b> \U0001f680\U0001f469\u200d\U0001f4bb '
    'that \u4f60\u597d "text":"x" \x7f\x01 end'
)


def both(routers: LiveRouters, path: str, script: Sequence[Step], **more: Any) -> str:
    fast, stock = routers.ask_both(path, body_of(path, 100, **more), script)
    assert fast == stock
    return fast


def text_of(events: str) -> str:
    found = ""
    for line in events.splitlines():
        if line == "data: [DONE]":
            continue
        for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
            found += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    return found


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_text_and_chunks_are_the_same(routers: LiveRouters, path: str) -> None:
    events = both(routers, path, [*routers.singly(TEXT), "length"])
    assert text_of(events) == TEXT
    assert '"finish_reason":"length"' in events
    assert events.endswith("data: [DONE]")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_fast_path_is_the_one_that_was_taken(
    routers: LiveRouters, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tercet.router.openai.fast_path.request_stream import ChoiceStream

    written: list[Any] = []
    write = ChoiceStream._write_text
    monkeypatch.setattr(
        ChoiceStream, "_write_text", lambda self, output: (written.append(output.token_ids), write(self, output))[1]
    )
    script = [*routers.singly("one two three four five"), "stop"]
    both(routers, path, script)
    # All but the first and the last output.
    assert [list(ids) for ids in written] == script[1:-2]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_usage_counts_the_tokens_of_the_fast_path(routers: LiveRouters, path: str) -> None:
    script = [*routers.singly("a b c d e f g"), "stop"]
    events = both(routers, path, script, stream_options={"include_usage": True})
    usage = json.loads(events.splitlines()[-2].removeprefix("data: "))["usage"]
    assert usage["completion_tokens"] == len(script) - 1
    assert "cached_tokens" in usage["prompt_tokens_details"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "stop", [["wolf"], [" far aw"], ["x", "y bou"], ["Once"], ["never there"], ["wolf", "time, a w"]]
)
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_across_tokens(routers: LiveRouters, path: str, stop: list[str], include: bool) -> None:
    script = [*routers.singly("Once upon a time, a wolf lived in a country bound and far away from here"), "length"]
    events = both(
        routers, path, script, stop=stop, include_stop_str_in_output=include, stream_options={"include_usage": True}
    )
    assert events.endswith("data: [DONE]")


@pytest.mark.parametrize("stop", [None, ["wolf lived"], ["time"], ["d a"]])
@pytest.mark.parametrize("width", [2, 3, 7])
def test_several_tokens_in_one_output(routers: LiveRouters, stop: list[str] | None, width: int) -> None:
    tokens = routers.tokens("Once upon a time, a wolf lived behind a hill, and had a red hat.")
    script: list[Step] = [tokens[at : at + width] for at in range(0, len(tokens), width)]
    both(routers, COMPLETIONS, [*script, "length"], stop=stop, stream_options={"include_usage": True})


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("spaces", [False, True])
def test_special_tokens(routers: LiveRouters, skip: bool, spaces: bool) -> None:
    ends, hello = routers.tokenizer.eos_token_id, routers.tokens("hello there")
    script: list[Step] = [[ends], [hello[0]], [ends], [ends], [hello[1]], [1], [ends]]
    both(
        routers, COMPLETIONS, [*script, "stop"], skip_special_tokens=skip, spaces_between_special_tokens=spaces
    )  # fmt: skip


def test_min_tokens_holds_stop_strings_back(routers: LiveRouters) -> None:
    both(routers, COMPLETIONS, [*routers.singly("a wolf and a wolf and a wolf"), "length"], stop=["wolf"], min_tokens=5)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_error_in_mid_stream_is_an_event(routers: LiveRouters, path: str) -> None:
    events = both(routers, path, [*routers.singly("it went well until"), "error"])
    assert "the engine broke" in events
    assert text_of(events) == "it went well until"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_one_token_and_no_token(routers: LiveRouters, path: str) -> None:
    both(routers, path, [[routers.tokens("x")[0]], "length"])
    both(routers, path, [[], "stop"])
    both(
        routers,
        path,
        [routers.tokens("a b"), [], routers.tokens(" c"), [], "stop"],
        stream_options={"include_usage": True},
    )


OTHER = [(COMPLETIONS, {"echo": True}), (CHAT, {"echo": True})]


@pytest.mark.parametrize(("path", "more"), OTHER)
def test_what_the_fast_path_does_not_know_goes_vllms_way(
    routers: LiveRouters, path: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tercet.router.openai.fast_path.request_stream import RequestStream

    monkeypatch.setattr(RequestStream, "run", lambda *_: pytest.fail("it took the fast path"))
    both(routers, path, [*routers.singly("one two three"), "stop"], **more)


def test_a_trace_comes_before_the_end(routers: LiveRouters) -> None:
    _, events = routers.ask(
        "fast",
        COMPLETIONS,
        body_of(COMPLETIONS, 100),
        [*routers.singly("one two three"), "stop"],
        **{"x-tercet-trace": "1"},
    )
    *_, traced, done = events.splitlines()
    assert json.loads(traced.removeprefix("data: "))["tercet"]["program"] == "data_parallel"
    assert done == "data: [DONE]"
