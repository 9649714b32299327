"""Events are framed by lines, in whatever parts they come, whatever their text says."""

from __future__ import annotations

from typing import Any

import pytest

from tercet.protocol.sse import WholeEvents, data_of, events_of, object_of
from tercet.wire.serving.trace_answers import TracingSend

TEXT = b'data: {"text": "data: [DONE]\\n\\ndata: [DONE]"}\n\n'
STREAM = TEXT + b": keep-alive\n\n" + b"data: [DONE]\n\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_parts_of_any_size_come_out_as_whole_events(size: int) -> None:
    events = WholeEvents()
    passed = [events.passed(STREAM[at : at + size]) for at in range(0, len(STREAM), size)]
    assert b"".join(passed) == STREAM
    assert all(part.endswith(b"\n\n") for part in passed if part)
    assert events.rest() == b""


def test_ends_of_lines_are_all_that_the_standard_has() -> None:
    whole = b"data: a\r\n\r\ndata: b\r\rdata: c\n\ndata: d"
    assert [data_of(event) for event in events_of(whole)] == [b"a", b"b", b"c", b"d"]


def test_the_data_of_an_event_are_its_data_lines() -> None:
    assert data_of(b"event: x\ndata: {\ndata:  1}\nid: 3\n\n") == b"{\n 1}"
    assert object_of(b'data: {"a":\ndata: 1}\n\n') == {"a": 1}
    assert object_of(b"data: [DONE]\n\n") == {}


async def traced(kind: bytes, *parts: bytes) -> bytes:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    tracing = TracingSend(send, [{"program": "p"}])
    await tracing({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    for index, part in enumerate(parts):
        await tracing({"type": "http.response.body", "body": part, "more_body": index + 1 < len(parts)})
    return b"".join(message.get("body", b"") for message in sent)


@pytest.mark.parametrize("size", [1, 5, 40, 1000])
async def test_a_trace_stands_before_the_end_and_nowhere_else(size: int) -> None:
    parts = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    found = await traced(b"text/event-stream; charset=utf-8", *parts)
    assert found == STREAM.replace(b"data: [DONE]\n\n", b'data: {"tercet":{"program":"p"}}\n\ndata: [DONE]\n\n')


@pytest.mark.parametrize("end", [b"data:[DONE]\n\n", b"data: [DONE]\r\n\r\n", b"data: [DONE]"])
async def test_the_end_may_be_written_otherwise(end: bytes) -> None:
    found = await traced(b"text/event-stream", TEXT, end)
    assert found == TEXT + b'data: {"tercet":{"program":"p"}}\n\n' + end


async def test_a_text_that_only_says_so_is_no_end() -> None:
    line = b'data: {"text": "x"} data: [DONE]\n\n'
    assert await traced(b"text/event-stream", line) == line
    assert await traced(b"text/plain", STREAM) == STREAM
