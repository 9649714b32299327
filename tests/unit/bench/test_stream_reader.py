"""One streamed answer, byte by byte: what counts as a token, and what is no answer."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet_bench.openai_client import Reading, StreamFailed

DONE = b"data: [DONE]\n\n"
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


def event(fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(said: str, finish: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"text": said, "finish_reason": finish, **more}]})


def read(*pieces: bytes) -> Reading:
    """The pieces arrive at 1, 2, 3, ... seconds."""
    reader = Reading()
    for at, piece in enumerate(pieces, start=1):
        reader.feed(piece, float(at))
    return reader.end()


def failure_of(*pieces: bytes) -> str:
    with pytest.raises(StreamFailed) as caught:
        read(*pieces)
    return caught.value.failure


def test_completion() -> None:
    found = read(text("a"), text("b"), text("c", "length"), event(USAGE), DONE)
    assert (found.times, found.output_tokens, found.usage.prompt_tokens) == ([1.0, 2.0, 3.0], 3, 7)
    assert (found.finish_reason, "".join(found.text)) == ("length", "abc")


def test_a_closing_event_that_says_nothing_is_no_token_when_the_count_shows_it() -> None:
    counted = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}
    assert read(text("a"), text("b"), text("", "stop"), event(counted), DONE).times == [1.0, 2.0]


def test_a_last_token_without_text_is_a_token_when_the_count_shows_it() -> None:
    assert read(text("a"), text("b"), text("", "length"), event(USAGE), DONE).times == [1.0, 2.0, 3.0]


def test_several_tokens_in_one_event() -> None:
    found = read(text("ab", token_ids=[4, 5]), text("c", "length", token_ids=[6]), DONE)
    assert (found.counts, found.token_ids, found.output_tokens) == ([2, 1], [4, 5, 6], 3)
    assert found.times == [1.0, 2.0]


def test_events_that_came_in_one_read_have_one_time() -> None:
    assert read(text("a"), text("b") + text("c", "length") + DONE).times == [1.0, 2.0, 2.0]


def test_comments_and_other_fields_are_no_events() -> None:
    assert read(b": ping\n\n", b"event: x\nid: 3\n" + text("a", "stop"), DONE).times == [2.0]


def test_lines_may_end_as_in_http_and_need_no_space() -> None:
    assert read(text("a", "stop").replace(b"\n", b"\r\n").replace(b"data: ", b"data:"), DONE).text == ["a"]


@given(st.lists(st.integers(0, 400)), st.booleans())
def test_it_does_not_matter_where_the_stream_is_cut(cuts: list[int], crlf: bool) -> None:
    whole = text("a") + text("wörter\n") + text("c", "length") + event(USAGE) + DONE
    whole = whole.replace(b"\n", b"\r\n") if crlf else whole
    places = [0, *sorted(cut for cut in cuts if cut < len(whole)), len(whole)]
    found = read(*(whole[begin:end] for begin, end in pairwise(places)))
    assert (found.text, found.output_tokens, len(found.times)) == (["a", "wörter\n", "c"], 3, 3)


def test_what_is_no_answer() -> None:
    assert failure_of(text("a")) == "disconnected"
    assert failure_of() == "disconnected"
    assert failure_of(text("", "stop"), DONE) == "empty"
    assert failure_of(DONE) == "empty"
    assert failure_of(b"data: {nonsense\n\n") == "protocol"
    assert failure_of(text("a"), event({"error": {"message": "no blocks left"}})) == "server"


def test_an_end_without_done_is_fine_when_the_answer_was_finished() -> None:
    assert read(text("a", "stop")).times == [1.0]


def test_the_servers_words_are_kept() -> None:
    reader = Reading()
    with pytest.raises(StreamFailed, match="no blocks left"):
        reader.feed(event({"error": {"message": "no blocks left", "code": 500}}), 0.0)


def test_nothing_counts_after_done() -> None:
    assert read(text("a", "stop"), DONE, text("b")).text == ["a"]


DEEP = b"[" * 5000 + b"]" * 5000
BYTES = b'data: {"choices": [{"text": "\xff\xfe", "finish_reason": null}]}\n\n'


@pytest.mark.parametrize(
    "event",
    [
        BYTES,
        b'data: {"id": "\xc3(", "choices": []}\n\n',
        b"data: \xff\n\n",
        b'data: {"nobody reads": %b, "choices": []}\n\n' % DEEP,
        b'data: {"error": %b}\n\n' % DEEP,
        b'data: {"choices": [{"logprobs": %b}]}\n\n' % DEEP,
        b'data: {"choices": [{"text": "\\ud83d"}]}\n\n',
        b'data: {"choices": [], "usage": {"completion_tokens": -1}}\n\n',
        b'data: {"choices": [], "usage": {"prompt_tokens": 1%b}}\n\n' % (b"0" * 30),
        b'data: {"choices": [{"text": "a", "token_ids": [-1]}]}\n\n',
        b'data: {"choices": [{"text": "a", "token_ids": [1%b]}]}\n\n' % (b"0" * 30),
        b'data: {"choices": {}}\n\n',
        b"data: 7\n\n",
    ],
    ids=lambda event: event[:60].decode(errors="replace"),
)
def test_an_event_that_cannot_be_read_is_a_failure_of_its_answer(event: bytes) -> None:
    assert failure_of(text("a"), event, text("b", "stop"), DONE) == "protocol"


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_the_server_broke_off_has_failed(reason: str) -> None:
    assert failure_of(text("a"), text("b", reason), event(USAGE), DONE) == "server"
    assert failure_of(text("a"), text("", reason)) == "server"
    second = {"choices": [{"text": "a"}, {"index": 1, "text": "b", "finish_reason": reason}]}
    assert failure_of(event(second), text("c", "stop"), DONE) == "server"


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "content_filter", "repetition"])
def test_other_ends_are_ends(reason: str) -> None:
    assert read(text("a"), text("b", reason), DONE).finish_reason == reason
