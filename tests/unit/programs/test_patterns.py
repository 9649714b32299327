"""The programs that leave engines out, and the one that chooses: which verbs they call, over fake engines."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from tercet.fleet import EngineFleet, FleetView, Trace
from tercet.programs import BUILT_IN, load_program, migrate_context
from tercet.protocol import BadRequest, EngineLoad, NoSpace, TransferFailed, UnknownEngine
from tests.unit.fakes import FakeEngine

from .conftest import Pair, fleet_of, request_of, run

LONG = request_of(400)


# ---- cache_bypass --------------------------------------------------------------------------------------------


async def test_a_short_prompt_stays_on_the_decode_engine(pair: Pair) -> None:
    prefill, decode, fleet = pair
    await run("cache_bypass", fleet, request_of(128))
    assert (prefill.verbs, decode.verbs) == ([], ["start_generate"])


@pytest.mark.parametrize(
    ("matched", "share", "bypassed"), [(192, "0.5", False), (208, "0.5", True), (192, "0.4", True)]
)
async def test_a_cached_prompt_leaves_the_prefill_engine_out(
    pair: Pair, matched: int, share: str, bypassed: bool
) -> None:
    prefill, decode, fleet = pair
    decode.matched = matched
    await run("cache_bypass", fleet, LONG, cached_share=share)
    assert prefill.verbs == ([] if bypassed else ["remote_send"])
    assert decode.verbs == ["prep_recv", "start_generate"]


# ---- conditional ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "args", "two"),
    [(400, {}, True), (255, {}, False), (400, {"min_prompt": "500"}, False), (400, {"min_missing": "401"}, False)],
)
async def test_length_decides_between_one_engine_and_two(
    pair: Pair, length: int, args: dict[str, str], two: bool
) -> None:
    prefill, decode, fleet = pair
    await run("conditional", fleet, request_of(length), **args)
    assert prefill.verbs == (["remote_send"] if two else [])
    assert decode.verbs == (["prep_recv", "start_generate"] if two else ["start_generate"])


async def test_what_is_believed_to_be_cached_decides(pair: Pair) -> None:
    prefill, _, fleet = pair
    request = LONG
    fleet.knowledge.store("d", 16, list(range(20)), None, request.prompt[:320])
    await run("conditional", fleet, request)
    assert prefill.verbs == []


async def test_queues_at_all_prefill_engines_decide(pair: Pair) -> None:
    prefill, _, fleet = pair
    fleet.report("p", EngineLoad(waiting=6, running=0, kv_usage=0.0))
    await run("conditional", fleet, LONG)
    assert prefill.verbs == []
    await run("conditional", fleet, LONG, max_waiting="6")
    assert prefill.verbs == ["remote_send"]


async def test_an_unknown_decider_is_refused(pair: Pair) -> None:
    with pytest.raises(BadRequest, match="no decider 'x'"):
        await run("conditional", pair[2], LONG, decider="x")


# ---- balanced by a function ----------------------------------------------------------------------------------


async def test_a_function_says_where_the_decode_engine_starts(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def third(request):\n    return request.num_tokens // 3\n")
    prefill, decode, fleet = pair
    await run("balanced", fleet, request_of(300), decode_start=f"{tmp_path / 'mine.py'}:third")
    assert prefill.calls == [("remote_send", 0, 100, False)]
    assert decode.calls == [("prep_recv", 100), ("start_generate", 100, ())]


def test_a_function_that_there_is_not_is_refused() -> None:
    with pytest.raises(BadRequest, match="no file"):
        load_program("balanced", {"decode_start": "nowhere.py:third"})


# ---- data_parallel -------------------------------------------------------------------------------------------


async def test_data_parallel_within_a_role(pair: Pair) -> None:
    prefill, decode, fleet = pair
    for _ in range(3):
        await run("data_parallel", fleet, LONG, role="decode")
    assert (prefill.verbs, decode.verbs) == ([], ["start_generate"] * 3)


# ---- auto: what it takes it gives back -----------------------------------------------------------------------


async def test_auto_notes_its_decision(pair: Pair) -> None:
    fleet, trace = pair[2], Trace()
    await run("auto", fleet, LONG, trace)
    decision = trace.decision
    assert decision is not None
    assert decision.chosen not in decision.others
    assert decision.chosen.cost > 0
    assert decision.chosen.ttft > 0


@pytest.mark.parametrize(("name", "value"), [("ttft", "0"), ("tpot", "-1"), ("ttft", "nan"), ("explore", "2")])
async def test_auto_refuses_objectives_that_make_no_sense(pair: Pair, name: str, value: str) -> None:
    with pytest.raises(BadRequest) as raised:
        await run("auto", pair[2], LONG, **{name: value})
    assert raised.value.param == name
    assert_nothing_taken(*pair)


async def test_auto_over_one_engine_takes_it() -> None:
    engine = FakeEngine("only")
    await run("auto", fleet_of((engine, "prefill")), LONG)
    assert engine.verbs == ["start_generate"]


@pytest.mark.parametrize("split", [400, 200])
@pytest.mark.parametrize("steps", range(14))
async def test_a_pair_that_is_cancelled_at_any_await_gives_everything_back(
    pair: Pair, split: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode, fleet = pair
    force(monkeypatch, split)

    async def serve() -> None:
        async with aclosing(BUILT_IN["auto"](LONG, FleetView(fleet))) as outputs:  # type: ignore[type-var]
            async for _ in outputs:
                await asyncio.sleep(0)

    task = asyncio.create_task(serve())
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert_nothing_taken(prefill, decode, fleet)


@pytest.mark.parametrize("split", [400, 200])
async def test_a_pair_calls_the_three_verbs(pair: Pair, split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode, fleet = pair
    force(monkeypatch, split)
    assert await run("auto", fleet, LONG) == [400, 401, 402]
    assert prefill.calls == [("remote_send", 0, None, split == 400)]
    first = (400,) if split == 400 else ()
    assert decode.calls == [("prep_recv", split), ("start_generate", split, first)]
    assert_nothing_taken(prefill, decode, fleet)


@pytest.mark.parametrize(("engine", "verb"), [("d", "prep_recv"), ("p", "remote_send"), ("d", "start_generate")])
async def test_a_failing_verb_gives_everything_back(
    pair: Pair, engine: str, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode, fleet = pair
    force(monkeypatch, 400)
    (prefill if engine == "p" else decode).failures[verb] = TransferFailed("lost")
    with pytest.raises(TransferFailed):
        await run("auto", fleet, LONG)
    assert_nothing_taken(prefill, decode, fleet)


def force(monkeypatch: pytest.MonkeyPatch, split: int) -> None:
    """Let only the pair p, d with this split be a route."""
    from tercet.decisions.cost import RouteOption, costs

    only = RouteOption("d", 1.0, 1.0, 1.0, "p", split)
    monkeypatch.setattr(costs, "options_of", lambda *_: [only])


def assert_nothing_taken(prefill: FakeEngine, decode: FakeEngine, fleet: EngineFleet) -> None:
    assert not decode.leases
    assert (prefill.running, decode.running) == (0, 0)
    for member in fleet.members:
        assert (member.in_flight, member.in_flight_tokens) == (0, 0)
        work = fleet.costs.work(member.name)
        assert work.idle
        assert (work.decoding, work.coming, work.contexts) == (0, 0, 0)
        assert work.backlog == pytest.approx(0.0, abs=1e-9)


# ---- context migration ---------------------------------------------------------------------------------------


async def test_a_context_moves_by_two_verbs(pair: Pair) -> None:
    source, destination, fleet = pair
    destination.matched = 48
    sent = await migrate_context(FleetView(fleet), request_of(100), "p", "d")
    assert sent is not None
    assert (sent.begin, sent.end) == (48, 100)
    assert (source.calls, destination.calls) == ([("remote_send", 48, None, False)], [("prep_recv", None)])
    assert_nothing_taken(source, destination, fleet)


async def test_a_context_that_is_there_does_not_move(pair: Pair) -> None:
    source, destination, fleet = pair
    destination.matched = 96
    assert await migrate_context(FleetView(fleet), request_of(96), "p", "d") is None
    assert source.calls == []


async def test_who_cannot_take_part_is_said(pair: Pair) -> None:
    _, destination, fleet = pair
    with pytest.raises(UnknownEngine):
        await migrate_context(FleetView(fleet), LONG, "p", "x")
    with pytest.raises(BadRequest, match="destination"):
        await migrate_context(FleetView(fleet), LONG, "p", "p")
    destination.failures["prep_recv"] = NoSpace("full")
    with pytest.raises(NoSpace):
        await migrate_context(FleetView(fleet), LONG, "p", "d")
    assert [member.in_flight for member in fleet.members] == [0, 0]
