"""Both ends of a token stream over real sockets: tokens, reports, cancellations, lost connections, strangers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest

from tercet.protocol import (
    BadRequest,
    Conflict,
    EngineError,
    EngineLoad,
    EngineUnreachable,
    NoSpace,
    Output,
    OutputStream,
    RouterUnreachable,
    TokenLogprob,
    Usage,
)
from tercet.protocol.wire import StartGenerateCall, StreamDestination
from tercet.wire.client import StreamListener
from tercet.wire.client.http_engine import EngineConnection
from tercet.wire.streams import OutputBatch, RouterConnection, RouterConnections, StreamHello
from tercet.wire.streams.wire_format import LONGEST_FRAME, LONGEST_HELLO, PROTOCOL, frame_of
from tests.longest_wait import LONGEST_WAIT_S, until

LOAD = EngineLoad(waiting=1, running=2, kv_usage=0.25, tokens=30, step_time=0.02)
ENGINE_URL = "http://127.0.0.1:1"


class Started:
    """What an engine does with the sequences that it is asked for: the one ``seq_id`` that is an error's fails so."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.errors: dict[str, Exception] = {}

    async def start(self, call: StartGenerateCall, link: RouterConnection, number: int) -> None:
        assert link.open
        self.calls.append((call.seq_id, number))
        if call.seq_id in self.errors:
            raise self.errors[call.seq_id]


async def no_start(call: StartGenerateCall, link: RouterConnection, number: int) -> None:
    raise AssertionError("nobody asked for a sequence")


@dataclass
class Pair:
    """A router's end of an engine's connection, and the engine's end."""

    listener: StreamListener
    engine: EngineConnection
    router_connections: RouterConnections
    router: RouterConnection
    address: str
    loads: list[EngineLoad] = field(default_factory=list[EngineLoad])
    started: Started = field(default_factory=Started)


@asynccontextmanager
async def connected(longest_call: int = LONGEST_FRAME) -> AsyncGenerator[Pair]:
    loads: list[EngineLoad] = []
    async with StreamListener() as listener:
        engine = listener.connection_of("e", loads.append)
        address = await listener.address_for(ENGINE_URL)
        started = Started()
        router_connections = RouterConnections("e", "i", lambda: LOAD, started.start, longest_call)
        try:
            yield Pair(
                listener,
                engine,
                router_connections,
                await router_connections.connect(address, engine.key),
                address,
                loads,
                started,
            )
        finally:
            router_connections.close()


def stream_fed_here() -> OutputStream:
    return OutputStream(OutputStream.until_over)


def never() -> None:
    raise AssertionError("the sequence was stopped")


def call_of(pair: Pair, seq_id: str, number: int, output: Sequence[int] = ()) -> StartGenerateCall:
    router = StreamDestination(address=pair.address, key=pair.engine.key, number=number)
    return StartGenerateCall(
        prompt=[1, 2], seq_id=seq_id, output=list(output), sampling_params={"seed": 3}, router=router
    )


async def test_sequences_are_started_over_the_connection() -> None:
    async with connected() as pair:
        numbers: dict[str, int] = {}
        for name in ("a", "b"):
            outputs = stream_fed_here()
            with pair.engine.sequence(0, outputs) as number:
                numbers[name] = number
                pair.engine.start(call_of(pair, name, number))
                await until(lambda: len(pair.started.calls) == len(numbers))
                pair.router.sender(number, 0, never).send(Output((5,), "length"))
                assert (await anext(outputs)).token_ids == (5,)
        assert pair.started.calls == list(numbers.items())


@pytest.mark.parametrize("error", [NoSpace("full", "prompt"), ValueError("a bug")])
async def test_a_sequence_that_cannot_be_started_ends_in_its_error(error: Exception) -> None:
    async with connected() as pair:
        pair.started.errors["x"] = error
        outputs = stream_fed_here()
        with pair.engine.sequence(2, outputs) as number:
            pair.engine.start(call_of(pair, "x", number, output=(8, 9)))
            with pytest.raises(type(error) if isinstance(error, NoSpace) else EngineError, match=str(error)):
                await anext(outputs)
        assert not pair.engine.inbox.sequences
        assert pair.engine.connected


async def test_a_start_that_says_not_where_to_is_no_routers(caplog: pytest.LogCaptureFixture) -> None:
    async with connected() as pair:
        pair.engine.start(msgspec.structs.replace(call_of(pair, "x", 1), router=None))
        await until(lambda: not pair.engine.connected)
        assert not pair.started.calls
    assert "violated the protocol" in caplog.text


async def test_outputs_arrive_as_they_were_said() -> None:
    said = [
        Output((5, 6), usage=Usage(cached=3, computed=1)),
        Output((7,)),
        Output((8,), logprobs=((TokenLogprob(8, -0.5, 1), TokenLogprob(9, -1.5, 2)),)),
        Output((9,), "stop", "word"),
    ]
    outputs = stream_fed_here()
    async with connected() as pair:
        with pair.engine.sequence(2, outputs) as number:
            sender = pair.router.sender(number, 2, never)
            for output in said:
                sender.send(output)
            assert [await anext(outputs) for _ in said] == said
            assert not pair.engine.inbox.sequences
        assert pair.loads[-1] == LOAD


