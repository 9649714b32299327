"""Messages that are too large, or cannot be said or read: they end their own sequence and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tercet.protocol import (
    BadRequest,
    EngineError,
    EngineUnreachable,
    MultiModalFeature,
    Output,
    OutputStream,
    RequestTooLarge,
    RouterUnreachable,
    TercetError,
    TokenLogprob,
)
from tercet.protocol.wire import StartGenerateCall
from tercet.wire.client import http_engine, stream_listener
from tercet.wire.streams import router_connection, wire_format
from tests.longest_wait import LONGEST_WAIT_S
from tests.unit.wire.streams.test_streams import Pair, call_of, connected, stream_fed_here

LONGEST = 4096
PLACES = (wire_format, router_connection, http_engine, stream_listener)


@pytest.fixture(autouse=True)
def short_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in PLACES:
        monkeypatch.setattr(place, "LONGEST_FRAME", LONGEST)


def large(count: int, token: int = 5) -> Output:
    """An output of about 30 bytes for each of ``count`` prompt tokens."""
    return Output((token,), prompt_logprobs=(None, *((TokenLogprob(1, -0.5, 1),) for _ in range(count))))


class Other:
    """A sequence that goes on beside the one in trouble."""

    def __init__(self, pair: Pair) -> None:
        self.outputs: OutputStream = stream_fed_here()
        self.context = pair.engine.sequence(0, self.outputs)
        self.number = self.context.__enter__()
        self.stops: list[None] = []
        self.sender = pair.router.sender(self.number, 0, lambda: self.stops.append(None))

    async def require_whole(self, pair: Pair) -> None:
        """It gets its last token, over the connection that was there before."""
        self.sender.send(Output((9,), "stop"))
        found = [output async for output in self.outputs]
        assert found[-1] == Output((9,), "stop")
        assert not self.stops
        assert pair.engine.connected
        assert pair.router.open
        self.context.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("output", "kind", "why", "param"),
    [
        (large(1000), BadRequest, "request fewer log probabilities", "sampling_params"),
        (Output((2**70,)), EngineError, "OverflowError", None),
    ],
    ids=["no message holds it", "cannot be encoded"],
)
async def test_an_output_that_cannot_be_sent_ends_its_own_sequence(
    output: Output, kind: type[TercetError], why: str, param: str | None
) -> None:
    async with connected() as pair:
        other = Other(pair)
        outputs, stopped = stream_fed_here(), asyncio.Event()
        with pair.engine.sequence(0, outputs) as number:
            sender = pair.router.sender(number, 0, stopped.set)
            other.sender.send(Output((8,)))
            sender.send(output)
            sender.send(Output((6,)))  # nobody gets a token that does not follow the one before
            with pytest.raises(kind, match=why) as caught:
                await anext(outputs)
            assert caught.value.param == param
            await asyncio.wait_for(stopped.wait(), LONGEST_WAIT_S)
            assert not sender.open
        await other.require_whole(pair)


async def test_outputs_of_one_step_that_are_large_together_all_arrive() -> None:
    async with connected() as pair:
        senders: list[Any] = []
        stack = contextlib.ExitStack()
        streams = [stream_fed_here() for _ in range(5)]
        for stream in streams:
            number = stack.enter_context(pair.engine.sequence(0, stream))
            senders.append(pair.router.sender(number, 0, lambda: None))
        said = [large(60, token) for token in range(5)]
        for sender, output in zip(senders, said, strict=True):
            sender.send(output)
        assert [await anext(stream) for stream in streams] == said
        assert pair.engine.connected


@pytest.mark.parametrize("how_large", ["no message holds it", "its router has much unread"])
async def test_a_message_that_is_read_late_does_not_end_the_others(
    how_large: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that takes a large message slowly is not gone."""
    async with connected() as pair:
        monkeypatch.setattr(router_connection, "LARGE", 256)
        monkeypatch.setattr(router_connection, "MOST_UNSENT", 2 * LONGEST)
        other = Other(pair)
        outputs, stopped = stream_fed_here(), asyncio.Event()
        transport: Any = pair.router._transport
        unread = 0 if how_large == "no message holds it" else 2 * LONGEST - 100
        with pair.engine.sequence(0, outputs) as number:
            sender = pair.router.sender(number, 0, stopped.set)
            with monkeypatch.context() as patch:
                patch.setattr(type(pair.router), "_unread", lambda self: unread, raising=True)
                sender.send(large(1000 if unread == 0 else 50))
                pair.router.report()
                pair.router.tick()
            error = BadRequest if unread == 0 else RouterUnreachable
            with pytest.raises(error):
                await anext(outputs)
            assert stopped.is_set()
        assert not transport.is_closing()
        await other.require_whole(pair)


