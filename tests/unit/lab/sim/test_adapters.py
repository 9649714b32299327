"""Adapters of simulated engines: places in a batch, their cost, whose KV it is, and the scorer that saves them."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tercet.protocol import BadRequest, Request, UnknownAdapter
from tercet_lab.sim.adapter_slots import AdapterSlots
from tests.virtual_time import in_virtual_time

from .models import BLOCK, collect, engines_of, is_empty, request_of, tokens_of


def asking(adapter: str | None, seq_id: str = "s", **more: Any) -> Request:
    return msgspec.structs.replace(request_of(seq_id, **more), adapter=adapter)


def test_a_batch_uses_so_many_adapters_and_the_oldest_unused_one_gives_way() -> None:
    slots = AdapterSlots(2, 0.5)
    slots.join(1, "a")
    slots.join(2, "b")
    assert (slots.owed(), slots.owed()) == (1.0, 0.0)
    assert not slots.admits("c")
    assert slots.admits("a")
    assert slots.admits(None)
    slots.join(3, "b")
    slots.leave(1)
    slots.leave(1)
    assert slots.admits("c")
    slots.join(4, "c")
    assert slots.owed() == 0.5
    for user in (2, 3, 4):
        slots.leave(user)
    slots.join(5, "b")
    assert slots.owed() == 0.0, "it has kept its place"
    slots.join(6, "a")
    assert slots.owed() == 0.5, "it has not"
    found = slots.load(["x", None, "x"])
    assert found is not None
    assert (found.running, found.waiting, found.max) == (("a", "b"), ("x",), 2)


@in_virtual_time
async def test_who_needs_a_place_waits_and_others_overtake() -> None:
    (engine,) = engines_of("e", adapters="a,b", max_loras=1, lora_load=1.0)
    loop = asyncio.get_running_loop()
    ends: dict[str, float] = {}

    async def one(adapter: str | None, seq_id: str) -> None:
        await collect(engine.start_generate(asking(adapter, seq_id, length=20, max_tokens=3)))
        ends[seq_id] = loop.time()

    await asyncio.gather(one("a", "first"), one("b", "waits"), one(None, "base"), one("a", "same"))
    assert ends["waits"] > max(ends[each] for each in ("first", "same", "base")) + 1.0
    assert (await engine.status()).counters["adapter_loads"] == 2
    assert is_empty(engine)


@in_virtual_time
async def test_kv_and_tokens_are_of_one_adapter() -> None:
    sender, receiver = engines_of("p", "d", adapters="a,b", max_loras=2)
    said = [tuple(await tokens_of(sender, asking(adapter))) for adapter in ("a", "b", None)]
    assert len({*said}) == 3
    async with receiver.prep_recv(asking("a", length=2 * BLOCK)) as space:
        for wrong in ("b", None):
            with pytest.raises(BadRequest, match="adapter"):
                await sender.remote_send(asking(wrong, length=2 * BLOCK), space, 0)
        await sender.remote_send(asking("a", length=2 * BLOCK), space, 0)
        with pytest.raises(BadRequest, match="adapter"):
            await collect(receiver.start_generate(asking("b", length=2 * BLOCK)))
    for adapter, expected in (("a", 2 * BLOCK), ("b", 0), (None, 0)):
        async with receiver.prep_recv(asking(adapter, f"s{adapter}", length=2 * BLOCK)) as space:
            assert space.matched_len == expected
    with pytest.raises(UnknownAdapter, match="it has a, b"):
        await collect(receiver.start_generate(asking("c")))
    with pytest.raises(UnknownAdapter, match="the request requires"):
        await collect(receiver.start_generate(msgspec.structs.replace(asking("a"), adapter_digest="others")))
    assert is_empty(sender)
    assert is_empty(receiver)


@pytest.mark.slow
def test_affinity_saves_loads_and_waiting() -> None:
    """examples/lora_affinity.py, made small."""
    example = runpy.run_path(str(Path(__file__).resolve().parents[4] / "examples" / "lora_affinity.py"))
    setting = example["Setting"](engines=4, adapters=16, max_loras=2, lora_load=0.2, rate=4.0, requests=300)
    found = example["compare"](setting, seeds=1)
    without, with_scorer = found["without"], found["with lora-affinity"]
    assert with_scorer.loads < 0.8 * without.loads
    assert with_scorer.ttft < 0.8 * without.ttft
