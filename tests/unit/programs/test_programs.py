"""Programs over fake engines and simulated ones: which verbs they call, which engines they leave out, how several race
for one request, and that they give back what they took wherever they stop.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tercet.fleet import EngineFleet, FleetView, Member, Trace
from tercet.programs import BUILT_IN, load_program, migrate_context, outputs_of
from tercet.protocol import BadRequest, EngineLoad, EngineUnreachable, NoSpace, Output, TransferFailed, UnknownEngine
from tercet_lab.bench.simulated.scenario import SyntheticWorkload, parse_fleet, requests_of
from tercet_lab.bench.simulated.virtual_run import PaidTime, run_requests
from tercet_lab.sim import EngineOptions, Network, SimEngine, load_profile
from tests.unit.fakes import FakeEngine
from tests.virtual_time import in_virtual_time

from .cancelling import cancelled_after
from .conftest import Pair, fleet_of, request_of, run


@pytest.mark.parametrize(
    ("name", "args", "matched", "sent", "split", "first"),
    [
        ("disaggregated", {}, 0, [("remote_send", 0, None, True)], None, (100,)),
        ("disaggregated", {}, 48, [("remote_send", 48, None, True)], None, (100,)),
        ("disaggregated", {}, 96, [], None, ()),  # nearly all is there
        ("balanced", {"balance_ratio": "0.25"}, 0, [("remote_send", 0, 75, False)], 75, ()),
        ("balanced", {}, 32, [("remote_send", 32, 90, False)], 90, ()),
        ("balanced", {}, 64, [], 90, ()),
    ],
)
async def test_only_what_is_missing_before_the_split_is_sent(
    pair: Pair, name: str, args: dict[str, str], matched: int, sent: list[Any], split: int | None, first: tuple[int]
) -> None:
    prefill, decode, fleet = pair
    decode.matched = matched
    assert await run(name, fleet, request_of(), **args) == [100, 101, 102]
    assert prefill.calls == sent
    begin = (split or 100) if sent else matched
    assert decode.calls == [("prep_recv", split), ("start_generate", begin, first)]


@pytest.mark.parametrize("name", ["disaggregated", "balanced", "cache_bypass"])
async def test_what_a_tier_of_the_engine_has_is_not_sent(pair: Pair, name: str) -> None:
    prefill, decode, fleet = pair
    decode.matched, decode.tier_len = 16, 96
    assert await run(name, fleet, request_of(200 if name == "cache_bypass" else 100))
    begun = decode.calls[-1]
    assert prefill.calls == ([("remote_send", 16, None, True)] if name == "cache_bypass" else [])
    assert begun[0] == "start_generate"


async def test_disaggregated_ends_with_the_first_token(pair: Pair) -> None:
    _, decode, fleet = pair
    assert await run("disaggregated", fleet, request_of(max_tokens=1)) == [100]
    assert decode.verbs == ["prep_recv"]


@pytest.mark.parametrize("ratio", ["1", "-0.1", "nan"])
async def test_balanced_refuses_what_is_no_share(pair: Pair, ratio: str) -> None:
    with pytest.raises(BadRequest, match="balance_ratio") as raised:
        await run("balanced", pair[2], balance_ratio=ratio)
    assert raised.value.param == "balance_ratio"


async def test_data_parallel_takes_turns() -> None:
    engines = [FakeEngine(name) for name in "abc"]
    fleet = fleet_of(*((engine, "both") for engine in engines))
    for _ in range(6):
        await run("data_parallel", fleet)
    assert [engine.verbs for engine in engines] == [["start_generate"] * 2] * 3


async def test_least_loaded_avoids_the_busy_engine() -> None:
    busy, idle = FakeEngine("busy"), FakeEngine("idle")
    fleet = fleet_of((busy, "both"), (idle, "both"))
    fleet.members[0].in_flight = 1
    await run("data_parallel", fleet, pick="least_loaded")
    assert (busy.verbs, idle.verbs) == ([], ["start_generate"])


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_program_is_at_most_25_lines(name: str) -> None:
    assert len(inspect.getsource(BUILT_IN[name]).splitlines()) <= 25


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@pytest.mark.parametrize("steps", range(12))
async def test_cancelled_at_every_await_nothing_stays_taken(pair: Pair, name: str, steps: int) -> None:
    prefill, decode, fleet = pair

    await cancelled_after(steps, lambda: outputs_of(load_program(name)(request_of(), FleetView(fleet))))
    assert not decode.leases
    assert (prefill.running, decode.running) == (0, 0)
    assert [member.in_flight for member in fleet.members] == [0, 0]


@pytest.mark.parametrize(("engine", "verb"), [("d", "prep_recv"), ("p", "remote_send"), ("d", "start_generate")])
@pytest.mark.parametrize("error", [NoSpace("full"), TransferFailed("lost"), EngineUnreachable("gone")])
async def test_a_failing_verb_leaves_nothing_taken(pair: Pair, engine: str, verb: str, error: Exception) -> None:
    prefill, decode, fleet = pair
    (prefill if engine == "p" else decode).failures[verb] = error  # type: ignore[assignment]
    with pytest.raises(type(error)):
        await run("disaggregated", fleet)
    assert not decode.leases
    assert [member.in_flight for member in fleet.members] == [0, 0]


# ---- fleet ---------------------------------------------------------------------------------------------------


async def test_an_engine_that_does_not_answer_is_left_out_while_others_do() -> None:
    gone, there = FakeEngine("gone"), FakeEngine("there")
    fleet = fleet_of((gone, "both"), (there, "both"))
    gone.failures["start_generate"] = EngineUnreachable("gone")
    with pytest.raises(EngineUnreachable):
        await run("data_parallel", fleet)
    assert [member.reachable for member in fleet.members] == [False, True]
    for _ in range(3):
        await run("data_parallel", fleet)
    assert there.verbs == ["start_generate"] * 3


async def test_without_an_engine_of_a_role_others_take_its_place(pair: Pair) -> None:
    prefill, *_ = pair
    fleet = fleet_of((prefill, "prefill"))
    assert await run("disaggregated", fleet)
    fleet.remove(prefill.name)
    with pytest.raises(EngineUnreachable, match="no engine"):
        await run("disaggregated", fleet)


async def test_two_engines_for_both_roles_share_the_work() -> None:
    one, two = FakeEngine("one"), FakeEngine("two")
    await run("disaggregated", fleet_of((one, "both"), (two, "both")))
    assert sorted([one.verbs, two.verbs]) == [["prep_recv", "start_generate"], ["remote_send"]]


async def test_the_trace_says_what_happened(pair: Pair) -> None:
    _, decode, fleet = pair
    decode.matched = 16
    trace = Trace()
    await run("disaggregated", fleet, None, trace)
    assert [event.verb for event in trace.events] == ["prep_recv", "remote_send", "start_generate"]
    prep, send, start = trace.events
    assert (prep.engine, prep.cached, prep.end) == ("d", 16, 100)
    assert (send.engine, send.begin, send.end, send.bytes, send.to) == ("p", 16, 100, 84 * 8, "d")
    assert (start.begin, start.end) == (100, 101)


# ---- loading -------------------------------------------------------------------------------------------------

OWN = """
from tercet.protocol import Output

