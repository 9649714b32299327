"""Which engines are picked, on what the picker knows and by files of llm-d, and who waits or is sent away."""

from __future__ import annotations

import asyncio
import heapq
import json
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tercet.fleet import FleetView, Member
from tercet.protocol import BadRequest, EngineUnreachable, Request, Role, Saturated, ShuttingDown
from tercet.settings import EngineAddress
from tercet_gateway.endpoint_picker import UNTIL_COUNTED, Endpoints, address_of
from tercet_gateway.openai_call import OpenAIBody, OpenAICall, stand_ins
from tests.longest_wait import LONGEST_WAIT_S
from tests.unit.fakes import FakeEngine

from .pickers import House, fleet_for

D, E, P, Q = (f"10.0.0.{n}:8000" for n in (1, 2, 3, 4))


def call(prompt: str = "x" * 400, headers: dict[str, str] | None = None, **fields: Any) -> OpenAICall:
    return OpenAICall("/v1/completions", headers or {}, OpenAIBody(prompt=prompt, **fields), len(prompt))


async def picked(house: House, *calls: OpenAICall) -> list[Endpoints]:
    return [await house.picker.pick(each) for each in calls]


async def test_the_less_busy_one_by_its_reports() -> None:
    house = House("both", "both")
    house.report("e0", waiting=3, running=9)
    house.report("e1", running=1)
    (found,) = await picked(house, call())
    assert found == Endpoints([E, D])


async def test_a_burst_is_spread_before_any_report() -> None:
    house = House("both", "both", "both", fallbacks=0)
    found = await picked(house, *(call(f"{n}" * 400) for n in range(9)))
    assert sorted(each.decode[0] for each in found) == sorted([D, E, P] * 3)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_what_has_no_prompt_that_is_shown_is_counted_too(path: str) -> None:
    house = House("both", "both", "both", fallbacks=0)
    found = await picked(house, *(OpenAICall(path, {}) for _ in range(9)))
    assert sorted(each.decode[0] for each in found) == sorted([D, E, P] * 3)


async def test_what_reports_have_is_not_counted_twice() -> None:
    house = House("both", "both")
    (found,) = await picked(house, call())
    name = "e0" if found.decode[0] == D else "e1"
    house.now += UNTIL_COUNTED / 2
    house.report(name, running=1)  # this may be another picker's request
    assert house.fleet.member(name).in_flight == 2
    house.now += UNTIL_COUNTED
    house.report(name, running=1)
    assert house.fleet.member(name).in_flight == 1


async def test_a_prompt_comes_back_to_where_it_was() -> None:
    house = House("both", "both", "both")
    (first,) = await picked(house, call("abcd" * 300))
    house.now += 10
    for name in ("e0", "e1", "e2"):
        house.report(name)
    (again,) = await picked(house, call("abcd" * 300 + "and more"))
    assert again.decode[0] == first.decode[0]


async def test_two_pickers_see_each_other_in_reports() -> None:
    one, other = House("both", "both"), House("both", "both")
    await picked(one, *(call(f"{n}" * 400) for n in range(4)))
    busy = {name: one.fleet.member(name).in_flight for name in ("e0", "e1")}
    assert busy == {"e0": 2, "e1": 2}
    other.report("e0", running=4)
    other.report("e1", running=2)
    assert [each.decode[0] for each in await picked(other, call("y" * 400), call("z" * 400))] == [E, E]


# ---- prefill and decode --------------------------------------------------------------------------------------


async def test_a_long_prompt_is_prefilled_elsewhere() -> None:
    house = House("decode", "prefill", "decode", "prefill")
    (short, long) = await picked(house, call("x" * 200), call("y" * 4000))
    assert short.prefill == ""
    assert long.prefill in (E, Q)
    assert set(long.decode) <= {D, P}


async def test_what_is_cached_on_the_decode_engine_is_not_prefilled_elsewhere() -> None:
    house = House("decode", "prefill")
    first, again = await picked(house, call("y" * 4000), call("y" * 4000 + "more"))
    assert (first.prefill, again.prefill) == (E, "")


async def test_without_a_free_prefill_engine_decode_serves_alone() -> None:
    house = House("decode", "prefill")
    house.report("e1", waiting=100)
    (found,) = await picked(house, call("y" * 4000))
    assert found == Endpoints([D])
    house.fleet.member("e1").reachable = False
    (found,) = await picked(house, call("z" * 4000))
    assert found == Endpoints([D])


async def test_without_a_prefill_engine_the_policy_changes_nothing() -> None:
    house = House("decode", "prefill")
    house.fleet.picking.without_role = "refuse"
    house.fleet.member("e1").reachable = False
    (found,) = await picked(house, call("y" * 4000))
    assert found == Endpoints([D])