@pytest.mark.slow
async def test_a_router_that_reads_nothing_is_given_up_and_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_connection, "MOST_UNSENT", 256 * 1024)
    async with connected() as pair:
        reading: Any = pair.engine._transport
        reading.pause_reading()
        stopped = asyncio.Event()
        sender = pair.router.sender(1, 0, stopped.set)
        transport: Any = pair.router._transport
        most = 0
        async with asyncio.timeout(60):
            while not stopped.is_set():
                for _ in range(100):
                    sender.send(Output(tuple(range(20))))
                await asyncio.sleep(0)
                most = max(most, transport.get_write_buffer_size())
                if most > 256 * 1024:
                    await asyncio.sleep(0.05)
        assert most < 512 * 1024
        assert not pair.router_connections


# ---- calls -----------------------------------------------------------------------------------------------------------


async def test_a_call_that_no_message_holds_is_refused_before_it_is_sent() -> None:
    async with connected() as pair:
        other = Other(pair)
        with pair.engine.sequence(0, stream_fed_here()) as number:
            call = msgspec.structs.replace(call_of(pair, "s", number), prompt=[70_000] * LONGEST)
            with pytest.raises(RequestTooLarge, match="at most 4096"):
                pair.engine.start(call)
        await other.require_whole(pair)
        assert not pair.started.calls


@pytest.mark.parametrize("features", [False, True])
async def test_a_call_that_is_more_than_an_engine_takes_is_refused_by_its_field(features: bool) -> None:
    """Whether it comes by the token stream or by itself, it is the engine's own limit that holds."""
    async with connected(longest_call=500) as pair:
        other, outputs = Other(pair), stream_fed_here()
        with pair.engine.sequence(0, outputs) as number:
            call = call_of(pair, "s", number)
            picture = MultiModalFeature(modality="image", digest="0" * 64, offset=0, length=2, data=b"x" * 600)
            more: dict[str, Any] = {"mm_features": (picture,)} if features else {"prompt": [1] * 600}
            pair.engine.start(msgspec.structs.replace(call, **more))
            with pytest.raises(RequestTooLarge, match=r"accepts at most 500 .max_request_bytes") as refused:
                await anext(outputs)
            assert refused.value.param == ("mm_features" if features else "prompt")
        await other.require_whole(pair)
        assert not pair.started.calls


@pytest.mark.parametrize(
    "wrong",
    [
        lambda call: msgspec.structs.replace(call, seq_id="x" * 300),
        lambda call: msgspec.structs.replace(call, prompt=[2**40]),
        lambda call: msgspec.structs.replace(call, begin=-1),
    ],
    ids=["name", "token", "begin"],
)
async def test_a_call_that_cannot_be_read_ends_its_own_sequence(
    wrong: Callable[[StartGenerateCall], StartGenerateCall],
) -> None:
    async with connected() as pair:
        other = Other(pair)
        outputs = stream_fed_here()
        with pair.engine.sequence(2, outputs) as number:
            pair.engine.start(wrong(call_of(pair, "s", number, output=(1, 2))))
            with pytest.raises(BadRequest, match="start_generate"):
                await anext(outputs)
        await other.require_whole(pair)
        assert not pair.started.calls


async def test_an_engine_that_does_not_read_is_asked_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_engine, "MOST_UNREAD", 64 * 1024)
    async with connected() as pair:
        reading: Any = pair.router._transport
        reading.pause_reading()
        transport: Any = pair.engine._transport

        def start_many() -> None:
            for number in range(100_000):
                pair.engine.start(call_of(pair, "s" * 200, number))

        with pytest.raises(EngineUnreachable, match="does not read"):
            start_many()
        assert transport.get_write_buffer_size() < 80 * 1024