async def shout(request, fleet, *, times: int = 1):
    for _ in range(times):
        yield Output((42,))
    yield Output((43,), "stop")

def not_a_program(request, fleet):
    return None
"""


async def test_a_program_from_a_file(tmp_path: Path, pair: Pair) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    program = load_program(f"{file}:shout", {"times": "2"})
    assert await run(f"{file}:shout", pair[2], times="2") == [42, 42, 43]
    assert isinstance(await anext(program(request_of(), FleetView(pair[2]))), Output)  # type: ignore[call-overload]


WANTING = """
async def wants_more(request, fleet, *, more):
    yield

async def wants_three(request, fleet, third):
    yield
"""


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("nonsense", {}, "there is no 'nonsense'"),
        ("{file}:nothing", {}, "has no function nothing"),
        ("{file}:not_a_program", {}, "not an async generator"),
        ("{missing}:shout", {}, "there is no file"),
        ("{broken}:shout", {}, "failed to load: SyntaxError"),
        ("{file}:shout", {"loud": "1"}, "no parameter 'loud'"),
        ("{file}:wants_more", {}, "missing a required argument: 'more'"),
        ("{file}:wants_three", {}, "missing a required argument: 'third'"),
        ("{file}:shout", {"times": "many"}, "times: must be a whole number, is .many"),
        ("data_parallel", {"min_send": "1"}, "no parameter 'min_send'"),
    ],
)
def test_what_is_wrong_with_a_program_is_said(tmp_path: Path, name: str, args: dict[str, str], says: str) -> None:
    (tmp_path / "mine.py").write_text(OWN + WANTING)
    (tmp_path / "broken.py").write_text("def (")
    name = name.format(file=tmp_path / "mine.py", missing=tmp_path / "no.py", broken=tmp_path / "broken.py")
    with pytest.raises(BadRequest, match=says) as raised:
        load_program(name, args)
    assert raised.value.param == ("args" if args else "program")


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
    auto: Any = BUILT_IN["auto"]
    await cancelled_after(steps, lambda: auto(LONG, FleetView(fleet)))
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


PAGE = (Path(__file__).resolve().parents[3] / "docs" / "programs.md").read_text()
PROFILE = "llama-3.1-8b-h100-tp1"


def simulated_fleet_of(*roles: str) -> EngineFleet:
    network, profile = Network(), load_profile(PROFILE)
    engines = [SimEngine(f"{role}-{n}", profile, network, EngineOptions()) for n, role in enumerate(roles)]
    pairs = zip(roles, engines, strict=True)
    return EngineFleet([Member(each.name, f"sim://{each.name}", role, each) for role, each in pairs])  # type: ignore[arg-type]


@pytest.mark.parametrize("by", ["round_robin", "least_loaded"])
@pytest.mark.parametrize(("count", "found"), [(1, 1), (2, 2), (3, 3), (9, 3)])
@in_virtual_time
async def test_engines_differ_and_are_fewer_if_fewer_exist(by: str, count: int, found: int) -> None:
    fleet = simulated_fleet_of("both", "both", "both")
    for _ in range(3):
        with FleetView(fleet).pick_several(count, by=by) as engines:
            assert len({engine.name for engine in engines}) == len(engines) == found
            assert [member.in_flight for member in fleet.members].count(1) == found
        assert not any(member.in_flight for member in fleet.members)
    with pytest.raises(BadRequest, match="count: is 0"), FleetView(fleet).pick_several(0):
        pass


@in_virtual_time
async def test_roles_partners_and_failures_count() -> None:
    fleet = simulated_fleet_of("prefill", "decode", "prefill")
    with (
        FleetView(fleet).pick("decode") as decode,
        FleetView(fleet).pick_several(3, "prefill", other_than=decode) as senders,
    ):
        assert {each.name for each in senders} == {"prefill-0", "prefill-2"}
    alone = simulated_fleet_of("both", "both")
    with FleetView(alone).pick() as one, FleetView(alone).pick_several(2, other_than=one) as others:
        assert [each.name for each in others] == [name for name in ("both-0", "both-1") if name != one.name]
    with pytest.raises(RuntimeError, match="mine"), FleetView(alone).pick_several(2):
        raise RuntimeError("mine")
    assert not any(member.in_flight for member in (*fleet.members, *alone.members))


def raced(tmp_path: Path) -> Any:
    code = re.search(r"```python\n(import asyncio.*?async def raced.*?)```", PAGE, re.DOTALL)
    assert code is not None
    (tmp_path / "mine.py").write_text(code[1])
    return load_program(f"{tmp_path / 'mine.py'}:raced")


@pytest.mark.parametrize("freezes", [False, True])
def test_the_race_of_the_manual_is_won_by_the_faster_sender_and_leaves_nothing(freezes: bool, tmp_path: Path) -> None:
    work = SyntheticWorkload(rate=3.0, requests=60, input_mean=3000, input_dev=1000, output_mean=20)
    engines, links = list[SimEngine](), list[Any]()
    faults = "faults:\n  - {engine: prefill-1, at: 2, down: 4, kind: freeze}\n" if freezes else ""
    (tmp_path / "fleet.yaml").write_text(
        "engines:\n  - {role: prefill, count: 2}\n  - {role: decode, count: 2}\n" + faults
    )
    spec = parse_fleet(str(tmp_path / "fleet.yaml"))

    async def watch(service: Any, built: Any, paid: PaidTime) -> None:
        engines.extend(built.values())
        links.append(service)

    found: dict[str, Any] = {}
    for name, program in (("alone", load_program("disaggregated")), ("raced", raced(tmp_path))):
        engines.clear()
        outcome = run_requests(program, spec, PROFILE, EngineOptions(), requests_of(work, 1), seed=1, companion=watch)
        assert not outcome.failures
        assert outcome.fallbacks == outcome.retries == 0
        found[name] = outcome
        for engine in engines:
            load = engine.load()
            assert (load.running, load.waiting) == (0, 0)
            assert engine.pool.free == engine.pool.total, "no block is pinned"
        assert not any(member.in_flight for member in links[-1].fleet.members)
    tokens = [each.counts["prefill_tokens"] for each in found.values()]
    assert tokens[1] > 1.3 * tokens[0], "prompts are computed twice, until the slower one is cancelled"
    waits = {name: np.percentile(each.requests.ttft, 99) for name, each in found.items()}
    if freezes:
        assert waits["alone"] > 2.0, "requests wait for the engine that stands still"
        assert waits["raced"] < 1.0
