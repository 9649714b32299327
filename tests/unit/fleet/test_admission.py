"""Who comes in, who waits and who is sent away, by the rules; and a state machine that never loses a place."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tercet.fleet.admission import LATEST, SOON, SPARE_FLOWS, Admission, FleetLoad, Ticket
from tercet.settings import Limits

ONE = FleetLoad()


def arrivals(admission: Admission, *priorities: int) -> list[Ticket]:
    return [admission.arrive(priority, ONE)[0] for priority in priorities]


def test_lower_priority_values_come_in_first_and_equals_in_order() -> None:
    admission = Admission(Limits(in_flight=1))
    first, low, normal, again, high = arrivals(admission, 0, 5, 0, 0, -3)
    order = [high, normal, again, low]
    for leaving, entering in zip([first, *order], order, strict=False):
        assert admission.leave(leaving, ONE, 0.0) == [entering]
        assert entering.state == "in"


def test_a_full_queue_sends_away_who_ranks_last() -> None:
    admission = Admission(Limits(in_flight=1, queued=1))
    inside, waiting, newcomer, urgent = arrivals(admission, 0, 0, 0, -1)
    assert [ticket.state for ticket in (inside, waiting, newcomer, urgent)] == ["in", "refused", "refused", "waiting"]


def test_without_a_queue_the_next_one_is_refused_at_once() -> None:
    admission = Admission(Limits(in_flight=2, queued=0))
    assert [ticket.state for ticket in arrivals(admission, 0, 0, 0)] == ["in", "in", "refused"]


@pytest.mark.parametrize(
    ("limits", "in_flight", "load", "saturated"),
    [
        ({"in_flight": 4}, 3, ONE, False),
        ({"in_flight": 4}, 4, ONE, True),
        ({"in_flight_per_engine": 2}, 5, FleetLoad(engines=3), False),
        ({"in_flight_per_engine": 2}, 6, FleetLoad(engines=3), True),
        ({"in_flight_per_engine": 2}, 1, FleetLoad(engines=0), False),  # no engine: an error now is better than a wait
        ({"tokens": 1000}, 9, FleetLoad(tokens=999), False),
        ({"tokens": 1000}, 1, FleetLoad(tokens=1000), True),
        ({"tokens_per_engine": 1000}, 1, FleetLoad(engines=2, tokens=1999), False),
        ({"tokens_per_engine": 1000}, 1, FleetLoad(engines=2, tokens=2000), True),
        ({"in_flight": 10, "in_flight_per_engine": 2}, 2, ONE, True),
        ({}, 10**6, FleetLoad(tokens=10**9), False),
    ],
)
def test_saturation(limits: dict[str, Any], in_flight: int, load: FleetLoad, saturated: bool) -> None:
    assert Admission(Limits(**limits), in_flight, on_engines=in_flight).saturated(load) is saturated


def test_what_engines_do_not_serve_waits_for_no_room_there_and_takes_none() -> None:
    admission = Admission(Limits(in_flight=3, in_flight_per_engine=1))
    first, second = arrivals(admission, 0, 0)
    others = [admission.arrive(5, ONE, for_engines=False)[0] for _ in range(3)]
    assert [ticket.state for ticket in (first, second, *others)] == ["in", "waiting", "in", "in", "waiting"]
    assert admission.leave(others[0], ONE, 0.0) == [others[2]]
    assert admission.leave(first, ONE, 0.0) == [second]


def test_the_limit_of_all_requests_holds_for_those_too() -> None:
    admission = Admission(Limits(in_flight=1))
    other, _ = admission.arrive(0, ONE, for_engines=False)
    (waiting,) = arrivals(admission, 0)
    assert waiting.state == "waiting"
    assert admission.leave(other, ONE, 0.0) == [waiting]


def test_engines_that_join_let_in_more() -> None:
    admission = Admission(Limits(in_flight_per_engine=1))
    tickets = arrivals(admission, 0, 0, 0)
    assert admission.look(FleetLoad(engines=2)) == [tickets[1]]
    assert admission.look(FleetLoad(engines=2)) == []


def test_when_to_come_back_follows_how_often_requests_end() -> None:
    admission = Admission(Limits(in_flight=3))
    tickets = arrivals(admission, *[0] * 10)
    assert admission.retry_after == SOON
    admission.leave(tickets[0], ONE, 0.0)
    admission.leave(tickets[1], ONE, 2.0)
    assert admission.retry_after == 2 * (5 + 1)
    admission.leave(tickets[2], ONE, 1000.0)
    assert admission.retry_after == LATEST


def test_flows_that_clients_name_are_not_remembered_for_ever() -> None:
    """Somebody always waits, and everybody else comes once."""
    admission = Admission(Limits(in_flight=1, queued=1))
    admission.arrive(0, ONE)
    admission.arrive(-1, ONE, "always waits")
    for number in range(10 * SPARE_FLOWS):
        admission.arrive(number, ONE, f"flow {number}")
    assert len(admission._next_turns) <= SPARE_FLOWS + 2
    assert len(admission._turns) <= SPARE_FLOWS + 2
    assert (-1, "always waits") in admission._next_turns


class AnyOrder(RuleBasedStateMachine):
    """Arrivals, ends, and changes of the fleet, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = Limits(in_flight=4, in_flight_per_engine=2, tokens=100, queued=3)
        self.admission = Admission(self.limits)
        self.load = FleetLoad(engines=2)
        self.alive: list[Ticket] = []
        self.now = 0.0

    @rule(priority=st.integers(-2, 2), for_engines=st.booleans())
    def arrive(self, priority: int, for_engines: bool) -> None:
        ticket, changed = self.admission.arrive(priority, self.load, for_engines=for_engines)
        assert all(other.state in ("in", "refused") for other in changed)
        assert (ticket in changed) == (ticket.state != "waiting")
        self.alive.append(ticket)

    @rule(data=st.data(), seconds=st.floats(0, 10))
    def leave(self, data: st.DataObject, seconds: float) -> None:
        self.now += seconds
        if self.alive:
            ticket = self.alive.pop(data.draw(st.integers(0, len(self.alive) - 1)))
            changed = self.admission.leave(ticket, self.load, self.now)
            assert ticket.state == "over"
            assert all(other.state == "in" for other in changed)

    @rule(engines=st.integers(0, 4), tokens=st.sampled_from([0, 99, 100, 500]))
    def fleet_changes(self, engines: int, tokens: int) -> None:
        self.load = FleetLoad(engines, tokens)
        self.admission.look(self.load)

    @invariant()
    def counts_are_those_of_the_tickets(self) -> None:
        states = [ticket.state for ticket in self.alive]
        assert self.admission.in_flight == states.count("in") <= self.limits.in_flight  # type: ignore[operator]
        assert len(self.admission.waiting) == states.count("waiting") <= self.limits.queued
        on_engines = [ticket for ticket in self.alive if ticket.state == "in" and ticket.for_engines]
        assert self.admission.on_engines == len(on_engines)

    @invariant()
    def nobody_waits_without_need_and_all_in_order(self) -> None:
        waiting = self.admission.waiting
        assert waiting == sorted(waiting, key=Ticket.rank)
        assert not waiting or self.admission.saturated(self.load)
        full = self.admission.in_flight == self.limits.in_flight
        assert full or all(ticket.for_engines for ticket in waiting)
        assert SOON <= self.admission.retry_after <= LATEST

    def teardown(self) -> None:
        for ticket in self.alive:
            self.admission.leave(ticket, FleetLoad(), self.now)
        assert (self.admission.in_flight, self.admission.on_engines, self.admission.waiting) == (0, 0, [])


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=settings().max_examples * 3 // 5, stateful_step_count=40)


