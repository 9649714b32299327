"""What becomes of requests when the picker, or an engine, is killed or stopped."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from tercet.cluster.ports import free_ports
from tercet.protocol.headers import CONTROL_HEADERS as CONTROL
from tests.longest_wait import until
from tests.servers import served
from tests.unit.wire.client.certificates import Authority

from .gateway import CANDIDATES, HOST, Gateway

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.verifies("endpoint picker behind Envoy", vllm=False),
]


async def start(world: Gateway, engines: int = 2, **envoy: Any) -> None:
    for number, port in enumerate(free_ports(HOST, engines)):
        await world.start_engine(f"e{number}", port)
    await world.start_picker("--stuck-after=2")
    await world.start_envoy(**envoy)
    await world.until_ready(engines)


async def test_an_engine_dies_before_its_answer_begins(world: Gateway) -> None:
    await start(world)
    asked = asyncio.create_task(world.complete(max_tokens=150))
    victim = await world.who_runs()
    world.signal(victim, signal.SIGKILL)
    status, answer = await asked
    assert (status, answer["usage"]["completion_tokens"]) == (200, 150)
    # And at once the next ones, of which the picker may not know yet that the engine is gone.
    answers = await asyncio.gather(*(world.complete(f"{n}" * 300) for n in range(10)))
    assert {status for status, _ in answers} == {200}
    assert (await world.metrics())['tercet_picker_served_total{endpoint="fallback"}'] >= 1


async def test_an_engine_stands_still(world: Gateway) -> None:
    """Before its answer begins the next one serves; afterwards the client must see that its answer is not whole."""
    await start(world, silence="4s")
    async with world.streamed("tell me", 2000) as answer:
        await answer.content.readline()
        victim = await world.who_runs()
        asked = asyncio.create_task(world.complete("something else", max_tokens=30))
        world.signal(victim, signal.SIGSTOP)
        try:
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.content.read()
            answers = await asyncio.gather(asked, *(world.complete(f"{n}" * 300) for n in range(4)))
            assert {status for status, _ in answers} == {200}
            await world.until_picked_among(1)
        finally:
            world.signal(victim, signal.SIGCONT)
    await world.until_picked_among(2)


async def test_an_engine_dies_in_the_middle_of_a_stream(world: Gateway) -> None:
    """The client must see that its answer is not whole."""
    await start(world)
    async with world.streamed("tell me", 2000) as answer:
        assert answer.status == 200
        await answer.content.readline()
        world.signal(await world.who_runs(), signal.SIGKILL)
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.content.read()


async def test_without_an_engine_the_answer_is_503(world: Gateway) -> None:
    await start(world)
    for name in world.engines:
        world.signal(name, signal.SIGKILL)
    await world.until_picked_among(0)
    status, answer = await world.complete()
    assert (status, answer["error"]["code"]) == (503, "engine_unreachable")


@pytest.mark.parametrize("duplex", [False, True], ids=["buffered", "full-duplex"])
async def test_candidates_that_another_filter_names(world: Gateway, duplex: bool) -> None:
    """As gateways with subsets do: those serve and nobody else, and with none of the pool it is 503."""
    await start(world, duplex=duplex, candidates=True)
    addresses = {name: f"{HOST}:{port}" for name, port in world.engines.items()}

    async def asked(candidates: str) -> int:
        return (await world.complete(headers={CANDIDATES: candidates}))[0]

    for name, address in addresses.items():
        before = {each: await world.served_by(each) for each in addresses}
        for _ in range(3):
            assert await asked(address) == 200
            assert await asked(f"192.0.2.1:1, {address}") == 200
        for each in addresses:
            assert await world.served_by(each) - before[each] == (6 if each == name else 0)
    for nobody in ("192.0.2.1:1", ","):
        assert await asked(nobody) == 503
    assert (await world.complete())[0] == 200, "who names none may have all"


@pytest.mark.parametrize("duplex", [False, True], ids=["buffered", "full-duplex"])
async def test_the_picker_dies_and_envoy_fails_open(world: Gateway, duplex: bool) -> None:
    await start(world, duplex=duplex)
    assert (await world.complete())[0] == 200
    async with world.streamed("tell me", 100) as answer:
        read = [await answer.content.readline()]
        world.signal("picker", signal.SIGKILL)
        read += [line async for line in answer.content]
    assert read[-2].strip() == b"data: [DONE]", "a stream that had begun goes on without the picker"

    async def all_served() -> bool:
        answers = await asyncio.gather(*(world.complete(f"{n}" * 300) for n in range(20)))
        found = {status for status, _ in answers}
        assert found <= ({200, 500} if duplex else {200})  # as Envoy is: see docs/envoy.md
        return found == {200}

    await until(all_served)
    await world.start_picker()
    await world.until_picked_among(2)

    async def picks() -> bool:
        await world.complete()
        return (await world.metrics()).get('inference_objective_request_total{model_name="m"}', 0.0) > 0

    await until(picks)


@pytest.mark.parametrize("duplex", [False, True], ids=["buffered", "full-duplex"])
async def test_the_picker_dies_and_envoy_fails_closed(world: Gateway, duplex: bool) -> None:
    await start(world, fail_open=False, duplex=duplex)
    assert (await world.complete())[0] == 200
    world.signal("picker", signal.SIGKILL)

    async def refused() -> bool:
        status, _ = await world.complete()
        assert status in (200, 500, 503, 504)
        return status >= 500

    await until(refused)


async def test_a_picker_with_tls_whose_certificate_is_renewed(world: Gateway) -> None:
    """As it is behind gateways, which speak TLS to it and take any certificate."""
    certificate, key = Authority(world.directory, "first").issue("picker")
    for name, port in zip(("e0", "e1"), free_ports(HOST, 2), strict=True):
        await world.start_engine(name, port)
    await world.start_picker("--tls-cert", str(certificate), "--tls-key", str(key))
    await world.start_envoy(fail_open=False, tls=True)
    await world.until_ready(2)
    assert (await world.complete())[0] == 200
    renewed, renewed_key = Authority(world.directory, "second").issue("renewed")
    renewed_key.replace(key)
    renewed.replace(certificate)
    await world.processes["envoy"].stop()
    await world.start_envoy(fail_open=False, tls=True)
    await world.until_ready(2)
    assert (await world.complete())[0] == 200
    assert "has changed, and is in use from now on" in "".join(
        file.read_text() for file in world.directory.glob("picker-*.log")
    )


async def test_a_picker_that_stops_costs_nothing(world: Gateway) -> None:
    """Told to stop it is not ready first, and Envoy asks it no more; nothing that it was shown is lost."""
    await start(world, fail_open=True)
    stop, statuses = asyncio.Event(), list[int]()

    async def ask() -> None:
        while not stop.is_set():
            statuses.append((await world.complete(max_tokens=1))[0])

    asking = [asyncio.create_task(ask()) for _ in range(4)]
    await asyncio.sleep(0.5)
    world.signal("picker", signal.SIGTERM)
    await until(lambda: gone(world))
    await asyncio.sleep(0.5)
    stop.set()
    await asyncio.gather(*asking)
    assert set(statuses) == {200}


async def gone(world: Gateway) -> bool:
    return world.processes["picker"].returncode is not None


async def test_without_a_picker_clients_choose_nothing_and_reach_the_api_only(world: Gateway) -> None:
    seen: list[web.Request] = []

    async def answer(request: web.Request) -> web.Response:
        if request.path != "/health":
            seen.append(request)
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with served(app) as url:
        world.engines["echo"] = int(url.rpartition(":")[2])
        await world.start_envoy()

        async def serves() -> bool:
            with suppress(aiohttp.ClientError):
                return (await world.complete())[0] == 200
            return False

        await until(serves)
        seen.clear()
        status, _ = await world.complete(headers=dict.fromkeys(CONTROL, "192.0.2.1:1"))
        assert (status, len(seen)) == (200, 1)
        assert not set(CONTROL) & {name.lower() for name in seen[0].headers}
        for path in ("/tercet/v1/status", "/%74ercet/v1/status", "/metrics"):
            async with world.session.get(URL(path, encoded=True)) as refused:
                assert refused.status == 404
        assert len(seen) == 1
