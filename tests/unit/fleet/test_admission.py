"""Who comes in, who waits and who is sent away, by the rules; and the sequences of one request, some at a time: no
place is lost.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tercet.fleet import admission
from tercet.fleet.admission import LATEST, SOON, SPARE_FLOWS, Admission, FleetLoad, RequestConcurrency, Ticket
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


LOAD = FleetLoad()


class Gate(admission.Gate):
    """Places by an :class:`Admission`, without engines."""

    def __init__(self, limits: Limits) -> None:
        self.admission = Admission(limits)

    def spare(self, priority: int) -> Ticket | None:
        return self.admission.spare(priority, LOAD)

    def give_back(self, ticket: Ticket) -> None:
        self.admission.leave(ticket, LOAD, 0.0)


class Sequences:
    """Those of one request; each ends when it is told to."""

    def __init__(self, concurrency: RequestConcurrency, count: int) -> None:
        self.concurrency = concurrency
        self.running: list[int] = []
        self.over: list[int] = []
        self.ends = [asyncio.Event() for _ in range(count)]
        self.tasks = [asyncio.create_task(self.run(index)) for index in range(count)]

    async def run(self, index: int) -> None:
        async with self.concurrency.one():
            self.running.append(index)
            try:
                await self.ends[index].wait()
            finally:
                self.running.remove(index)
        self.over.append(index)

    async def end(self, *indices: int) -> None:
        for index in indices:
            self.ends[index].set()
        await settled()

    async def cancel(self, *indices: int) -> None:
        for index in indices:
            self.tasks[index].cancel()
        await settled()


async def settled() -> None:
    for _ in range(40):
        await asyncio.sleep(0)


async def test_so_many_run_and_the_others_follow_in_their_order() -> None:
    found = Sequences(RequestConcurrency(3), 6)
    await settled()
    assert found.running == [0, 1, 2]
    await found.end(1)
    assert found.running == [0, 2, 3]
    await found.end(0, 2, 3, 4, 5)
    assert found.over[:1] == [1]
    assert sorted(found.over) == [0, 1, 2, 3, 4, 5]


async def test_each_that_runs_counts_in_the_limits() -> None:
    gate = Gate(Limits(in_flight=4, queued=10))
    own, _ = gate.admission.arrive(0, LOAD)
    found = Sequences(RequestConcurrency(10, gate), 8)
    await settled()
    assert (len(found.running), gate.admission.in_flight) == (4, 4)
    await found.end(*range(8))
    assert (len(found.over), gate.admission.in_flight) == (8, 1)
    gate.admission.leave(own, LOAD, 0.0)
    assert gate.admission.in_flight == 0


async def test_who_waits_comes_before_further_sequences() -> None:
    gate = Gate(Limits(in_flight=2, queued=10))
    gate.admission.arrive(0, LOAD)
    found = Sequences(RequestConcurrency(10, gate), 4)
    await settled()
    assert found.running == [0, 1]
    other, _ = gate.admission.arrive(0, LOAD)
    assert other.state == "waiting"
    await found.end(1)  # its place is the other's now
    assert other.state == "in"
    assert found.running == [0]
    await found.end(0)  # the request goes on with its own
    assert found.running == [2]
    gate.admission.leave(other, LOAD, 0.0)
    await found.end(2)
    assert found.running == [3]
    await found.end(3)
    assert gate.admission.in_flight == 1


async def test_two_requests_of_many_never_wait_for_each_other() -> None:
    gate = Gate(Limits(in_flight=2, queued=10))
    both = [Sequences(RequestConcurrency(10, gate), 5) for _ in range(2) if gate.admission.arrive(0, LOAD)]
    await settled()
    for index in range(5):
        assert [each.running for each in both] == [[index], [index]]
        for each in both:
            each.ends[index].set()
        await settled()
    assert [len(each.over) for each in both] == [5, 5]


async def test_those_that_wait_can_leave() -> None:
    found = Sequences(RequestConcurrency(1), 4)
    await settled()
    await found.cancel(1, 2)
    assert found.running == [0]
    await found.end(0)
    assert found.running == [3]
    await found.cancel(3)
    assert (found.concurrency.running, len(found.concurrency.waiting)) == (0, 0)


async def test_one_that_is_cancelled_as_it_is_let_in_gives_its_place_on() -> None:
    found = Sequences(RequestConcurrency(1), 3)
    await settled()
    found.ends[0].set()
    while not found.concurrency.waiting or found.concurrency.waiting[0] is not found.concurrency.waiting[-1]:
        await asyncio.sleep(0)  # until the second has a place, which it does not know of yet
    found.tasks[1].cancel()
    await settled()
    assert found.running == [2]


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_ends_or_leaves_when_all_comes_back(seed: int) -> None:
    chance = random.Random(seed)
    gate = Gate(Limits(in_flight=5, queued=10))
    gate.admission.arrive(0, LOAD)
    found = Sequences(RequestConcurrency(4, gate), 30)
    order = list(range(30))
    chance.shuffle(order)
    for index in order:
        if chance.random() < 0.5:
            found.tasks[index].cancel()
        else:
            found.ends[index].set()
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        assert gate.admission.in_flight <= 5
        assert found.concurrency.running <= 4
    await asyncio.gather(*found.tasks, return_exceptions=True)
    assert (gate.admission.in_flight, found.concurrency.running, len(found.concurrency.waiting)) == (1, 0, 0)