async def test_an_error_arrives_as_what_it_is() -> None:
    outputs = stream_fed_here()
    async with connected() as pair:
        with pair.engine.sequence(0, outputs) as number:
            pair.router.sender(number, 0, never).fail(NoSpace("no blocks for that", "prompt"))
            with pytest.raises(NoSpace, match="no blocks") as caught:
                await anext(outputs)
            assert caught.value.param == "prompt"


async def test_all_that_is_said_in_one_step_is_one_message() -> None:
    taken: list[bytes] = []
    async with connected() as pair:
        receive = pair.engine.receive
        pair.engine.receive = lambda frame: (taken.append(frame), receive(frame))[1]  # type: ignore[method-assign]
        outputs = [stream_fed_here() for _ in range(50)]
        stack = contextlib.ExitStack()
        numbers = [stack.enter_context(pair.engine.sequence(0, each)) for each in outputs]
        senders = [pair.router.sender(number, 0, lambda: None) for number in numbers]
        await until(lambda: pair.loads)  # an idle engine has reported
        taken.clear()
        for sender in senders:
            sender.send(Output((1,)))
        for each in outputs:
            assert (await anext(each)).token_ids == (1,)
        stack.close()
        assert [len(msgspec.msgpack.decode(frame, type=OutputBatch).deltas) for frame in taken] == [50]


async def test_reports_come_with_nothing_to_say_and_stop_with_the_connection() -> None:
    async with connected() as pair:
        await until(lambda: len(pair.loads) >= 3)
        pair.router_connections.close()
        await until(lambda: not pair.engine.connected)
        assert len(pair.router_connections) == 0


async def test_leaving_early_stops_the_sequence_on_the_engine() -> None:
    stopped = asyncio.Event()
    async with connected() as pair:
        with pair.engine.sequence(0, stream_fed_here()) as number:
            pair.router.sender(number, 0, stopped.set)
        await asyncio.wait_for(stopped.wait(), LONGEST_WAIT_S)


async def test_what_was_cancelled_before_it_began_does_not_begin() -> None:
    async with connected() as pair:
        with pair.engine.sequence(0, stream_fed_here()) as number:
            pass
        later = pair.engine.sequence(0, stream_fed_here())
        stopped = asyncio.Event()
        pair.router.sender(later.__enter__(), 0, stopped.set)
        later.__exit__(None, None, None)
        await asyncio.wait_for(stopped.wait(), LONGEST_WAIT_S)  # orders come in order, so the first is there too
        with pytest.raises(Conflict, match="cancelled before"):
            pair.router.sender(number, 0, never)


async def test_what_nobody_opened_is_stopped() -> None:
    stopped = asyncio.Event()
    async with connected() as pair:
        pair.router.sender(99, 0, stopped.set).send(Output((1,)))
        await asyncio.wait_for(stopped.wait(), LONGEST_WAIT_S)


async def test_the_engine_goes_and_every_sequence_ends() -> None:
    outputs = stream_fed_here()
    async with connected() as pair:
        with pair.engine.sequence(0, outputs) as number:
            sender = pair.router.sender(number, 0, lambda: None)
            sender.send(Output((1,)))
            await anext(outputs)
            pair.router.abort()
            with pytest.raises(EngineUnreachable, match="token stream ended"):
                await anext(outputs)


async def test_the_router_goes_and_every_sequence_is_stopped() -> None:
    stopped = [asyncio.Event(), asyncio.Event()]
    async with connected() as pair:
        for number, event in enumerate(stopped):
            pair.router.sender(number, 0, event.set)
        pair.listener.forget(pair.engine)
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in stopped)), LONGEST_WAIT_S)
        with pytest.raises(RouterUnreachable):
            pair.router.sender(7, 0, never)
        with pytest.raises(RouterUnreachable):  # its key is void
            await pair.router_connections.connect(pair.address, pair.engine.key)


async def test_a_new_connection_ends_what_the_old_one_carried() -> None:
    outputs = stream_fed_here()
    async with connected() as pair:
        with pair.engine.sequence(0, outputs):
            again = RouterConnections("e", "i", lambda: LOAD, no_start)
            await again.connect(pair.address, pair.engine.key)
            with pytest.raises(EngineUnreachable, match="the engine connected again"):
                await anext(outputs)
            await until(lambda: len(pair.router_connections) == 0)
            assert pair.engine.connected
            again.close()


async def test_two_callers_share_a_connection() -> None:
    async with connected() as pair:
        router_connections = RouterConnections("e", "i", lambda: LOAD, no_start)
        engine = pair.listener.connection_of("f", lambda _: None)
        first, second = await asyncio.gather(
            router_connections.connect(pair.address, engine.key), router_connections.connect(pair.address, engine.key)
        )
        assert first is second
        assert await router_connections.connect(pair.address, engine.key) is first
        router_connections.close()


