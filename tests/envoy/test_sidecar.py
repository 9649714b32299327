"""Sidecars between a real Envoy and engines: prefill elsewhere, and streams that end in an error event."""

from __future__ import annotations

import signal

import pytest

from tercet.cluster.ports import free_ports

from .gateway import HOST, TERCET, Gateway

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.verifies("sidecar", vllm=False)]
NAMES = "p", "d0", "d1"


async def start(world: Gateway) -> None:
    """One engine that prefills, and two that decode behind sidecars, whose addresses Envoy and the picker know."""
    for name, engine_port, port in zip(NAMES, free_ports(HOST, 3), free_ports(HOST, 3), strict=True):
        await world.start_engine(name, engine_port)
        if name != "p":
            url, allowed = f"http://{HOST}:{engine_port}", f"{HOST}:*"
            flags = ("--engine", url, "--port", str(port), "--prefill-hosts", allowed, "--stuck-after", "2")
            await world.start(f"sidecar-{name}", *TERCET, "sidecar", "--client-traces", *flags)
            world.engines[name] = port
    await world.start_picker("--stuck-after=2", roles={"p": "prefill", "d0": "decode", "d1": "decode"})
    await world.start_envoy()
    await world.until_ready(len(NAMES))


async def test_streams_through_sidecars(world: Gateway) -> None:
    await start(world)
    status, answer = await world.complete("word " * 400, headers={"x-tercet-trace": "true"})
    assert (status, answer["tercet"]["program"]) == (200, "disaggregated")
    for number in (signal.SIGSTOP, signal.SIGKILL):
        async with world.streamed("tell me", 2000) as stream:
            await stream.content.readline()
            victim = await world.who_runs()
            world.signal(victim, number)
            rest = await stream.text()
        assert '"code":"engine_unreachable"' in rest
        assert rest.endswith("data: [DONE]\n\n")
        # And the next requests are served by those that are left.
        assert (await world.complete("something else"))[0] == 200
        if number == signal.SIGSTOP:
            world.signal(victim, signal.SIGCONT)
            await world.until_picked_among(len(NAMES))
