"""Picks by profile, deciders, and what a fleet remembers while engines come and go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import msgspec
import pytest

from tercet.decisions.migration import Selection, SequenceView, balance
from tercet.decisions.scheduling import Decision, Engines, Scheduling, SchedulingProfile
from tercet.decisions.scheduling.filters import ByLabel
from tercet.decisions.scheduling.profiles import MaxScorePicker
from tercet.fleet import EngineFleet, FleetView, Member, Trace
from tercet.fleet.members import Counted
from tercet.fleet.picking import MOST_COMPARED
from tercet.fleet.policy_views import loaded_engines, observed_engines
from tercet.programs import load_program, outputs_of
from tercet.protocol import BadRequest, EngineLoad, EngineUnreachable, Fleet, Request, Role, RoleUnavailable
from tests.unit.decisions.scheduling.builders import loaded, request_of
from tests.unit.fakes import FakeEngine

FILE = """
plugins:
- {type: prefix-cache-scorer, parameters: {blockSize: 4}}
- {type: active-request-scorer}
- {type: queue-scorer}
- {type: max-score-picker}
- {type: by-label, name: in-x, parameters: {label: zone, validValues: [x]}}
- {type: prefix-based-pd-decider, parameters: {nonCachedTokens: 8, promptTokens: 12}}
- {type: load-based-pd-decider, name: patient, parameters: {maxWaiting: 2}}
- {type: always-disagg-pd-decider}
- {type: disagg-profile-handler, parameters: {deciders: {prefill: prefix-based-pd-decider}}}
schedulingProfiles:
- name: prefill
  plugins: [{pluginRef: queue-scorer}]
- name: decode
  plugins: [{pluginRef: prefix-cache-scorer, weight: 2}, {pluginRef: active-request-scorer}]
- name: zoned
  plugins: [{pluginRef: in-x}]
