"""Whatever the chunks of a stream are, the same items come out; too long ones are refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol.sse import (
    BrokenFrame,
    EventSplitter,
    EventTooLong,
    FrameSplitter,
    ItemTooLong,
    LineSplitter,
    Splitter,
)

LONGEST = 20
MAGIC = struct.Struct("<4sI")
SPLITTERS: dict[str, Callable[[], Splitter]] = {
    "frames": lambda: FrameSplitter(LONGEST),
    "magic": lambda: FrameSplitter(LONGEST, MAGIC, b"ABCD"),
    "lines": lambda: LineSplitter(LONGEST),
    "events": lambda: EventSplitter(LONGEST),
}
CUTS = st.lists(st.integers(0, 300), max_size=12)


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