@pytest.mark.parametrize("address", ["nowhere", ":", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:99999", "a:b", ":80"])
async def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(BadRequest, match="router"):
        await RouterConnections("e", "i", lambda: None, no_start).connect(address, "k")


async def test_a_router_that_is_not_there_is_named_in_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RouterUnreachable) as failed:
        await RouterConnections("e", "i", lambda: None, no_start).connect("127.0.0.1:1", "k")
    assert "127.0.0.1" not in failed.value.message
    assert "no router answers at 127.0.0.1:1" in caplog.text


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nhost: here\r\n\r\n",
        b"\xff" * 64,
        (3).to_bytes(4, "big") + b"abc",
        (LONGEST_HELLO + 1).to_bytes(4, "big"),
        frame_of(StreamHello(PROTOCOL, "not a key", "e", "i")),
        frame_of(OutputBatch((), LOAD)),
    ],
)
async def test_strangers_are_shown_out_and_change_nothing(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.wire.client.stream_listener.HELLO_SECONDS", 600.0)
    outputs = stream_fed_here()
    async with connected() as pair:
        with pair.engine.sequence(0, outputs) as number:
            sender = pair.router.sender(number, 0, never)
            host, _, port = pair.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), LONGEST_WAIT_S) == b""
            writer.close()
            sender.send(Output((4,), "stop"))
            assert (await anext(outputs)).token_ids == (4,)


async def test_strangers_do_not_keep_engines_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.wire.client.stream_listener.MOST_STRANGERS", 3)
    monkeypatch.setattr("tercet.wire.client.stream_listener.HELLO_SECONDS", 600.0)
    async with connected() as pair:
        host, _, port = pair.address.rpartition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
        for reader, _ in silent[:2]:
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), LONGEST_WAIT_S) == b""
        other = pair.listener.connection_of("other", lambda _: None)
        router_connections = RouterConnections("other", "i", lambda: None, no_start)
        await router_connections.connect(pair.address, other.key)
        assert other.connected
        assert pair.engine.connected
        router_connections.close()
        for _, writer in silent:
            writer.close()


async def test_a_large_fleet_may_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.wire.client.stream_listener.MOST_STRANGERS", 1)
    async with connected() as pair:
        host, _, port = pair.address.rpartition(":")
        expected = [pair.listener.connection_of(f"e{n}", lambda _: None) for n in range(10)]
        silent = [await asyncio.open_connection(host, int(port)) for _ in expected]
        router_connections = [RouterConnections(each.engine, "i", lambda: None, no_start) for each in expected]
        for each, routers in zip(expected, router_connections, strict=True):
            await routers.connect(pair.address, each.key)
        assert all(each.connected for each in expected)
        for routers in router_connections:
            routers.close()
        for _, writer in silent:
            writer.close()


async def test_an_engine_that_sends_garbage_loses_its_stream_only() -> None:
    outputs, others = stream_fed_here(), stream_fed_here()
    async with connected() as pair:
        bad = pair.listener.connection_of("bad", lambda _: None)
        host, _, port = pair.address.rpartition(":")
        with bad.sequence(0, outputs), pair.engine.sequence(0, others) as number:
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                frame_of(StreamHello(PROTOCOL, bad.key, "bad", "i")) + (4).to_bytes(4, "big") + b"\xc1\xc1\xc1\xc1"
            )
            with pytest.raises(EngineUnreachable, match="violated the protocol"):
                await anext(outputs)
            pair.router.sender(number, 0, never).send(Output((4,), "stop"))
            assert (await anext(others)).finished
            writer.close()


async def test_an_engine_that_speaks_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.wire.client.stream_listener.HELLO_SECONDS", 600.0)
    async with connected() as pair:
        pair.engine.drop("for this test")
        host, _, port = pair.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(frame_of(StreamHello("tercet-stream/999", pair.engine.key, "e", "i")))
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), LONGEST_WAIT_S) == b""
        assert not pair.engine.connected
        writer.close()


@pytest.mark.parametrize("steps", range(6))
async def test_waiting_can_be_cancelled_at_any_time(steps: int) -> None:
    stopped = asyncio.Event()
    async with connected() as pair:

        async def serve() -> None:
            outputs = stream_fed_here()
            with pair.engine.sequence(0, outputs) as number:
                sender = pair.router.sender(number, 0, stopped.set)
                for token in range(3):
                    sender.send(Output((token,)))
                    await anext(outputs)
                await anext(outputs)

        task = asyncio.create_task(serve())
        for _ in range(steps):
            await asyncio.sleep(0.002 if steps > 3 else 0)
        begun = task.cancel() and steps > 0
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not pair.engine.inbox.sequences
        if begun:
            await asyncio.wait_for(stopped.wait(), LONGEST_WAIT_S)


async def test_a_connection_that_closes_is_told_at_once_and_one_that_is_given_up_is_not() -> None:
    async with connected() as pair:
        lost: list[str] = []
        pair.engine.on_lost = lambda: lost.append("e")
        await until(lambda: pair.engine.connected)
        pair.router_connections.close()
        await until(lambda: not pair.engine.connected)
        assert lost == ["e"]
        pair.engine.drop("we are done with it")
        assert lost == ["e"]