async def test_without_a_decode_engine_the_policy_decides() -> None:
    serving, refusing = House("decode", "prefill"), House("decode", "prefill", without_role="refuse")
    for house in (serving, refusing):
        house.fleet.picking.without_role = house.config.without_role
        house.fleet.member("e0").reachable = False
    with pytest.raises(EngineUnreachable, match="DecodeFilter"):
        await picked(serving, call())
    with pytest.raises(Exception, match="no engine of the role decode answers"):
        await picked(refusing, call())


def teach(house: House, name: str, seconds_per_token: float) -> None:
    """Show what prefills cost here, one after the other on one engine."""
    assert house.picker._costs is not None
    for turn in range(12):
        tokens = 1000 * (1 + turn % 4)
        house.picker._costs.picked(house.fleet.member(name), Request(seq_id=f"{turn}", prompt=(0,) * tokens), 0)
        ends = house.now + tokens * seconds_per_token
        while house.now < ends:
            house.now += 0.1
            house.report(name, tokens=tokens if house.now < ends else 0, waiting=int(house.now < ends))
        house.now += 0.1
        house.report(name)


async def test_learned_costs_split_for_busy_decode_engines_only() -> None:
    house = House("decode", "prefill", split_by="cost")
    (by_file,) = await picked(house, call("y" * 8000))
    assert by_file.prefill == E, "until enough is known, the file's decider decides"
    teach(house, "e0", 0.001)
    house.now += 100
    for name in ("e0", "e1"):
        house.report(name)
    (idle,) = await picked(house, call("z" * 8000))
    assert idle.prefill == "", "nobody waits for the decode engine"
    house.now += 100
    house.report("e1")
    house.report("e0", running=50, kv_usage=0.5, step_time=0.02)
    (busy,) = await picked(house, call("w" * 8000))
    assert busy.prefill == E
    house.now += 1
    house.report("e0", running=50, kv_usage=0.5, step_time=0.02)
    house.report("e1", waiting=4, tokens=900_000)
    (queued,) = await picked(house, call("v" * 8000))
    assert queued.prefill == "", "the prefill engine has too much to do"


async def test_of_engines_that_have_left_nothing_is_kept() -> None:
    house = House("decode", "prefill", split_by="cost")
    costs, load = house.picker._costs, house.picker._load
    assert costs is not None
    for number in range(20):
        name = f"pod-{number}"
        house.fleet.add(Member(name, f"http://10.0.1.{number + 1}:8000", "decode", FakeEngine(name), kv_tokens=number))
        house.report(name)
        house.fleet.remove(name)
    assert (len(costs._works), len(load._recent), costs.model.arrivals.engines) == (1, 1, 1)
    house.report("pod-19")  # its last word comes late
    before = [Member("again", "http://10.0.2.1:8000", "decode", FakeEngine("again"), kv_tokens=each) for each in (1, 2)]
    for member in before:
        house.fleet.add(member)
        house.report("again")
        assert costs._works["again"][0] is member, "another engine of the same name"
        house.fleet.remove("again")


def test_costs_are_learned_from_reports_only() -> None:
    with pytest.raises(BadRequest, match="split-by"):
        House("decode", "prefill", split_by="cost", load_from="metrics")


SATURATION = "{type: utilization-detector, parameters: {queueDepthThreshold: 2}}"


async def test_a_file_of_llm_d_with_one_profile_never_splits_and_says_when_there_is_room(tmp_path: Path) -> None:
    file = tmp_path / "epp.yaml"
    file.write_text(
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
        f"plugins: [{{type: queue-scorer}}, {{type: single-profile-handler}}, {SATURATION}]\n"
        "schedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer}]}]\n"
    )
    house = House("both", "both", scheduling=str(file), max_queued=0)
    (found,) = await picked(house, call("x" * 4000))
    assert found.prefill == ""
    for name in ("e0", "e1"):
        house.report(name, waiting=2)
    with pytest.raises(Saturated):
        await picked(house, call())


# ---- who may be picked ---------------------------------------------------------------------------------------


async def test_candidates() -> None:
    house = House("both", "both", "both")
    assert (await house.picker.pick(call(), [E])).decode == [E]
    for stranger in ("192.0.2.1:1", "192.0.2.1", E.replace(":8000", ":8001"), ":8000", ""):
        with pytest.raises(EngineUnreachable):
            await house.picker.pick(call(), [stranger])
    # An address without a port is every port of it.
    assert (await house.picker.pick(call(), [E.partition(":")[0]])).decode == [E]
    house.fleet.member("e1").reachable = False
    with pytest.raises(EngineUnreachable):
        await house.picker.pick(call(), [E])


