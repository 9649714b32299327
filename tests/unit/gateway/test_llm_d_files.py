"""A picker with files of llm-d: what they say of room and of turns, and who prefills near whom."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tercet.protocol import Role, Saturated
from tercet.settings import EngineAddress
from tercet_gateway.endpoint_picker import UNTIL_COUNTED, Endpoints
from tercet_gateway.openai_call import OpenAIBody, OpenAICall
from tests.longest_wait import LONGEST_WAIT_S

from .pickers import House


def call(prompt: str = "x" * 400, **headers: str) -> OpenAICall:
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    return OpenAICall("/v1/completions", told, OpenAIBody(prompt=prompt), len(prompt))


def file_of(directory: Path, *plugins: Any, profiles: Any, **sections: Any) -> str:
    entries = [{"type": plugin} if isinstance(plugin, str) else plugin for plugin in plugins]
    used = [{"name": name, "plugins": [{"pluginRef": ref} for ref in refs]} for name, refs in profiles.items()]
    content = {"apiVersion": "llm-d.ai/v1", "plugins": entries, "schedulingProfiles": used, **sections}
    file = directory / "epp.yaml"
    file.write_text(json.dumps(content))
    return str(file)


def limited(directory: Path, **parameters: Any) -> str:
    """As llm-d's guide of flow control."""
    detector = {"type": "concurrency-detector", "parameters": parameters}
    bands = [{"priority": 0, "fairnessPolicyRef": "round-robin-fairness-policy"}]
    flow = {"saturationDetector": {"pluginRef": "concurrency-detector"}, "priorityBands": bands}
    plugins = "active-request-scorer", "round-robin-fairness-policy", detector
    return file_of(directory, *plugins, profiles={"default": ["active-request-scorer"]}, flowControl=flow)


async def test_room_is_what_all_engines_may_run_together(tmp_path: Path) -> None:
    """Ten each: with 15 and 4 there is room for one, wherever; neither queues nor caches count."""
    house = House("both", "both", scheduling=limited(tmp_path, maxConcurrency=10), max_queued=0)
    house.report("e0", running=6, waiting=9, kv_usage=0.99)
    house.report("e1", running=4)
    await house.picker.pick(call())
    with pytest.raises(Saturated):
        await house.picker.pick(call())
    house.now += 2 * UNTIL_COUNTED  # the reports have it by then, or it is over
    house.report("e1", running=3)
    await house.picker.pick(call())


async def test_who_waits_comes_in_when_another_is_over(tmp_path: Path) -> None:
    house = House("both", scheduling=limited(tmp_path, maxConcurrency=3))
    house.report("e0", running=3)
    asked = asyncio.create_task(house.picker.pick(call()))
    await asyncio.sleep(0.02)
    assert not asked.done()
    house.report("e0", running=2)
    assert isinstance(await asyncio.wait_for(asked, LONGEST_WAIT_S), Endpoints)


@pytest.mark.parametrize(
    ("mode", "loads", "full"),
    [
        ("tokens", [(50, 1500), (1, 499)], False),
        ("tokens", [(0, 1500), (0, 500)], True),
        ("hybrid", [(10, 0), (0, 999)], False),  # 1.0 and 0.999
        ("hybrid", [(10, 0), (0, 1000)], True),
        ("hybrid", [(15, 0), (4, 500)], True),  # 1.5 and 0.5
        ("requests", [(19, 9999), (0, 0)], False),
        ("requests", [(20, 0), (0, 0)], True),
    ],
)
async def test_what_counts(tmp_path: Path, mode: str, loads: list[tuple[int, int]], full: bool) -> None:
    told = {"concurrencyMode": mode, "maxConcurrency": 10, "maxTokenConcurrency": 1000}
    house = House("both", "both", scheduling=limited(tmp_path, **told), max_queued=0)
    for name, (running, tokens) in zip(("e0", "e1"), loads, strict=True):
        house.report(name, running=running, tokens=tokens)
    if full:
        with pytest.raises(Saturated):
            await house.picker.pick(call())
    else:
        await house.picker.pick(call())


async def test_without_engines_the_pick_says_so(tmp_path: Path) -> None:
    house = House("both", scheduling=limited(tmp_path, maxConcurrency=1), queue_timeout_s=5)
    house.fleet.member("e0").reachable = False
    with pytest.raises(Exception, match="answers"):
        await asyncio.wait_for(house.picker.pick(call()), LONGEST_WAIT_S)


async def test_agents_sessions_take_turns(tmp_path: Path) -> None:
    """By their own headers, where the request has no fairness id: that counts first."""
    file = file_of(tmp_path, "agent-identity", "queue-scorer", profiles={"default": ["queue-scorer"]})
    house = House("both", scheduling=file)
    house.report("e0", waiting=5)
    order: list[str] = []

    async def ask(name: str, **headers: str) -> None:
        await house.picker.pick(call(**headers))
        order.append(name)

    tasks = [asyncio.create_task(ask(f"a{n}", x_claude_code_session_id="a")) for n in range(2)]
    await asyncio.sleep(0)
    told = {"session_id": "b"}, {"x_llm_d_inference_fairness_id": "c", "session_id": "b"}
    tasks += [asyncio.create_task(ask("bc"[n], **headers)) for n, headers in enumerate(told)]
    await asyncio.sleep(0.01)
    for _ in range(4):
        await house.next_comes_in(order, waiting=4)
    await asyncio.gather(*tasks)
    assert order == ["a0", "b", "c", "a1"]


async def test_who_prefills_is_on_the_host_of_who_decodes(tmp_path: Path) -> None:
    handler = {"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": "always-disagg-pd-decider"}}}
    scheduling = file_of(
        tmp_path,
        "topology-extractor",
        "topology-affinity-filter",
        "prefill-filter",
        "decode-filter",
        "always-disagg-pd-decider",
        "active-request-scorer",
        handler,
        profiles={
            "prefill": ["prefill-filter", "topology-affinity-filter", "active-request-scorer"],
            "decode": ["decode-filter", "active-request-scorer"],
        },
    )
    places: list[tuple[Role, str]] = [("decode", "h"), ("decode", "i"), ("prefill", "h"), ("prefill", "i")]
    engines = tuple(
        EngineAddress(f"e{n}", f"http://10.0.0.{n + 1}:8000", role, {"kubernetes.io/hostname": host})
        for n, (role, host) in enumerate(places)
    )
    house = House(engines=engines, scheduling=scheduling)
    near = {"10.0.0.1:8000": "10.0.0.3:8000", "10.0.0.2:8000": "10.0.0.4:8000"}
    house.report("e2", running=50)
    house.report("e3", running=0)
    found = [await house.picker.pick(call(f"{n}" * 400)) for n in range(8)]
    assert {each.decode[0] for each in found} == set(near)
    assert all(each.prefill == near[each.decode[0]] for each in found)
