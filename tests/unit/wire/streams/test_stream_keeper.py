"""The router's end of an engine: connected before it is needed, again after a loss, and never in silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tercet.protocol import EngineError, EngineLoad, EngineUnreachable, OutputStream, RouterUnreachable
from tercet.protocol.wire import RouterAddress, StartGenerateCall
from tercet.wire.client import StreamListener, http_engine, stream_listener
from tercet.wire.client.stream_listener import StreamKeeper
from tercet.wire.streams import RouterConnection, RouterConnections
from tests.clock import Clock
from tests.longest_wait import until

URL = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_listener, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(stream_listener, "ANSWER_SECONDS", 20.0)  # of real time: a slow machine is not a dead engine


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(1000.0)
    monkeypatch.setattr(http_engine, "time", clock)
    monkeypatch.setattr(stream_listener, "time", clock)
    return clock


class FakeEngine:
    """An engine's answers to ``connect`` and ``status``."""

    def __init__(self) -> None:
        self.router_connections = RouterConnections(
            "e", "i", lambda: EngineLoad(waiting=0, running=0, kv_usage=0.0), self.start
        )
        self.connect_error: Exception | None = None
        self.alive: Callable[[], Awaitable[object]] = self._answer
        self.asked = 0

    async def start(self, call: StartGenerateCall, link: RouterConnection, number: int) -> None:
        raise AssertionError("nobody asked for a sequence")

    async def connect(self, router: RouterAddress) -> None:
        self.asked += 1
        if self.connect_error is not None:
            raise self.connect_error
        await self.router_connections.connect(router.address, router.key)

    async def _answer(self) -> object:
        return None

    async def hang(self) -> object:
        await asyncio.sleep(1000)
        return None

    def freeze(self) -> None:
        """Keep the connection and say nothing any more."""
        for connection in self.router_connections._connections.values():  # pyright: ignore[reportPrivateUsage]
            connection.tick = lambda: None  # type: ignore[method-assign]


@asynccontextmanager
async def kept(engine: FakeEngine) -> AsyncGenerator[StreamKeeper]:
    async with StreamListener() as listener:
        keeper = StreamKeeper(
            listener, listener.connection_of("e", lambda _: None), URL, engine.connect, lambda: engine.alive()
        )
        try:
            yield keeper
        finally:
            await keeper.close()
            engine.router_connections.close()


def stream_fed_here() -> OutputStream:
    return OutputStream(OutputStream.until_over)


async def test_it_connects_by_itself_and_again_after_a_loss() -> None:
    engine = FakeEngine()
    async with kept(engine) as keeper:
        keeper.start()
        await until(lambda: keeper.connection.connected)
        assert await keeper.ready() is keeper.connection
        keeper.connection.drop("for this test")
        assert not keeper.connection.connected
        assert await keeper.ready() is keeper.connection, "even if the engine has not heard of the loss yet"
        assert engine.asked >= 2


async def test_many_that_need_it_ask_the_engine_once() -> None:
    engine = FakeEngine()
    async with kept(engine) as keeper:
        found = await asyncio.gather(*(keeper.ready() for _ in range(20)))
        assert set(found) == {keeper.connection}
        assert engine.asked == 1


@pytest.mark.parametrize("error", [RouterUnreachable("no way there"), EngineError("HTTP 404")])
async def test_an_engine_that_cannot_connect_is_served_otherwise_and_that_is_logged_once(
    error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_listener, "RETRY_DELAY_S", 0.02)
    engine = FakeEngine()
    engine.connect_error = error
    with caplog.at_level(logging.WARNING):
        async with kept(engine) as keeper:
            keeper.start()
            assert await keeper.ready() is None
            await until(lambda: engine.asked > 3)
            assert len(caplog.records) == 1
            assert "sends server-sent events instead of a token stream" in caplog.text
            engine.connect_error = None
            await until(lambda: "stream_back: " in caplog.text)
            assert keeper.connection.connected


async def test_an_engine_that_does_not_answer_is_unreachable_and_not_a_fallback() -> None:
    engine = FakeEngine()
    engine.connect_error = EngineUnreachable("nobody there")
    async with kept(engine) as keeper:
        with pytest.raises(EngineUnreachable):
            await keeper.ready()
        engine.connect_error = None
        assert await keeper.ready() is keeper.connection


@pytest.mark.parametrize(
    ("answers", "why"), [(True, r"no data for \d+ s$"), (False, r"no data for \d+ s, .* does not answer$")]
)
async def test_a_stream_that_falls_silent_ends_its_sequences(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, answers: bool, why: str
) -> None:
    engine, outputs = FakeEngine(), stream_fed_here()
    if not answers:
        monkeypatch.setattr(stream_listener, "ANSWER_SECONDS", 0.2)
    async with kept(engine) as keeper:
        keeper.start()
        await until(lambda: keeper.connection.connected)
        with keeper.connection.sequence(0, outputs):
            if not answers:
                engine.alive = engine.hang
            engine.freeze()
            waiting = asyncio.ensure_future(anext(outputs))

            def has_ended() -> bool:
                clock.now += 1.0  # what was on its way when the engine froze may still arrive
                return waiting.done()

            await until(has_ended)
            with pytest.raises(EngineUnreachable, match=why):
                await waiting


@pytest.mark.slow
async def test_an_idle_stream_that_reports_is_left_alone(clock: Clock) -> None:
    engine, outputs = FakeEngine(), stream_fed_here()
    engine.alive = engine.hang
    async with kept(engine) as keeper:
        keeper.start()
        await until(lambda: keeper.connection.connected)
        with keeper.connection.sequence(0, outputs):
            waiting = asyncio.ensure_future(anext(outputs))
            for _ in range(20):
                clock.now += 0.9
                await until(lambda: keeper.connection.last_heard == clock.now)
            assert stream_listener.STALLED_AFTER < 20 * 0.9
            assert not waiting.done()
            assert engine.asked == 1
            waiting.cancel()


@pytest.mark.parametrize("steps", range(8))
async def test_giving_up_while_it_connects_leaves_nothing(steps: int) -> None:
    engine = FakeEngine()
    async with kept(engine) as keeper:
        waiting = asyncio.create_task(keeper.ready())
        for _ in range(steps):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert await keeper.ready() is keeper.connection