async def test_drained_and_lost_engines_are_not_picked() -> None:
    house = House("both", "both", "both")
    house.fleet.drain("e0")
    house.fleet.member("e1").reachable = False
    found = await picked(house, *(call(f"{n}" * 400) for n in range(4)))
    assert all(each.decode == [P] for each in found)
    house.fleet.drain("e2")
    with pytest.raises(EngineUnreachable):
        await picked(house, call())


async def test_a_request_that_generates_nothing_goes_anywhere_and_counts_nowhere() -> None:
    house = House("both", "both", max_queued=0)
    for name in ("e0", "e1"):
        house.report(name, waiting=100)
    found = await house.picker.pick(OpenAICall("/v1/models", {}))
    assert set(found.decode) == {D, E}
    assert house.fleet.member("e0").in_flight == 100


# ---- flow control --------------------------------------------------------------------------------------------


def saturate(house: House, waiting: int = 5) -> None:
    for member in house.fleet.members:
        house.report(member.name, waiting=waiting)


async def test_a_saturated_pool_keeps_requests_waiting_until_there_is_room() -> None:
    house = House("both", "both")
    saturate(house)
    asked = asyncio.create_task(house.picker.pick(call()))
    await asyncio.sleep(0.02)
    assert not asked.done()
    house.report("e1", waiting=4)
    assert (await asyncio.wait_for(asked, LONGEST_WAIT_S)).decode[0] == E


async def test_a_request_that_may_be_dropped_is_not_kept_waiting() -> None:
    house = House("both", objectives={"batch": "-1"})
    saturate(house)
    batch = {"x-llm-d-inference-objective": "batch"}
    with pytest.raises(Saturated) as refused:
        await house.picker.pick(call(headers=batch))
    assert not refused.value.waited
    house.report("e0", waiting=4)
    assert (await house.picker.pick(call(headers=batch))).decode == [D]


async def test_full_kv_caches_saturate_too() -> None:
    house = House("both", "both", max_queued=0)
    house.report("e0", kv_usage=0.9)
    house.report("e1", waiting=9)
    with pytest.raises(Saturated):
        await picked(house, call())


async def test_a_wait_has_an_end() -> None:
    house = House("both", queue_timeout_s=0.05)
    saturate(house)
    asked = asyncio.create_task(house.picker.pick(call()))
    await asyncio.sleep(0.01)
    house.now += 1
    house.report("e0", waiting=5)
    with pytest.raises(Saturated) as refused:
        await asyncio.wait_for(asked, LONGEST_WAIT_S)
    assert refused.value.waited


async def test_important_requests_come_in_first_and_flows_take_turns() -> None:
    house = House("both", objectives={"high": "10"}, max_waiting_per_engine=100)
    saturate(house, 100)
    order: list[str] = []

    async def ask(name: str, **headers: str) -> None:
        told = {f"x-llm-d-inference-{key}": value for key, value in headers.items()}
        await house.picker.pick(call(headers={key.replace("_", "-"): value for key, value in told.items()}))
        order.append(name)

    tasks = [asyncio.create_task(ask(f"a{n}", fairness_id="a")) for n in range(3)]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(ask("b0", fairness_id="b")), asyncio.create_task(ask("h", objective="high"))]
    await asyncio.sleep(0.01)
    for _ in range(5):
        await house.next_comes_in(order, waiting=99)
    await asyncio.gather(*tasks)
    assert order == ["h", "a0", "b0", "a1", "a2"]


async def test_what_waits_at_its_end_is_refused() -> None:
    house = House("both")
    saturate(house)
    asked = asyncio.create_task(house.picker.pick(call()))
    await asyncio.sleep(0.01)
    house.picker.close(ShuttingDown("over"))
    with pytest.raises(ShuttingDown):
        await asyncio.wait_for(asked, LONGEST_WAIT_S)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://10.0.0.1", "10.0.0.1:80"),
        ("https://[fd00::1]/", "[fd00::1]:443"),
    ],
)
def test_addresses(url: str, address: str) -> None:
    assert address_of(url) == address


# Several pickers, and a picker beside a router, over the same engines: they pick alike, as well as one would.

ENGINES, RATE, REPORTS, SERVICE = 8, 40.0, 0.1, 1.0