def test_flows_of_one_priority_take_turns() -> None:
    admission = Admission(Limits(in_flight=1))
    first, _ = admission.arrive(0, ONE)
    flows = ["a", "a", "a", "b", "c", "b"]
    waiting = [admission.arrive(0, ONE, flow)[0] for flow in flows]
    order: list[str] = []
    leaving = first
    for _ in waiting:
        (leaving,) = admission.leave(leaving, ONE, 0.0)
        order.append(leaving.flow)
    assert order == ["a", "b", "c", "a", "b", "a"]


def test_a_flow_that_comes_late_has_not_saved_turns() -> None:
    admission = Admission(Limits(in_flight=1))
    leaving, _ = admission.arrive(0, ONE)
    for _ in range(6):
        admission.arrive(0, ONE, "a")
    for _ in range(3):
        (leaving,) = admission.leave(leaving, ONE, 0.0)
    late = [admission.arrive(0, ONE, "b")[0] for _ in range(3)]
    order: list[str] = []
    for _ in range(6):
        (leaving,) = admission.leave(leaving, ONE, 0.0)
        order.append(leaving.flow)
    assert order == ["b", "a", "b", "a", "b", "a"]
    assert late[-1].state == "over"


def test_room_that_engines_say_they_have() -> None:
    admission = Admission(Limits())
    load = FleetLoad(room=2)
    tickets = [admission.arrive(0, load)[0] for _ in range(3)]
    assert [ticket.state for ticket in tickets] == ["in", "in", "waiting"]
    assert admission.look(FleetLoad(room=3)) == [tickets[2]]
    assert admission.saturated(FleetLoad(room=0))
