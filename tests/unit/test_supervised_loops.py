"""Background loops of engines and of what stands around routers: an error at each await, and each goes on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from tercet.cli.engine_process import JoiningEngine
from tercet.cluster import running_fleet
from tercet.engine import liveness_probe
from tercet.engine.agents import AgentReports
from tercet.engine.liveness_probe import LivenessProbe
from tercet.fleet import kv_events
from tercet.fleet.kubernetes_api import Pod, Waits, Watch
from tercet.fleet.kv_events import cache_followed
from tercet.logs import EVENTS
from tercet.protocol.wire import JoinCall, Joined
from tercet.transport import SendDone
from tercet.transport.agent.agent import Reporter
from tercet.transport.agent.agent_messages import AsyncControlClient, ControlServer, ReadCounters
from tercet.wire.client import bounded_answers, stream_listener
from tercet_planner import live_planner
from tercet_planner.live_planner import LOOK_S
from tests.longest_wait import LONGEST_WAIT_S, until

from .fleet.discovery.api_server import PODS, api_server, pod
from .fleet.discovery.test_watching import Seen
from .fleet.test_kv_events import Engine as PublishingEngine
from .fleet.test_kv_events import Publisher, cached, known, stored
from .planner.test_live_planner import MY_POLICY, Router, planner_of
from .supervision import Works, kept, with_an_error_at_each_await
from .wire.streams import test_stream_keeper

SOON_S = 0.002
READS = "async for piece in response.content.iter_any():"


# ---- of engines --------------------------------------------------------------------------------------------------


class Part:
    """A process of an engine; while it is stopped, it does not answer."""

    def __init__(self) -> None:
        self.answers = 0
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def ask(self) -> dict[str, int]:
        await asyncio.sleep(0)
        await self.goes_on.wait()
        self.answers += 1
        return {"answers": self.answers}


@pytest.fixture
def quick_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness_probe, "PROBE_SECONDS", SOON_S)
    monkeypatch.setattr(liveness_probe, "LOGGED_SECONDS", 4 * SOON_S)


@asynccontextmanager
async def probed(part: Part) -> AsyncGenerator[LivenessProbe]:
    probe = LivenessProbe(part.ask, [], [])
    await probe.start()
    try:
        yield probe
    finally:
        await probe.close()


@pytest.mark.usefixtures("quick_probe")
async def test_stalls_are_watched() -> None:
    @asynccontextmanager
    async def started() -> AsyncGenerator[Works]:
        part = Part()
        async with probed(part) as probe:

            async def works() -> None:
                part.goes_on.clear()
                await until(lambda: probe._silent)
                part.goes_on.set()
                await until(lambda: not probe._silent)

            yield works

    await with_an_error_at_each_await("engine/liveness_probe.py:LivenessProbe._watch", started)


@pytest.mark.usefixtures("quick_probe")
async def test_parts_are_polled() -> None:
    @asynccontextmanager
    async def started() -> AsyncGenerator[Works]:
        part = Part()
        async with probed(part) as probe:

            async def works() -> None:
                before = part.answers
                await probe.news(LONGEST_WAIT_S)
                await until(lambda: part.answers > before and probe.core_status == {"answers": part.answers})

            yield works

    await with_an_error_at_each_await("engine/liveness_probe.py:_Part.ask_again_and_again", started)


async def test_reports_of_agents_are_received() -> None:
    @asynccontextmanager
    async def started() -> AsyncGenerator[Works]:
        reports, reporter = AgentReports(1, lambda _: None), Reporter()

        async def works() -> None:
            with reports.sending() as sending:
                reporter.report(reports.address, SendDone(sending.send_id, 0, 5, 1, "tcp"))
                await sending.wait()

        try:
            yield works
        finally:
            reports._task.cancel()
            reports._socket.close()
            reporter.close()

    await with_an_error_at_each_await("engine/agents.py:AgentReports._receive", started)


async def test_answers_of_agents_are_taken() -> None:
    @asynccontextmanager
    async def started() -> AsyncGenerator[Works]:
        server = ControlServer(lambda _: {"here": 1})
        client = AsyncControlClient(server.address, server.secret)
        try:
            yield lambda: client.call(ReadCounters())
        finally:
            client.close()
            server.close()

    await with_an_error_at_each_await("transport/agent/agent_messages.py:AsyncControlClient._take_answers", started)


async def test_an_engine_stays_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_answers, "AGAIN_SECONDS", SOON_S)

    class Membership(bounded_answers.RouterMembership):
        joins = 0

        async def join(self, call: JoinCall) -> Joined:
            await asyncio.sleep(0)
            self.joins += 1
            return Joined(0)

    call = JoiningEngine("e", "both", "http://e", cast(Any, None)).call()

    def started() -> Any:
        membership = Membership("http://r", "e")

        async def works() -> None:
            before = membership.joins
            await until(lambda: membership.joins > before)

        return kept(lambda: membership.stay(call, lambda _: None), works)

    await with_an_error_at_each_await("wire/client/bounded_answers.py:RouterMembership.stay", started)


# ---- around routers ----------------------------------------------------------------------------------------------


async def test_a_token_stream_is_kept_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_listener, "CHECK_SECONDS", SOON_S)
    monkeypatch.setattr(stream_listener, "STALE_AFTER", -1.0)

    checks = list[str]()

    async def alive() -> None:
        await asyncio.sleep(0)
        checks.append("alive")

    @asynccontextmanager
    async def started() -> AsyncGenerator[Works]:
        engine = test_stream_keeper.FakeEngine()
        engine.alive = alive
        async with test_stream_keeper.kept(engine) as keeper:
            keeper.start()

            async def works() -> None:
                await until(lambda: keeper.connection.connected)
                keeper.connection.drop("for this test")
                await until(lambda: keeper.connection.connected)
                before = len(checks)
                await until(lambda: len(checks) > before)

            yield works

    await with_an_error_at_each_await("wire/client/stream_listener.py:StreamKeeper._keep", started)


async def test_kv_events_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "RETRY_DELAY_S", SOON_S)
    monkeypatch.setattr(kv_events, "ASK_SETTLED_SECONDS", SOON_S)
    publishers = [Publisher(), Publisher()]
    for blocks, publisher in enumerate(publishers, 1):
        publisher.quietly(*map(stored, range(blocks)))

    class Engine(PublishingEngine):
        async def status(self) -> Any:
            await asyncio.sleep(0)
            return await super().status()

    @asynccontextmanager
    async def started() -> AsyncGenerator[Works]:
        engine, knowledge, turns = Engine(None), known(), itertools.count()

        async def works() -> None:
            number = next(turns) % 2
            engine.restart(publishers[number].address)
            await until(lambda: cached(knowledge) == number + 1)

        async with cache_followed("e", "http://127.0.0.1:1", cast(Any, engine), knowledge, engine.anew):
            yield works

    await with_an_error_at_each_await("fleet/kv_events.py:follow_cache", started)
    for publisher in publishers:
        await publisher.close()


async def test_a_publisher_is_subscribed_to_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "RETRY_DELAY_S", SOON_S)
    publisher = Publisher()

    @asynccontextmanager
    async def started() -> AsyncGenerator[Works]:
        knowledge, times = known(), itertools.count(1)
        forgotten, forget = [0], knowledge.cleared

        def cleared(name: str) -> None:
            forgotten[0] = next(times)
            forget(name)

        async def works() -> None:
            before = forgotten[0]
            while forgotten[0] == before:
                publisher.quietly(stored(0))  # lost on its way, so the next one makes a replay necessary
                await publisher.publish(stored(0))
                await publisher._live.send_multipart([b"", b"not a number"])  # pyright: ignore[reportPrivateUsage]
                await asyncio.sleep(SOON_S)
            await until(lambda: cached(knowledge) == 1)

        monkeypatch.setattr(knowledge, "cleared", cleared)
        engine = PublishingEngine(publisher.address)
        async with cache_followed("e", "http://127.0.0.1:1", cast(Any, engine), knowledge, engine.anew):
            yield works

    await with_an_error_at_each_await("fleet/kv_events.py:_follow", started)
    await publisher.close()


async def test_a_collection_is_watched() -> None:
    waits = Waits(first_pause_s=SOON_S, longest_pause_s=SOON_S)
    async with api_server() as server:

        def started() -> Any:
            seen = Seen()

            async def works() -> None:
                server.put(pod(f"p{len(server.pods) % 3}")) if len(server.pods) < 3 else server.delete("p0")
                await seen.until_like(server)
                await until(lambda: server._open)
                before, server.refuse_watches = server.watches, 410
                server.drop()
                await until(lambda: server.watches > before)
                server.refuse_watches = None

            watch = Watch(server.api, PODS, Pod, {"labelSelector": "app=engine"}, cast(Any, seen), waits)
            return kept(watch.run, works)

        await with_an_error_at_each_await("fleet/kubernetes_api.py:Watch.run", started, ends_at=READS)


async def test_serious_events_of_a_log_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_fleet, "ASK_SECONDS", SOON_S)
    log = tmp_path / "a.log"
    log.touch()

    @asynccontextmanager
    async def started() -> AsyncGenerator[Works]:
        said: list[str] = []
        numbers = itertools.count()

        async def works() -> None:
            event = f"number {next(numbers)}"
            with log.open("ab") as lines:
                lines.write(msgspec.json.encode({"logger": EVENTS, "level": "warning", "message": event}) + b"\n")
            await until(lambda: event in said)

        reading = asyncio.create_task(running_fleet.read_events(log, said.append))
        await asyncio.sleep(SOON_S)
        try:
            yield works
        finally:
            reading.cancel()
            await asyncio.wait({reading})

    await with_an_error_at_each_await("cluster/running_fleet.py:_EventLog.follow", started)


async def test_a_planner_looks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_planner, "LOOK_S", SOON_S)
    assert LOOK_S > SOON_S
    file = tmp_path / "mine.py"
    file.write_text(MY_POLICY)

    class Asked(Router):
        async def ask(self, method: str, path: str, body: Any) -> Any:
            await asyncio.sleep(0)
            return await super().ask(method, path, body)

    @asynccontextmanager
    async def started() -> AsyncGenerator[Works]:
        router = Asked(prompt=3000)
        planner = planner_of(router, planner=f"{file}:wanted", act="roles")

        async def works() -> None:
            for number, each in enumerate(router.engines):
                each["role"] = "prefill" if number < 2 else "decode"
            before = len(router.changes)

            def has_changed() -> bool:
                planner._plan_at = 0.0  # at once, instead of after the interval
                return len(router.changes) > before

            await until(has_changed)

        planning = asyncio.create_task(planner.run())
        try:
            yield works
        finally:
            planning.cancel()
            await asyncio.wait({planning})

    await with_an_error_at_each_await("tercet_planner/live_planner.py:LivePlanner._look_on", started)
