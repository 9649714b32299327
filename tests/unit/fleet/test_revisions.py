"""During a rollout: engines that must not exchange KV are never picked for one another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tercet.decisions.scheduling import Scheduling
from tercet.fleet import EngineFleet, FleetView, Member, Trace
from tercet.fleet.policy_views import loaded_engines
from tercet.protocol import LayoutMismatch, Revision, Role, RoleUnavailable
from tests.unit.decisions.scheduling.builders import loaded, request_of
from tests.unit.fakes import FakeEngine

OLD, NEW = Revision("0.3.0", "0.32.0", "old"), Revision("0.3.0", "0.33.0", "old")
REQUEST = request_of(*range(64))
FILE = """
plugins:
- {type: queue-scorer}
- {type: always-disagg-pd-decider}
- {type: disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}}
schedulingProfiles:
- name: prefill
  plugins: [{pluginRef: queue-scorer}]
- name: decode
  plugins: [{pluginRef: queue-scorer}]
"""


@pytest.fixture
def plan(tmp_path: Path) -> Scheduling:
    return loaded(tmp_path, FILE)


def member(name: str, role: Role, revision: Revision) -> Member:
    return Member(name, "", role, FakeEngine(name), revision=revision)


def rolling(plan: Scheduling | None = None, *more: Member) -> EngineFleet:
    """Half of each role is replaced."""
    members = [
        member("p-old", "prefill", OLD), member("d-old", "decode", OLD), member("p-new", "prefill", NEW),
        member("d-new", "decode", NEW),
    ]  # fmt: skip
    return EngineFleet([*members, *more], scheduling=plan, seed=0)


def pairs(fleet: EngineFleet, by: str, turns: int = 40) -> set[tuple[str, str]]:
    found = set[tuple[str, str]]()
    for _ in range(turns):
        with (
            FleetView(fleet).pick("decode", by, request=REQUEST) as decode,
            FleetView(fleet).pick("prefill", by, other_than=decode, request=REQUEST) as prefill,
        ):
            found.add((prefill.name, decode.name))
    return found


@pytest.mark.parametrize("by", ["round_robin", "least_loaded", "scheduled"])
def test_pairs_are_of_one_revision(plan: Scheduling, by: str) -> None:
    assert pairs(rolling(plan), by) == {("p-old", "d-old"), ("p-new", "d-new")}


@pytest.mark.parametrize("by", ["round_robin", "least_loaded", "scheduled"])
def test_without_a_partner_an_engine_prefills_for_itself_and_the_trace_says_why(plan: Scheduling, by: str) -> None:
    fleet = rolling(plan)
    fleet.remove("p-new")
    assert pairs(fleet, by) == {("p-old", "d-old"), ("d-new", "d-new")}
    trace = Trace()
    view = FleetView(fleet, trace)
    with view.engine("d-new") as decode, view.pick("prefill", by, other_than=decode, request=REQUEST) as engine:
        assert engine.name == "d-new"
    assert "no engine of the role prefill may exchange KV with d-new" in trace.events[0].reason
    assert not FleetView(fleet).disaggregates(REQUEST, decode)
    with FleetView(fleet).engine("d-old") as old:
        assert FleetView(fleet).disaggregates(REQUEST, old)


def test_a_fleet_that_keeps_roles_apart_refuses(plan: Scheduling) -> None:
    fleet = rolling(plan)
    fleet.remove("p-new")
    fleet.picking.without_role = "refuse"
    with FleetView(fleet).engine("d-new") as decode, pytest.raises(RoleUnavailable, match="may exchange KV with d-new"):
        FleetView(fleet).pick("prefill", "least_loaded", other_than=decode).__enter__()


def test_a_draining_partner_keeps_its_revision(plan: Scheduling) -> None:
    fleet = rolling(plan)
    with FleetView(fleet).engine("d-old") as decode:
        fleet.drain("d-old")
        for _ in range(4):
            with FleetView(fleet).pick("prefill", "round_robin", other_than=decode) as prefill:
                assert prefill.name == "p-old"


def test_an_engine_that_comes_back_as_another_is_not_paired_any_more(plan: Scheduling) -> None:
    fleet = rolling(plan)
    assert ("p-old", "d-old") in pairs(fleet, "round_robin")
    fleet.member("p-old").revision = NEW
    assert pairs(fleet, "least_loaded") <= {("d-old", "d-old"), ("p-old", "d-new"), ("p-new", "d-new")}


def test_the_endpoint_pickers_ranking(plan: Scheduling) -> None:
    fleet = rolling(plan)
    for decode, prefill in (("d-old", "p-old"), ("d-new", "p-new")):
        assert [each.name for each in fleet.picking.ranked("prefill", REQUEST, 3, None, decode)[0]] == [prefill]
        others = {"d-old", "d-new", "p-old" if decode == "d-new" else "p-new"}
        assert fleet.picking.disaggregates(REQUEST, decode, None, 0)
        assert not fleet.picking.disaggregates(REQUEST, decode, None, 0, others)


def test_routes_by_cost_pair_within_a_revision() -> None:
    fleet = rolling(None, member("p-odd", "prefill", Revision("0.4.0", "0.32.0", "old")))
    found = set[tuple[str, str]]()
    for number in range(60):
        with FleetView(fleet, Trace()).route(request_of(*range(number, number + 4000)), explore=1.0) as route:
            if route.prefill is not None:
                found.add((route.prefill.name, route.decode.name))
    assert found
    assert all(fleet.member(one).revision == fleet.member(other).revision for one, other in found)


async def test_a_program_that_pairs_by_itself_is_refused_before_a_byte_is_sent() -> None:
    fleet = rolling()
    view = FleetView(fleet, Trace())
    with view.engine("p-old") as prefill, view.engine("d-new") as decode:
        async with decode.prep_recv(REQUEST) as space:
            with pytest.raises(LayoutMismatch, match=r"p-old and d-new must not exchange KV: their versions of vLLM"):
                await prefill.remote_send(REQUEST, space, 0)


def names(engines: Sequence[object]) -> list[str]:
    return [engine.name for engine in engines]  # type: ignore[attr-defined]


def test_move_policies_see_revisions() -> None:
    fleet = rolling()
    engines = loaded_engines(fleet, {}, (), 1.0)
    assert names([each for each in engines if each.fits(engines[0])]) == ["p-old", "d-old"]
