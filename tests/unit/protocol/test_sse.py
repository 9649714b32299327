"""Whatever the chunks of a stream are, the same items come out, too long ones are refused, and events are framed by
lines.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol.sse import (
    AnswerFailed,
    AnswerReader,
    BrokenFrame,
    EventReader,
    EventSplitter,
    EventTooLong,
    FrameSplitter,
    ItemTooLong,
    LineSplitter,
    Splitter,
    data_of,
    fault_in,
    object_of,
    read_events,
)
from tercet.wire.serving.answers import TracingSend

TEXT = b'data: {"text": "data: [DONE]\\n\\ndata: [DONE]"}\n\n'
STREAM = TEXT + b": keep-alive\n\n" + b"data: [DONE]\n\n"


# Neither of them ends a line; each ends one for str.splitlines.
NO_ENDS = "\u2028\u2029\x0b\x0c\x1c\x85"
LINES = st.lists(st.text("ab: \0" + NO_ENDS, max_size=6), min_size=1, max_size=3)
CUTS = st.lists(st.integers(0, 300), max_size=12)


def read(stream: bytes, cuts: list[int], longest: int = 1000) -> list[bytes]:
    reader, bounds = EventReader(longest), [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    return [data for begin, end in pairwise(bounds) for data in reader.read(stream[begin:end])]


@given(events=st.lists(LINES, max_size=5), end=st.sampled_from(["\n", "\r\n", "\r"]), cuts=CUTS, data=st.data())
def test_the_data_of_events_comes_out_whatever_the_chunks_are(
    events: list[list[str]], end: str, cuts: list[int], data: st.DataObject
) -> None:
    """With other fields, comments, empty lines and an unfinished event between and after them."""
    stream = data.draw(st.sampled_from(["", "\ufeff"]))
    for lines in events:
        stream += data.draw(st.sampled_from(["", ": alive" + end + end, "event: x" + end, end]))
        stream += "".join(f"data: {line}{end}" for line in lines) + end
    stream += data.draw(st.sampled_from(["", "data: cut off", "data: cut off" + end, "id: 3" + end + end]))
    assert read(stream.encode(), cuts) == ["\n".join(lines).encode() for lines in events]


@given(size=st.integers(15, 25), cuts=CUTS, end=st.sampled_from([b"", b"\n", b"\n\n", b"\r\n\r\n", b"\r\r"]))
def test_a_long_event_is_refused_whatever_the_chunks_are(size: int, cuts: list[int], end: bytes) -> None:
    stream = b"data: 1\n\n" + b"data: ".ljust(size, b"x") + end
    if size <= 20:
        read(stream, cuts, 20)
    elif size > 22 or len(end) > 1:
        with pytest.raises(EventTooLong, match="an event of more than 20 bytes"):
            read(stream, cuts, 20)


async def test_data_is_read_from_chunks_as_they_arrive() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for chunk in (b"da", b"ta: 1\n", b"\ndata: 2\n\ndata", b": 3\r", b"\n\r", b"\n"):
            yield chunk

    assert [data async for data in read_events(chunks())] == [b"1", b"2", b"3"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_parts_of_any_size_come_out_as_whole_events(size: int) -> None:
    events = EventSplitter()
    found = [event for at in range(0, len(STREAM), size) for event in events.split(STREAM[at : at + size])]
    assert found == [TEXT, b": keep-alive\n\n", b"data: [DONE]\n\n"]
    assert events.rest() == b""


def test_ends_of_lines_are_all_that_the_standard_has() -> None:
    whole = b"data: a\r\n\r\ndata: b\r\rdata: c\n\ndata: d\n\r\ndata: e"
    events = EventSplitter()
    assert [data_of(event) for event in [*events.split(whole), events.rest()]] == [b"a", b"b", b"c", b"d", b"e"]


def test_the_data_of_an_event_are_its_data_lines() -> None:
    assert data_of(b"event: x\ndata: {\ndata:  1}\nid: 3\n\n") == b"{\n 1}"
    assert data_of(b"data\n\n") == data_of(b"data:\n\n") == b""
    assert data_of(b": alive\n\n") is data_of(b"database: 1\n\n") is None
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


# ---- errors in streams -------------------------------------------------------------------------------------------

FAULTS = {
    b'data: {"error": {"message": "boom", "code": 500}}': "boom",
    b'data: {"error": "boom"}': "boom",
    b'data: {"error": {"code": "overloaded"}}': "overloaded",
    b'data: {"object": "error", "message": "boom", "type": "E", "param": null, "code": 500}': "boom",
    b'data: {"message": "boom", "code": 500}': "boom",
    b'data: {"detail": "boom"}': "boom",
    b'data: {"detail": [{"msg": "boom"}]}': "boom",
    b'event: error\ndata: {"type": "error", "error": {"type": "overloaded_error", "message": "boom"}}': "boom",
    b'data: {"type": "error", "code": "c", "message": "boom", "param": null}': "boom",
    b'event: response.failed\ndata: {"type": "response.failed", "response": {"error": {"message": "boom"}}}': "boom",
    b'data: {"type": "response.failed", "response": {"status": "failed"}}': "response.failed",
    b'data: {"type":"response.incomplete","response":{"incomplete_details":{"reason":"boom"}}}': "boom",
    b'data: {"type": "message-end", "delta": {"finish_reason": "ERROR", "error": "boom"}}': "boom",
    b'data: {"choices": [{"index": 0, "error": {"message": "boom"}, "finish_reason": "error"}]}': "boom",
    b'data: "{\\"error\\": {\\"message\\": \\"boom\\"}}"': "boom",
    b"data: Error: boom": "boom", b"data: [ERROR] boom": "boom", b'data: "error: boom"': "boom",
    b"event: error\ndata: boom": "boom", b"event: error": "error", b"event: error\ndata:": "error",
    b'error: {"message": "boom"}': "boom", b"error: boom": "boom", b'error:{"error":{"message":"boom"}}': "boom",
    b": error boom": "boom", b":error: boom": "boom", b": ERROR boom": "boom",
    b'{"error": {"message": "boom"}}': "boom", b'  {"object":"error","message":"boom"}': "boom",
}  # fmt: skip
NO_FAULTS = (
    b'data: {"choices": [{"text": "error: boom", "finish_reason": null}]}',
    b'data: {"choices": [{"delta": {"content": "{\\"error\\": 1}"}, "finish_reason": "stop"}], "error": null}',
    b'data: {"choices": [{"delta": {"content": "x"}, "error": null}], "message": "x", "code": 1}',
    b'event: message_start\ndata: {"type": "message_start", "message": {"id": "m", "error": null}}',
    b'data: {"type":"response.completed","response":{"error":null,"incomplete_details":null,"status":"completed"}}',
    b'data: {"type":"response.incomplete","response":{"incomplete_details":{"reason":"max_output_tokens"}}}',
    b'data: {"type": "response.output_text.delta", "delta": "error"}',
    b'data: {"tercet": {"events": [{"verb": "retry", "reason": "error"}], "error": null}}',
    b": keep-alive",
    b": no error so far",
    b"event: ping\ndata: {}",
    b"id: error",
    b"retry: 5",
    b"data: [DONE]",
    b"",
)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
@pytest.mark.parametrize(("event", "said"), FAULTS.items())
def test_an_error_of_any_form_ends_an_answer(event: bytes, said: str, end: bytes) -> None:
    whole = b'data: {"choices": []}' + end + event.replace(b"\n", end[: len(end) // 2]) + end
    reader, found = AnswerReader(), list[bytes]()

    def read() -> None:
        for at in range(len(whole)):
            found.extend(reader.events(whole[at : at + 1]))

    with pytest.raises(AnswerFailed, match=said):
        read()
    assert found == [b'{"choices": []}']
    cut = AnswerReader()
    assert [*cut.events(event)] == []
    with pytest.raises(AnswerFailed, match=said):  # the connection closes before the empty line
        cut.end()


@pytest.mark.parametrize("event", NO_FAULTS)
def test_an_event_that_only_mentions_an_error_is_none(event: bytes) -> None:
    assert fault_in(event + b"\n\n") is None


@given(st.binary(max_size=60), st.sampled_from([*FAULTS, *NO_FAULTS]), st.data())
def test_any_bytes_are_an_event_or_an_error(noise: bytes, event: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(event)))
    found = fault_in(event[:at] + noise + event[at:])
    assert found is None or (found and len(found) <= 5000)


@pytest.mark.parametrize(
    "last",
    [b"data: [DONE]", b'data: {"type":"message_stop"}',
     b'data: {"type":"response.incomplete","response":{"incomplete_details":{"reason":"max_output_tokens"}}}',
     b'data: {"type": "response.completed"}'],
)  # fmt: skip
def test_an_answer_ends_with_its_last_event_or_has_failed(last: bytes) -> None:
    reader = AnswerReader()
    reader.read(b'data: {"choices": [{"index": 1, "finish_reason": "stop"}]}\n\n')
    with pytest.raises(AnswerFailed, match="before the answer ended"):
        reader.end()
    reader.read(last + b"\n\n")
    reader.end()
    assert reader.done == (last == b"data: [DONE]")


def test_what_follows_the_end_is_not_read() -> None:
    assert AnswerReader().read(b"data: [DONE]\n\nerror: boom\n\n") == []


LONGEST = 20
MAGIC = struct.Struct("<4sI")
SPLITTERS: dict[str, Callable[[], Splitter]] = {
    "frames": lambda: FrameSplitter(LONGEST),
    "magic": lambda: FrameSplitter(LONGEST, MAGIC, b"ABCD"),
    "lines": lambda: LineSplitter(LONGEST),
    "events": lambda: EventSplitter(LONGEST),
}


def chunks(data: bytes, cuts: list[int]) -> list[bytes]:
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in pairwise(bounds)]


def split(splitter: Splitter, parts: list[bytes]) -> list[bytes]:
    return [item for part in parts for item in splitter.split(part)]


@given(bodies=st.lists(st.binary(max_size=LONGEST), max_size=10), cuts=CUTS)
def test_frames(bodies: list[bytes], cuts: list[int]) -> None:
    plain = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    assert split(FrameSplitter(LONGEST), chunks(plain, cuts)) == bodies
    marked = b"".join(MAGIC.pack(b"ABCD", len(body)) + body for body in bodies)
    assert split(FrameSplitter(LONGEST, MAGIC, b"ABCD"), chunks(marked, cuts)) == bodies


@given(lines=st.lists(st.binary(max_size=LONGEST).filter(lambda line: b"\n" not in line), max_size=10), cuts=CUTS)
def test_lines(lines: list[bytes], cuts: list[int]) -> None:
    splitter = LineSplitter(LONGEST)
    data = b"".join(line + b"\n" for line in lines) + b"unfinished"
    assert split(splitter, chunks(data, cuts)) == lines
    assert splitter.held == len(b"unfinished")


@given(lines=st.lists(st.sampled_from([b"ab", b"c", b":", b""]), max_size=12), cuts=CUTS, data=st.data())
def test_events_come_out_unchanged(lines: list[bytes], cuts: list[int], data: st.DataObject) -> None:
    ends = data.draw(st.lists(st.sampled_from([b"\n", b"\r\n", b"\r"]), min_size=len(lines), max_size=len(lines)))
    stream = b"".join(line + end for line, end in zip(lines, ends, strict=True))
    splitter = EventSplitter(1000)
    found = split(splitter, chunks(stream, cuts))
    assert b"".join(found) + splitter.rest() == stream
    assert all(event.endswith((b"\n\n", b"\r\n", b"\r\r", b"\n\r")) for event in found)
    assert splitter.held == 0


@pytest.mark.parametrize("kind", SPLITTERS)
@given(data=st.binary(max_size=120).map(lambda some: some.replace(b"z", b"\n")), cuts=CUTS)
def test_an_item_is_refused_or_not_whatever_the_chunks_are(kind: str, data: bytes, cuts: list[int]) -> None:
    def found(parts: list[bytes]) -> object:
        try:
            return [item.strip(b"\r\n") for item in split(SPLITTERS[kind](), parts) if item.strip(b"\r\n")]
        except (ItemTooLong, EventTooLong, BrokenFrame) as error:
            return type(error)

    assert found(chunks(data, cuts)) == found([data]) == found([bytes([byte]) for byte in data])


@pytest.mark.parametrize("data", [(21).to_bytes(4, "big"), b"\xff\xff\xff\xff", (21).to_bytes(4, "big") + bytes(21)])
def test_a_long_frame_is_refused_before_it_arrives(data: bytes) -> None:
    with pytest.raises(ItemTooLong):
        FrameSplitter(LONGEST).split(data)


@pytest.mark.parametrize("kind", ["lines", "events"])
@pytest.mark.parametrize("end", [b"", b"\n\n"])
def test_a_long_item_is_refused_with_or_without_an_end(kind: str, end: bytes) -> None:
    splitter = SPLITTERS[kind]()
    splitter.split(b"x" * LONGEST)
    with pytest.raises((ItemTooLong, EventTooLong), match=f"more than {LONGEST} bytes"):
        splitter.split(b"yyy" + end)


def test_another_magic_is_refused() -> None:
    with pytest.raises(BrokenFrame, match="HTTP"):
        SPLITTERS["magic"]().split(b"HTTP/1.1 200 OK\r\n")