"""


@pytest.fixture
def plan(tmp_path: Path) -> Scheduling:
    return loaded(tmp_path, FILE)


def member(name: str, role: Role = "both", **labels: str) -> Member:
    return Member(name, "", role, FakeEngine(name), labels=labels)


def fleet_of(plan: Scheduling, *members: Member) -> EngineFleet:
    return EngineFleet(members, scheduling=plan, seed=0)


def prompt(first: int, length: int = 16) -> Request:
    return request_of(*range(first, first + length), seq_id=f"s{first}")


def picked(fleet: Fleet, request: Request | None = None, by: str = "decode", role: Role = "both") -> str:
    with fleet.pick(role, by=by, request=request) as engine:
        return engine.name


def test_a_profile_keeps_a_prefix_where_it_is_unless_that_engine_is_busy(plan: Scheduling) -> None:
    fleet = fleet_of(plan, member("a"), member("b"))
    first = picked(FleetView(fleet), prompt(0))
    fleet.member(first).in_flight = 1
    assert picked(FleetView(fleet), prompt(100)) != first
    assert picked(FleetView(fleet), prompt(0)) == first
    assert (
        picked(FleetView(fleet), request_of(0, 1, 2, 3, 99, 99, 99, 99, 99, 99, 99, 99)) != first
    )  # a third cached is too little


def test_roles_drains_and_silence_hold_for_profiles_too(plan: Scheduling) -> None:
    fleet = fleet_of(plan, member("p", "prefill"), member("d1", "decode"), member("d2", "decode"))
    assert picked(FleetView(fleet), by="scheduled", role="prefill") == "p"
    assert {picked(FleetView(fleet), by="scheduled", role="decode") for _ in range(50)} == {"d1", "d2"}
    fleet.member("d1").reachable = False
    assert {picked(FleetView(fleet), by="decode", role="decode") for _ in range(50)} == {"d2"}
    fleet.drain("d2")
    assert picked(FleetView(fleet), by="decode", role="decode") == "p"  # every engine can do both, and this one answers
    fleet.member("p").reachable = False
    assert picked(FleetView(fleet), by="decode", role="decode") == "d1"  # better than nothing
    fleet.remove("d1")
    assert picked(FleetView(fleet), by="decode", role="decode") == "p"
    fleet.remove("p")
    with pytest.raises(EngineUnreachable, match="every engine of this fleet is drained"):
        picked(FleetView(fleet), by="decode", role="decode")
    fleet.remove("d2")
    with pytest.raises(EngineUnreachable, match="this fleet has no engines"):
        picked(FleetView(fleet), by="decode", role="decode")


@pytest.mark.parametrize("by", ["least_loaded", "round_robin", "decode"])
def test_without_a_role_a_pick_may_be_refused_until_somebody_has_it_again(plan: Scheduling, by: str) -> None:
    fleet = fleet_of(plan, member("p", "prefill"), member("d", "decode"))
    fleet.picking.without_role = "refuse"
    assert picked(FleetView(fleet), by=by, role="decode") == "d"
    fleet.drain("d")
    with pytest.raises(RoleUnavailable, match="every engine of the role decode is drained"):
        picked(FleetView(fleet), by=by, role="decode")
    assert picked(FleetView(fleet), by=by, role="prefill") == picked(FleetView(fleet), by=by, role="both") == "p"
    fleet.drain("d", False)
    fleet.member("d").reachable = False
    with pytest.raises(RoleUnavailable, match="no engine of the role decode answers"):
        picked(FleetView(fleet), by=by, role="decode")
    fleet.member("d").reachable = True
    assert picked(FleetView(fleet), by=by, role="decode") == "d"
    fleet.remove("d")
    with pytest.raises(RoleUnavailable, match="has no engine of the role decode"):
        picked(FleetView(fleet), by=by, role="decode")


def test_another_engine_if_there_is_one(plan: Scheduling) -> None:
    fleet = fleet_of(plan, member("a"), member("b"))
    with FleetView(fleet).pick(by="decode") as first, FleetView(fleet).pick(by="prefill", other_than=first) as second:
        assert first.name != second.name
    fleet.remove("b")
    with FleetView(fleet).pick(by="decode") as first, FleetView(fleet).pick(by="prefill", other_than=first) as second:
        assert first.name == second.name == "a"


def test_a_strict_filter_and_an_unknown_name(plan: Scheduling) -> None:
    fleet = fleet_of(plan, member("a", zone="y"))
    with pytest.raises(EngineUnreachable, match="zoned"):
        picked(FleetView(fleet), by="zoned")
    fleet.add(member("b", zone="x"))
    assert picked(FleetView(fleet), by="zoned") == "b"
    with pytest.raises(BadRequest, match="choose one of least_loaded, least_work, round_robin, prefill, decode, zoned"):
        picked(FleetView(fleet), by="nonsense")
    with pytest.raises(BadRequest, match="no picker or profile 'scheduled'"):
        picked(FleetView(EngineFleet([member("a")])), by="scheduled")


def test_least_work_counts_the_prefill_in_line_and_takes_turns_among_equals() -> None:
    fleet = EngineFleet([member("a"), member("b"), member("c")], seed=0)
    view = FleetView(fleet, Trace())
    assert {picked(view, by="least_work") for _ in range(3)} == {"a", "b", "c"}
    in_line = {"a": 2.0, "b": 0.0, "c": 0.04}
    fleet.picking.waiting_on = in_line.__getitem__
    assert picked(view, by="least_work") == "b"
    with view.pick(by="least_work") as first, view.pick(by="least_work") as second:
        assert (first.name, second.name) == ("b", "c")  # a sequence counts as 0.05 s


def test_least_work_compares_some_of_many_engines() -> None:
    asked = list[str]()
    fleet = EngineFleet([member(f"e{index}") for index in range(MOST_COMPARED + 10)], seed=0)

    def waiting_on(name: str) -> float:
        asked.append(name)
        return 0.0

    fleet.picking.waiting_on = waiting_on
    picked(FleetView(fleet), by="least_work")
    assert len(set(asked)) == len(asked) == MOST_COMPARED


def test_profiles_change_for_views_that_exist_already(plan: Scheduling) -> None:
    fleet = EngineFleet([member("a")])
    view = FleetView(fleet, Trace())
    fleet.scheduling = plan
    assert picked(view) == "a"


def test_counts_return_when_a_pick_ends_badly(plan: Scheduling) -> None:
    fleet = fleet_of(plan, member("a"))
    (only,) = fleet.members

    def fail() -> None:
        with FleetView(fleet).pick(by="decode", request=prompt(0)):
            assert (only.in_flight, only.in_flight_tokens) == (1, 16)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert (only.in_flight, only.in_flight_tokens) == (0, 0)


def test_an_engine_that_took_anothers_row_inherits_nothing(plan: Scheduling) -> None:
    fleet = fleet_of(plan, member("a"), member("b"))
    holder = picked(FleetView(fleet), prompt(0))
    fleet.knowledge.store(holder, 4, [1], None, [0, 1, 2, 3])
    fleet.report(holder, EngineLoad(waiting=0, running=0, kv_usage=0.0))
    assert fleet.knowledge.cached_tokens(holder, prompt(0)) == 16
    fleet.remove(holder)
    fleet.add(member("new"))
    assert fleet.knowledge.cached_tokens("new", prompt(0)) == 0
    assert fleet.knowledge.cached_tokens(holder, prompt(0)) == 0
    # What the one that left still says is nobody's.
    fleet.knowledge.store(holder, 4, [1], None, [0, 1, 2, 3])
    fleet.report(holder, EngineLoad(waiting=0, running=0, kv_usage=0.0))
    assert fleet.knowledge.cached_tokens("new", prompt(0)) == 0


def test_a_removed_engine_may_be_in_use_still(plan: Scheduling) -> None:
    fleet = fleet_of(plan, member("a"))
    with FleetView(fleet).pick(by="decode", request=prompt(0)) as engine:
        gone = fleet.remove("a")
        fleet.add(member("a"))
        assert engine.name == "a"
    assert gone.in_flight == 0
    assert fleet.member("a").in_flight == 0


# ---- deciders ------------------------------------------------------------------------------------------------------


def test_the_decider_knows_what_the_pick_found_and_not_what_it_will_leave(plan: Scheduling) -> None:
    fleet = fleet_of(plan, member("p", "prefill"), member("d", "decode"))
    with FleetView(fleet).pick("decode", by="scheduled", request=prompt(0)) as decode:
        assert FleetView(fleet).disaggregates(prompt(0), decode)  # nothing was there, although it is routed there now
    with FleetView(fleet).pick("decode", by="scheduled", request=prompt(0)) as decode:
        assert not FleetView(fleet).disaggregates(prompt(0), decode)  # all of it was
        assert FleetView(fleet).disaggregates(prompt(0), decode, by="always-disagg-pd-decider")
    longer = prompt(0, 23)
    with FleetView(fleet).pick("decode", by="scheduled", request=longer) as decode:
        assert not FleetView(fleet).disaggregates(longer, decode)  # 7 tokens are missing
    longer = prompt(0, 50)
    with FleetView(fleet).pick("decode", by="scheduled", request=longer) as decode:
        assert FleetView(fleet).disaggregates(longer, decode)


def test_short_prompts_stay_on_one_engine(plan: Scheduling) -> None:
    fleet = fleet_of(plan, member("p", "prefill"), member("d", "decode"))
    with FleetView(fleet).pick("decode", by="scheduled", request=prompt(0, 11)) as decode:
        assert not FleetView(fleet).disaggregates(prompt(0, 11), decode)


def test_without_another_engine_there_is_nothing_to_decide(plan: Scheduling) -> None:
    fleet = fleet_of(plan, member("only"))
    with FleetView(fleet).pick("decode", by="scheduled", request=prompt(0)) as decode:
        assert not FleetView(fleet).disaggregates(prompt(0), decode, by="always-disagg-pd-decider")
    with pytest.raises(BadRequest, match="no decider 'me'"), FleetView(fleet).pick(by="decode") as decode:
        FleetView(fleet).disaggregates(prompt(0), decode, by="me")


def test_a_patient_decider_waits_for_a_prefill_engine_with_time(plan: Scheduling) -> None:
    fleet = fleet_of(plan, member("p1", "prefill"), member("p2", "prefill"), member("d", "decode"))
    with FleetView(fleet).pick("decode", by="decode", request=prompt(0)) as decode:
        assert FleetView(fleet).disaggregates(prompt(0), decode, by="patient")  # nobody said that it has a queue
        for name in ("p1", "p2"):
            fleet.report(name, EngineLoad(waiting=3, running=0, kv_usage=0.0))
        assert not FleetView(fleet).disaggregates(prompt(0), decode, by="patient")
        fleet.report("p2", EngineLoad(waiting=2, running=0, kv_usage=0.0))
        assert FleetView(fleet).disaggregates(prompt(0), decode, by="patient")


def test_a_decode_engine_that_no_profile_picked_is_looked_up(plan: Scheduling) -> None:
    fleet = fleet_of(plan, member("p", "prefill"), member("d", "decode"))
    fleet.knowledge.store("d", 4, [1, 2, 3], None, list(range(12)))
    with FleetView(fleet).pick("decode") as decode:
        assert not FleetView(fleet).disaggregates(prompt(0), decode)


# ---- with programs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data_parallel", "disaggregated", "balanced"])
async def test_built_in_programs_pick_by_profile(plan: Scheduling, name: str) -> None:
    fleet = fleet_of(plan, member("p", "prefill"), member("d", "decode"))
    program = load_program(name, {"pick": "scheduled"})
    tokens = [
        token async for output in outputs_of(program(prompt(0, 100), FleetView(fleet))) for token in output.token_ids
    ]
    assert tokens == [100, 101, 102]
    assert all(each.in_flight == each.in_flight_tokens == 0 for each in fleet.members)
    assert fleet.picking.believed == {}


@pytest.mark.parametrize("steps", range(8))
async def test_cancelled_anywhere_nothing_stays_believed(plan: Scheduling, steps: int) -> None:
    fleet = fleet_of(plan, member("p", "prefill"), member("d", "decode"))

    async def run() -> None:
        async for _ in outputs_of(
            load_program("disaggregated", {"pick": "scheduled"})(prompt(0, 100), FleetView(fleet))
        ):
            pass

    task = asyncio.create_task(run())
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert all(each.in_flight == each.in_flight_tokens == 0 for each in fleet.members)
    assert fleet.picking.believed == {}


# ---- speed ---------------------------------------------------------------------------------------------------------


def test_a_hundred_times_the_engines_cost_far_less_than_a_hundred_times_the_pick(plan: Scheduling) -> None:
    def pick_time(size: int) -> float:
        fleet = fleet_of(plan, *(member(f"e{n}") for n in range(size)))
        took: list[float] = []
        for number in range(60):
            request = prompt(number % 20, 512)
            began = time.perf_counter()
            picked(FleetView(fleet), request)
            took.append(time.perf_counter() - began)
        return median(took)

    few, many = pick_time(10), pick_time(1000)
    assert many < 25 * few, f"{few * 1e6:.0f} and {many * 1e6:.0f} us"


def test_candidates_follow_roles_labels_and_reachability_between_picks(plan: Scheduling) -> None:
    fleet = fleet_of(plan, member("a", zone="x"), member("b", zone="y"))
    assert {picked(FleetView(fleet), by="zoned") for _ in range(20)} == {"a"}
    fleet.member("b").labels = {"zone": "x"}
    fleet.member("a").labels = {"zone": "y"}
    assert {picked(FleetView(fleet), by="zoned") for _ in range(20)} == {"b"}
    fleet.member("a").labels = {"zone": "x"}
    fleet.member("b").reachable = False
    assert {picked(FleetView(fleet), by="zoned") for _ in range(20)} == {"a"}
    fleet.member("b").reachable = True
    fleet.member("b").role = "prefill"
    assert {picked(FleetView(fleet), by="zoned", role="prefill") for _ in range(40)} == {"a", "b"}
    assert {picked(FleetView(fleet), by="zoned", role="decode") for _ in range(40)} == {"a"}


def test_candidates_follow_the_scheduling_file(plan: Scheduling, tmp_path: Path) -> None:
    fleet = fleet_of(plan, member("a", zone="x"), member("b", zone="y"))
    assert {picked(FleetView(fleet), by="zoned") for _ in range(20)} == {"a"}
    fleet.scheduling = loaded(tmp_path, FILE.replace("validValues: [x]", "validValues: [y]"))
    assert {picked(FleetView(fleet), by="zoned") for _ in range(20)} == {"b"}


def test_a_filter_by_labels_is_asked_once_for_a_fleet_that_stays_as_it_is() -> None:
    asked: list[int] = []

    class Counting(ByLabel, frozen=True):
        def keep(self, decision: Decision, engines: Engines) -> Sequence[bool]:
            asked.append(len(engines))
            return super().keep(decision, engines)

    profile = SchedulingProfile("p", [Counting(label="zone", valid_values=frozenset({"x"}))], [], MaxScorePicker())
    fleet = fleet_of(Scheduling({"p": profile}), member("a", zone="x"), member("b", zone="y"))
    for _ in range(5):
        assert picked(FleetView(fleet), by="p") == "a"
    assert asked == [2]
    fleet.add(member("c", zone="x"))
    assert {picked(FleetView(fleet), by="p") for _ in range(20)} == {"a", "c"}
    assert asked == [2, 3]


@pytest.mark.parametrize("by", ["least_loaded", "least_work", "decode", "route"])
def test_clients_are_placed_as_if_nothing_ran_in_the_background(plan: Scheduling, by: str) -> None:
    fleet = fleet_of(plan, member("a"), member("b"))
    fleet.costs.model.transfers = 100  # no pair is tried

    def place(request: Request) -> str:
        view = FleetView(fleet, Trace())
        if by == "route":
            return stack.enter_context(view.route(request, explore=0.0)).decode.name
        return stack.enter_context(view.pick(by=by, request=request)).name

    def of_batch(number: int) -> Request:
        return msgspec.structs.replace(prompt(1000 + 100 * number), background=True)

    with ExitStack() as stack:
        client = place(prompt(0))
        other = place(of_batch(1))
        assert other != client  # it runs where there are the fewest sequences of all kinds
        assert fleet.costs.work(other).idle
        others = [Counted(fleet.member(other), of_batch(number)) for number in range(2, 5)]
        assert place(of_batch(5)) == client
        assert place(prompt(200)) == other
        assert (fleet.member(other).in_flight, fleet.member(other).background) == (5, 4)
        for each in others:
            each.end()
    for each in fleet.members:
        assert (each.in_flight, each.in_flight_tokens, each.background, each.background_tokens) == (0, 0, 0, 0)


def test_no_client_moves_to_where_the_background_takes_the_room(plan: Scheduling) -> None:
    fleet = fleet_of(plan, member("a"), member("b"))
    fleet.report("a", EngineLoad(waiting=0, running=2, kv_usage=0.5))
    fleet.report("b", EngineLoad(waiting=0, running=1, kv_usage=0.95))
    batch = Counted(fleet.member("b"), msgspec.structs.replace(prompt(1), background=True))
    assert [each.kv_usage for each in observed_engines(fleet)] == [0.5, 0.0]  # for roles and plans, "b" is empty
    client = SequenceView("client", 100, share=0.2, running=True, age=1.0)
    engines = loaded_engines(fleet, {"a": [client]}, (), 1.0)
    assert [each.load for each in engines] == [0.5, 0.95]
    assert not list(balance(engines, ("both",), 0.1, Selection(), "balance"))
    engines[1].load = 0.0  # its KV is free: now there is room
    assert [each.destination for each in balance(engines, ("both",), 0.1, Selection(), "balance")] == ["b"]
    batch.end()


def test_counts_of_a_member_are_what_scorers_see(plan: Scheduling) -> None:
    fleet = fleet_of(plan, member("a"), member("b"))
    fleet.member("a").in_flight = 3
    assert {picked(FleetView(fleet), prompt(1, 2)) for _ in range(20)} == {"b"}
    fleet.member("b").in_flight = 4
    assert {picked(FleetView(fleet), prompt(2, 2)) for _ in range(20)} == {"a"}
    gone = fleet.remove("a")
    fleet.add(member("c"))  # in the row that was the other's
    gone.in_flight = 9
    assert {picked(FleetView(fleet), prompt(3, 2)) for _ in range(20)} == {"c"}
