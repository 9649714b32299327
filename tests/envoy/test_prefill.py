"""Behind a real Envoy: the picker names an engine that prefills, and the decode engine has it do so."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tercet.cluster.ports import free_ports

from .gateway import HOST, Gateway

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.verifies("endpoint picker behind Envoy", vllm=False),
]
ROLES = {"p": "prefill", "d0": "decode", "d1": "decode"}
TRACED = {"x-tercet-trace": "true"}
# Longer than what is worth a second engine, by the picker's count (four characters) and by the engine's (words).
LONG = "word " * 400


async def start(world: Gateway, prefill_hosts: str, duplex: bool = False) -> str:
    """A fleet whose decode engines may ask those of ``prefill_hosts``; the address of the one that prefills."""
    ports = dict(zip(ROLES, free_ports(HOST, len(ROLES)), strict=True))
    for name, port in ports.items():
        await world.start_engine(name, port, flags=("--prefill-hosts", prefill_hosts))
    await world.start_picker(roles=ROLES)
    await world.start_envoy(duplex=duplex)
    await world.until_ready(len(ROLES))
    return f"{HOST}:{ports['p']}"


async def trace_of(world: Gateway, number: int, **more: Any) -> dict[str, Any]:
    status, answer = await world.complete(f"number{number} {LONG}", headers=TRACED | more.pop("headers", {}), **more)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 4), answer
    return answer["tercet"]


@pytest.mark.parametrize("duplex", [False, True], ids=["buffered", "full-duplex"])
async def test_the_picked_engine_prefills(world: Gateway, duplex: bool) -> None:
    prefill = await start(world, f"{HOST}:*", duplex)
    trace = await trace_of(world, 1)
    sent = next(event for event in trace["events"] if event["verb"] == "remote_send")
    assert (trace["program"], sent["engine"]) == ("disaggregated", prefill)
    # A client does not choose who prefills, and a short prompt is prefilled where it is decoded.
    forged = await trace_of(world, 2, headers={"x-prefiller-host-port": "192.0.2.1:1"})
    assert {event["engine"] for event in forged["events"]} >= {prefill}
    assert (await world.complete("short", headers=TRACED))[1]["tercet"]["events"] == []
    world.signal("p", signal.SIGSTOP)
    assert (await trace_of(world, 3))["program"] == "disaggregated -> data_parallel"
    world.signal("p", signal.SIGKILL)
    assert (await trace_of(world, 4))["program"] in (
        "disaggregated -> data_parallel",
        "",
    )  # or it was not named any more


async def test_engines_that_are_not_allowed_are_not_asked(world: Gateway) -> None:
    await start(world, "192.0.2.1:*")
    status, answer = await world.complete(LONG)
    assert (status, answer["error"]["param"]) == (400, "x-prefiller-host-port")
