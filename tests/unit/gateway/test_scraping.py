"""A picker before engines that know nothing of it: their load is read from vLLM's own page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest
from aiohttp import web

from tercet.fleet import EngineFleet
from tercet.protocol import BadRequest, Conflict, Request
from tercet.settings import EngineAddress
from tercet_gateway.endpoint_picker import EndpointPicker, PickerMetrics, address_of
from tercet_gateway.gateway_settings import PickerConfig
from tercet_gateway.openai_call import ByCharacters, OpenAIBody, OpenAICall, stand_ins
from tercet_gateway.server import fleet_of
from tests.longest_wait import until
from tests.servers import served

SECONDS = 60


@dataclass
class StockEngine:
    """What a plain vLLM server shows: nothing of Tercet's, and a page of metrics."""

    waiting: int = 0
    running: int = 0
    usage: float = 0.0
    started: float = 1.0
    status: int = 200
    url: str = ""

    async def page(self, _: web.Request) -> web.Response:
        return web.Response(
            status=self.status,
            text=f"process_start_time_seconds {self.started}\n"
            f'vllm:num_requests_waiting{{engine="0",model_name="m"}} {self.waiting}\n'
            f'vllm:num_requests_running{{engine="0",model_name="m"}} {self.running}\n'
            f'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {self.usage}\n'
            'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n',
        )


@asynccontextmanager
async def stock() -> AsyncGenerator[StockEngine]:
    engine = StockEngine()
    app = web.Application()
    app.router.add_get("/metrics", engine.page)
    async with served(app) as engine.url:
        yield engine


@dataclass
class Pool:
    engines: list[StockEngine]
    fleet: EngineFleet
    picker: EndpointPicker

    async def pick(self, prompt: str = "x" * 400) -> str:
        call = OpenAICall("/v1/completions", {}, OpenAIBody(prompt=prompt), len(prompt))
        (first, *_) = (await self.picker.pick(call)).decode
        return first

    async def until(self, name: str, **load: object) -> None:
        """The fleet has heard this of an engine."""
        async with asyncio.timeout(SECONDS):
            while True:
                last = self.fleet.knowledge.loads.last(name)
                if last is not None and all(getattr(last[0], key) == value for key, value in load.items()):
                    return
                await asyncio.sleep(0.01)


@asynccontextmanager
async def pool(many: int, scheduling: str | None = None) -> AsyncGenerator[Pool]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(stock()) for _ in range(many)]
        config = PickerConfig(
            engines=tuple(EngineAddress(f"e{n}", engine.url) for n, engine in enumerate(engines)),
            load_from="metrics",
            metrics_interval_s=0.02,
            scheduling=scheduling,
        )
        fleet = await stack.enter_async_context(fleet_of(config))
        made = Pool(engines, fleet, EndpointPicker(fleet, ByCharacters(), PickerMetrics(fleet.serves), config))
        await until(lambda: all(member.reachable for member in fleet.members))
        yield made


async def test_the_less_busy_one_is_picked_by_what_its_page_says() -> None:
    async with pool(2) as there:
        for busy, idle in ((0, 1), (1, 0)):
            there.engines[busy].running, there.engines[idle].running = 20, 0
            await there.until(f"e{busy}", running=20)
            await there.until(f"e{idle}", running=0)
            assert await there.pick(f"{busy}" * 400) == address_of(there.engines[idle].url)


async def test_a_full_engine_has_no_room() -> None:
    async with pool(2) as there:
        there.engines[0].waiting, there.engines[1].usage = 9, 0.95
        await there.until("e0", waiting=9)
        await there.until("e1", kv_usage=0.95)
        asked = asyncio.create_task(there.pick())
        await asyncio.sleep(0.1)
        assert not asked.done()
        there.engines[1].usage = 0.1
        assert await asyncio.wait_for(asked, SECONDS) == address_of(there.engines[1].url)


async def test_the_models_are_those_that_pages_name() -> None:
    async with pool(1) as there:
        assert there.fleet.serves("m")
        assert not there.fleet.serves("invented")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["error", "nonsense"])
async def test_an_engine_whose_page_fails_is_not_picked_until_it_is_back(how: str) -> None:
    async with pool(2) as there:
        lost = there.engines[0]
        lost.status = 500 if how == "error" else 200
        waiting, lost.waiting = lost.waiting, "much" if how == "nonsense" else 0  # type: ignore[assignment]
        await until(lambda: not there.fleet.member("e0").reachable)
        assert {await there.pick(f"{n}" * 400) for n in range(6)} == {address_of(there.engines[1].url)}
        lost.status, lost.waiting = 200, waiting
        await until(lambda: there.fleet.member("e0").reachable)


async def test_what_was_routed_to_an_engine_is_forgotten_when_it_is_started_anew() -> None:
    async with pool(2) as there:
        first = await there.pick("abcd" * 1000)
        (place,) = (n for n, engine in enumerate(there.engines) if address_of(engine.url) == first)
        request = Request(seq_id="r", prompt=stand_ins(b"abcd" * 1000))
        assert there.fleet.knowledge.cached_tokens(f"e{place}", request) > 0
        there.engines[place].started += 1
        await until(lambda: not there.fleet.knowledge.cached_tokens(f"e{place}", request))


async def test_it_says_how_much_its_cache_holds_and_has_no_verbs() -> None:
    async with pool(1) as there:
        member = there.fleet.member("e0")
        assert member.kv_tokens == 1600
        with pytest.raises(Conflict, match="no verbs"):
            async with member.engine.prep_recv(Request(seq_id="x", prompt=(1,))):
                pass


def test_a_port_of_kv_events_is_for_engines_that_do_not_say_it() -> None:
    with pytest.raises(BadRequest, match="kv-events-port"):
        PickerConfig(engines=(EngineAddress("e", "http://127.0.0.1:1"),), kv_events_port=5557)
