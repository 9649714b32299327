"""What supervisor and workers say arrives whole, however the bytes come."""

from __future__ import annotations

import asyncio
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.router.workers.messages import (
    LONGEST,
    Call,
    Granted,
    Open,
    Perform,
    Performed,
    Reply,
    Serving,
    ToSupervisor,
    ToWorker,
    Wish,
    messages_of,
    write,
)
from tercet.streams.frames import FrameTooLong

CALL = Call("PUT", "/tercet/v1/program", b'{"program": "auto"}')
TO_SUPERVISOR: list[ToSupervisor] = [Serving(), Wish(3, CALL), Performed(4, Reply(200, b"{}"))]
TO_WORKER: list[ToWorker] = [Open(), Perform(5, CALL), Granted(6, [Reply(200, b"a"), Reply(400, b"")])]


class Bytes:
    """A writer, as far as messages need one."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data


def wire(*messages: ToSupervisor | ToWorker) -> bytes:
    writer = Bytes()
    for message in messages:
        write(cast(asyncio.StreamWriter, writer), message)
    return writer.written


def reader_of(*pieces: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    for piece in pieces:
        reader.feed_data(piece)
    reader.feed_eof()
    return reader


@given(st.lists(st.integers(0, 200), max_size=6))
async def test_messages_are_whole_however_they_are_cut(cuts: list[int]) -> None:
    decoder: msgspec.msgpack.Decoder[ToSupervisor] = msgspec.msgpack.Decoder(ToSupervisor)
    data = wire(*TO_SUPERVISOR)
    reader, found = asyncio.StreamReader(), list[ToSupervisor]()

    async def collect() -> None:
        async for message in messages_of(reader, decoder):
            found.append(message)

    collecting = asyncio.create_task(collect())
    begin = 0
    for end in [*sorted(cuts), len(data)]:
        reader.feed_data(data[begin:end])
        begin = max(begin, min(end, len(data)))
        await asyncio.sleep(0)
    reader.feed_eof()
    await collecting
    assert found == TO_SUPERVISOR


async def test_a_message_that_was_cut_off_is_none() -> None:
    decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
    reader = reader_of(wire(*TO_WORKER)[:-1])
    assert [message async for message in messages_of(reader, decoder)] == TO_WORKER[:-1]


async def test_what_is_never_sent_is_refused() -> None:
    decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
    with pytest.raises(FrameTooLong):
        await anext(messages_of(reader_of((LONGEST + 1).to_bytes(4, "big")), decoder))
    with pytest.raises(msgspec.DecodeError):
        await anext(messages_of(reader_of(b"\x00\x00\x00\x01\xc1"), decoder))
