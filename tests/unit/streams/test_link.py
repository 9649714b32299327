"""The front door's end of an engine: connected before it is needed, again after a loss, and never in silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tercet.client import link as link_module
from tercet.client.link import StreamLink
from tercet.protocol import EngineError, EngineLoad, EngineUnreachable, FrontDoorUnreachable, OutputStream
from tercet.protocol.wire import Destination, Door, StartGenerateCall
from tercet.streams import Listener, Speaker

URL = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (
        ("CHECK_SECONDS", 0.01), ("STALE_AFTER", 0.4), ("STALLED_AFTER", 1.2), ("ANSWER_SECONDS", 0.2),
    ):  # fmt: skip
        monkeypatch.setattr(link_module, name, seconds)


class FakeEngine:
    """An engine's answers to ``connect`` and ``status``."""

    def __init__(self) -> None:
        self.speaker = Speaker("e", lambda: EngineLoad(waiting=0, running=0, kv_usage=0.0), self.start)
        self.connect_error: Exception | None = None
        self.alive: Callable[[], Awaitable[object]] = self._answer
        self.asked = 0

    async def start(self, call: StartGenerateCall, door: Destination) -> None:
        raise AssertionError("nobody asked for a sequence")

    async def connect(self, door: Door) -> None:
        self.asked += 1
        if self.connect_error is not None:
            raise self.connect_error
        await self.speaker.connect(door.address, door.key)

    async def _answer(self) -> object:
        return None

    async def hang(self) -> object:
        await asyncio.sleep(1000)
        return None

    def freeze(self) -> None:
        """Keep the connection and say nothing any more."""
        for connection in self.speaker._connections.values():  # pyright: ignore[reportPrivateUsage]
            connection.tick = lambda: None  # type: ignore[method-assign]


@asynccontextmanager
async def linked(engine: FakeEngine) -> AsyncGenerator[StreamLink]:
    async with Listener() as listener:
        link = StreamLink(listener, "e", URL, engine.connect, lambda: engine.alive(), lambda _: None)
        try:
            yield link
        finally:
            await link.close()
            engine.speaker.close()


def stream_fed_here() -> OutputStream:
    return OutputStream(OutputStream.until_over)


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.01)


async def test_it_connects_by_itself_and_again_after_a_loss() -> None:
    engine = FakeEngine()
    async with linked(engine) as link:
        link.start()
        await until(lambda: link.line.connected)
        assert await link.ready() is link.line
        link.line.drop("for this test")
        assert not link.line.connected
        assert await link.ready() is link.line, "even if the engine has not heard of the loss yet"
        assert engine.asked >= 2


async def test_many_that_need_it_ask_the_engine_once() -> None:
    engine = FakeEngine()
    async with linked(engine) as link:
        found = await asyncio.gather(*(link.ready() for _ in range(20)))
        assert set(found) == {link.line}
        assert engine.asked == 1


@pytest.mark.parametrize("error", [FrontDoorUnreachable("no way there"), EngineError("HTTP 404")])
async def test_an_engine_that_cannot_connect_is_served_otherwise_and_that_is_logged_once(
    error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "ASK_AGAIN_SECONDS", 0.02)
    engine = FakeEngine()
    engine.connect_error = error
    with caplog.at_level(logging.WARNING):
        async with linked(engine) as link:
            link.start()
            assert await link.ready() is None
            await until(lambda: engine.asked > 3)
            assert len(caplog.records) == 1
            assert "server-sent events instead" in caplog.text
            engine.connect_error = None
            await until(lambda: link.line.connected)
            assert "has a token stream now" in caplog.text


async def test_an_engine_that_does_not_answer_is_unreachable_and_not_a_fallback() -> None:
    engine = FakeEngine()
    engine.connect_error = EngineUnreachable("nobody there")
    async with linked(engine) as link:
        with pytest.raises(EngineUnreachable):
            await link.ready()
        engine.connect_error = None
        assert await link.ready() is link.line


@pytest.mark.parametrize("answers", [True, False])
async def test_a_stream_that_falls_silent_ends_its_sequences(answers: bool) -> None:
    engine, outputs = FakeEngine(), stream_fed_here()
    async with linked(engine) as link:
        link.start()
        await until(lambda: link.line.connected)
        with link.line.sequence(0, outputs):
            if not answers:
                engine.alive = engine.hang
            engine.freeze()
            with pytest.raises(EngineUnreachable, match="nothing came for"):
                await asyncio.wait_for(anext(outputs), 20)


async def test_an_idle_stream_that_reports_is_left_alone() -> None:
    engine, outputs = FakeEngine(), stream_fed_here()
    engine.alive = engine.hang
    async with linked(engine) as link:
        link.start()
        await until(lambda: link.line.connected)
        with link.line.sequence(0, outputs):
            waiting = asyncio.create_task(anext(outputs))
            await asyncio.sleep(1.0)
            assert not waiting.done()
            assert engine.asked == 1
            waiting.cancel()


@pytest.mark.parametrize("steps", range(8))
async def test_giving_up_while_it_connects_leaves_nothing(steps: int) -> None:
    engine = FakeEngine()
    async with linked(engine) as link:
        waiting = asyncio.create_task(link.ready())
        for _ in range(steps):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert await link.ready() is link.line
