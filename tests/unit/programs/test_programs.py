"""Programs over fake engines: which verbs they call, and that they give back what they took wherever they stop."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from tercet.fleet import FleetView, Trace
from tercet.programs import BUILT_IN, load_program, outputs_of
from tercet.protocol import BadRequest, EngineUnreachable, NoSpace, Output, TransferFailed
from tests.unit.fakes import FakeEngine

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

    async def serve() -> None:
        async with aclosing(outputs_of(load_program(name)(request_of(), FleetView(fleet)))) as outputs:
            async for _ in outputs:
                await asyncio.sleep(0)

    task = asyncio.create_task(serve())
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
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