async def regret(pickers: int, told: bool, seed: int) -> float:
    """By how many requests more the picked engine has than the least busy one, on average over a busy minute.

    Requests take turns among ``pickers``. Engines report to all of them, or to nobody.
    """
    random = Random(seed)
    houses = [House(*(("both",) * ENGINES), fallbacks=0, max_waiting_per_engine=10_000) for _ in range(pickers)]
    running = [0] * ENGINES
    ends: list[tuple[float, int]] = []
    now, reported, missed = 100.0, 0.0, 0
    many = 1200
    for number in range(many):
        now += random.expovariate(RATE)
        while ends and ends[0][0] <= now:
            running[heapq.heappop(ends)[1]] -= 1
        for house in houses:
            house.now = now
            if told and now - reported >= REPORTS:
                for engine in range(ENGINES):
                    house.report(f"e{engine}", running=running[engine])
        if now - reported >= REPORTS:
            reported = now
        prompt = f"{number}".ljust(400, "x")
        found = await houses[number % pickers].picker.pick(
            OpenAICall("/v1/completions", {}, OpenAIBody(prompt=prompt), 400)
        )
        engine = int(found.decode[0].split(":")[0].rsplit(".", 1)[1]) - 1
        missed += running[engine] - min(running)
        running[engine] += 1
        heapq.heappush(ends, (now + random.expovariate(1 / SERVICE), engine))
    return missed / many


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_two_pickers_make_as_good_picks_as_one(seed: int) -> None:
    one, two, blind = [await regret(*case, seed) for case in ((1, True), (2, True), (2, False))]
    assert two <= 1.5 * one + 0.5, f"one {one:.2f}, two {two:.2f}"
    assert blind > two + 0.5, f"without reports {blind:.2f}, with them {two:.2f}: this shows nothing"


async def test_a_router_and_a_picker_with_the_same_file_pick_the_same_engines() -> None:
    house = House("both", "both", "both", "decode")
    router = fleet_for(house.config, lambda: house.now)
    random = Random(5)
    with ExitStack() as held:
        picked: list[tuple[str, str]] = []
        for number in range(40):
            house.now += 0.005
            if number % 10 == 0:
                for name in ("e0", "e1", "e2", "e3"):
                    load = {"running": random.randrange(6), "kv_usage": random.random() / 2}
                    house.report(name, **load)
                    router.report(name, house.fleet.knowledge.loads.last(name)[0])  # type: ignore[index]
                    router.member(name).in_flight = house.fleet.member(name).in_flight
            prompt = f"{number % 7}".ljust(2000, "p")
            endpoints = await house.picker.pick(OpenAICall("/v1/completions", {}, OpenAIBody(prompt=prompt), 2000))
            request = Request(seq_id=f"r{number}", prompt=stand_ins(prompt.encode()))
            engine = held.enter_context(FleetView(router).pick("decode", by="scheduled", request=request))
            picked.append((endpoints.decode[0], engine.name))
    names = {f"10.0.0.{n + 1}:8000": f"e{n}" for n in range(4)}
    assert [names[address] for address, _ in picked] == [name for _, name in picked]
    assert len({name for _, name in picked}) > 2


def call_with_headers(prompt: str = "x" * 400, **headers: str) -> OpenAICall:
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
    await house.picker.pick(call_with_headers())
    with pytest.raises(Saturated):
        await house.picker.pick(call_with_headers())
    house.now += 2 * UNTIL_COUNTED  # the reports have it by then, or it is over
    house.report("e1", running=3)
    await house.picker.pick(call_with_headers())


async def test_who_waits_comes_in_when_another_is_over(tmp_path: Path) -> None:
    house = House("both", scheduling=limited(tmp_path, maxConcurrency=3))
    house.report("e0", running=3)
    asked = asyncio.create_task(house.picker.pick(call_with_headers()))
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
            await house.picker.pick(call_with_headers())
    else:
        await house.picker.pick(call_with_headers())


async def test_without_engines_the_pick_says_so(tmp_path: Path) -> None:
    house = House("both", scheduling=limited(tmp_path, maxConcurrency=1), queue_timeout_s=5)
    house.fleet.member("e0").reachable = False
    with pytest.raises(Exception, match="answers"):
        await asyncio.wait_for(house.picker.pick(call_with_headers()), LONGEST_WAIT_S)


async def test_agents_sessions_take_turns(tmp_path: Path) -> None:
    """By their own headers, where the request has no fairness id: that counts first."""
    file = file_of(tmp_path, "agent-identity", "queue-scorer", profiles={"default": ["queue-scorer"]})
    house = House("both", scheduling=file)
    house.report("e0", waiting=5)
    order: list[str] = []

    async def ask(name: str, **headers: str) -> None:
        await house.picker.pick(call_with_headers(**headers))
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
    found = [await house.picker.pick(call_with_headers(f"{n}" * 400)) for n in range(8)]
    assert {each.decode[0] for each in found} == set(near)
    assert all(each.prefill == near[each.decode[0]] for each in found)
