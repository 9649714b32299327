"""Several pickers, and a picker beside a router, over the same engines: they pick alike, as well as one would."""

from __future__ import annotations

import heapq
from contextlib import ExitStack
from random import Random

import pytest

from tercet.fleet import FleetView
from tercet.protocol import Request
from tercet_gateway.openai_call import OpenAIBody, OpenAICall, stand_ins

from .pickers import House, fleet_for

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
