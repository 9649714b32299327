"""The client of ``tercet bench``: streams as they are framed, answers of targets, and failures that become records."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol import BadRequest, EngineUnreachable
from tercet_bench.experiment import between, prefix_counts, words
from tercet_bench.openai_client import COMPLETIONS, Client, Clock, PreparedCall, Reading, StreamFailed, body_of
from tercet_bench.traffic import ask_target, require_programs
from tercet_lab.tables import RequestRow, Requests
from tests.servers import served
from tests.unit.bench.openai_server import MODEL, FakeServer


async def ask(url: str, timeout: float = 20.0, tokens: int = 5, **behave: Any) -> RequestRow:
    body = body_of(MODEL, [1, 2, 3], tokens, extra={"behave": behave})
    call = PreparedCall(4, url + COMPLETIONS, body, planned_input=3, planned_output=tokens)
    async with Client(Clock(), timeout) as client:
        return (await client.send(call, 0.0))[0]


async def test_an_answer(server: FakeServer) -> None:
    found = await ask(server.url, gap=0.01)
    assert (found.ok, found.failure, found.status, found.finish_reason) == (True, None, 200, "length")
    assert (found.id, found.input_tokens, found.output_tokens, len(found.token_times)) == (4, 3, 5, 5)
    assert found.first_token == found.token_times[0]
    assert found.ended == found.token_times[-1]
    assert 0 <= found.scheduled <= found.sent < found.token_times[0]


async def test_slow_tokens_have_the_gaps_that_the_server_made(server: FakeServer) -> None:
    found = await ask(server.url, gap=0.05)
    # Sleeps are never short, and a gap that began late may be; their sum cannot be.
    table = Requests.of_rows([found])
    assert sum(table.itl) >= 4 * 0.05 - 0.03
    assert table.ttft[0] >= 0.05
    assert table.tpot[0] == pytest.approx(sum(table.itl) / 4)


async def test_several_tokens_in_an_event_are_counted_and_have_one_time(server: FakeServer) -> None:
    found = await ask(server.url, at_once=2)
    assert (found.output_tokens, found.token_counts, len(found.token_times)) == (5, (2, 2, 1), 3)


async def test_what_is_asked(server: FakeServer) -> None:
    await ask(server.url)
    (body,) = server.bodies
    assert (body["model"], body["prompt"], body["max_tokens"], body["temperature"]) == (MODEL, [1, 2, 3], 5, 0.0)
    assert (body["stream"], body["stream_options"], body["ignore_eos"]) == (True, {"include_usage": True}, True)


@pytest.mark.parametrize("status", [400, 429, 503])
async def test_another_status_is_a_failure_with_the_servers_words_in_one_line(server: FakeServer, status: int) -> None:
    found = await ask(server.url, status=status)
    assert (found.failure, found.status, found.error) == ("http", status, f"HTTP {status}: no room")
    assert (found.ok, found.output_tokens, found.first_token) == (False, 0, None)


@pytest.mark.parametrize("after", [0, 2])
async def test_a_connection_that_breaks(server: FakeServer, after: int) -> None:
    found = await ask(server.url, cut=after)
    assert (found.failure, found.ok) == ("disconnected", False)
    assert found.error


async def test_an_error_in_the_stream(server: FakeServer) -> None:
    found = await ask(server.url, error=2)
    assert (found.failure, found.error, len(found.token_times)) == ("server", "out of blocks", 2)


async def test_an_answer_without_tokens(server: FakeServer) -> None:
    assert (await ask(server.url, silent=True)).failure == "empty"


async def test_a_target_that_stalls_runs_into_the_timeout(server: FakeServer) -> None:
    found = await ask(server.url, timeout=0.3, hang=1)
    assert (found.failure, found.error, len(found.token_times)) == ("timeout", "the answer did not end within 0.3 s", 1)
    assert found.ended - found.sent >= 0.3


async def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        found = await ask(f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert found.failure == "refused"
    assert "\n" not in (found.error or "\n")


async def test_a_cancelled_request_has_a_record(server: FakeServer) -> None:
    asking = asyncio.create_task(ask(server.url, hang=2))
    await server.hung.wait()
    asking.cancel()
    assert (await asking).failure == "interrupted"


def test_sampling_goes_into_the_body() -> None:
    extra = {"temperature": 0.5, "top_p": 0.9, "seed": 3}
    body = msgspec.json.decode(body_of("m", "text", 4, ignore_eos=False, token_ids=True, cache_salt="s", extra=extra))
    assert body | {"stream_options": None} == {
        "model": "m", "prompt": "text", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stream": True,
        "stream_options": None, "return_token_ids": True, "cache_salt": "s",
    }  # fmt: skip


DEEP = b"[" * 5000 + b"]" * 5000


@pytest.mark.parametrize(
    ("raw", "failure"),
    [(b'data: {"choices": [{"text": "\xff"}]}\n\n', "protocol"), (b'data: {"x": %b}\n\n' % DEEP, "protocol")],
    ids=["bytes", "nested"],
)
async def test_what_cannot_be_read_is_a_record_like_others(server: FakeServer, raw: bytes, failure: str) -> None:
    found = await ask(server.url, raw=raw.hex())
    assert (found.ok, found.failure, found.status) == (False, failure, None)
    assert msgspec.json.decode(msgspec.json.encode(found), type=RequestRow) == found


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_an_answer_that_the_server_broke_off_is_a_failure(server: FakeServer, reason: str) -> None:
    found = await ask(server.url, finish=reason)
    assert (found.ok, found.failure, found.finish_reason) == (False, "server", reason)


@pytest.mark.parametrize(
    "body",
    [DEEP, b'{"error": {"message": %b}}' % DEEP, b"\xff\xfe no", b"", b"[]", b"null", b'{"error": 7}',
     b'{"error": {"message": {"a": 1}}}', b'{"error": "\\ud83d"}'],
    ids=lambda body: body[:30].decode(errors="replace"),
)  # fmt: skip
async def test_whatever_an_error_says_is_a_record(server: FakeServer, body: bytes) -> None:
    found = await ask(server.url, status=500, body=body.hex())
    assert (found.failure, found.status) == ("http", 500)
    assert msgspec.json.decode(msgspec.json.encode(found), type=RequestRow) == found


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


MODELS = b'{"data": [{"id": "m", "max_model_len": 10}]}'
ODD = {
    "nested": b"[" * 5000 + b"]" * 5000,
    "nested, but not too deeply to be read": b"[" * 200 + b"]" * 200,
    "bytes": b'{"version": "\xff"}',
    "half a character": b'{"version": "\\ud83d"}',
    "no number": b'{"version": NaN}',
    "a list": b"[1, 2]",
    "nothing": b"",
}


@asynccontextmanager
async def serving(answers: Mapping[str, bytes], status: int = 200) -> AsyncGenerator[str]:
    """Answers each path with these bytes, others with 404."""

    async def answer(http: web.Request) -> web.Response:
        found = answers.get(http.path)
        return web.Response(status=404) if found is None else web.Response(body=found, status=status)

    app = web.Application()
    app.add_routes([web.get("/{path:.*}", answer)])
    async with served(app) as url:
        yield url


@pytest.mark.parametrize("path", ["/version", "/tercet/v1/engines", "/tercet/v1/program"])
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
async def test_what_it_tells_besides_can_be_written(path: str, odd: bytes) -> None:
    async with serving({"/v1/models": MODELS, path: odd}) as url:
        found = await ask_target(url, None, {})
    assert found.model == "m"
    assert msgspec.json.decode(msgspec.json.encode(found.about))["max_model_len"] == 10


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
async def test_models_that_cannot_be_read_are_no_answer(odd: bytes) -> None:
    async with serving({"/v1/models": odd}) as url:
        with pytest.raises(EngineUnreachable, match="does not answer as an OpenAI server"):
            await ask_target(url, None, {})


@pytest.mark.parametrize("odd", [*ODD.values(), b'{"error": "no"}', b'{"error": {"message": 7}}'])
async def test_a_refusal_that_cannot_be_read_is_no_answer(odd: bytes) -> None:
    async with serving({"/v1/models": odd}, status=400) as url:
        with pytest.raises(EngineUnreachable, match="cannot check program"):
            await require_programs(url, ["a"], {})
    async with serving({"/v1/models": b'{"error": {"message": "x-tercet-program: no"}}'}, status=400) as url:
        with pytest.raises(BadRequest, match="--program: no"):
            await require_programs(url, ["a"], {})


@pytest.mark.parametrize(
    ("engines", "found"),
    [([{"url": "x"}, {"vllm": ""}, 3], None), ([{"vllm": "b"}, {"vllm": "a"}, {"vllm": "b"}], ["a", "b"])],
)
async def test_versions_of_engines_are_those_that_the_router_lists(
    engines: list[object], found: list[str] | None
) -> None:
    async with serving({"/v1/models": MODELS, "/tercet/v1/engines": msgspec.json.encode(engines)}) as url:
        assert (await ask_target(url, None, {})).about.get("engine_versions") == found


# Prefix tokens predicted and found during a run, as the target's counters say.

TEXT = """# TYPE tercet_prefix_predicted_tokens counter
tercet_prefix_predicted_tokens_total{program="a",engine="e0"} 100.0
tercet_prefix_predicted_tokens_total{program="a",engine="e1"} 28.0
# TYPE tercet_prefix_delivered_tokens counter
tercet_prefix_delivered_tokens_total{program="a",engine="e0"} 64.0
# TYPE tercet_prefix_missing_tokens counter
tercet_prefix_missing_tokens_total{program="a",engine="e0"} 64.0
tercet_prefix_other_tokens_total 9.0
"""


async def counts_of(text: str, status: int = 200) -> dict[str, int]:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=text, status=status)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with served(app) as url:
        return await prefix_counts(f"{url}/")


async def test_counters_are_summed_over_engines() -> None:
    assert await counts_of(TEXT) == {"predicted": 128, "delivered": 64, "missing": 64}


@pytest.mark.parametrize(("text", "status"), [(TEXT, 404), ("", 200), ("{{ no metrics", 200)])
async def test_another_server_has_none(text: str, status: int) -> None:
    assert await counts_of(text, status) == {}


async def test_a_server_that_does_not_answer_has_none() -> None:
    assert await prefix_counts("http://127.0.0.1:1") == {}


def test_a_run_has_what_was_counted_during_it() -> None:
    after = {"predicted": 128, "delivered": 64, "missing": 64}
    assert between({}, after) == after
    assert between({"predicted": 100, "delivered": 64, "missing": 64}, after) == {
        "predicted": 28, "delivered": 0, "missing": 0,
    }  # fmt: skip
    assert between(after, after) == {}
    assert between({"predicted": 200}, after) == {}, "the router was restarted"


def test_a_report_says_the_share_that_was_missing() -> None:
    said = words({"predicted": 200, "delivered": 150, "missing": 50})
    assert said == (
        "picks predicted 200 prefix tokens in caches, engines found 150, 50 of the predicted (25%) were missing"
    )
    assert "missing" not in words({"predicted": 0, "delivered": 5, "missing": 0})
