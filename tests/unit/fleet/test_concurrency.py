"""The sequences of one request: some at a time, with places that others could have had, and all of them given back."""

from __future__ import annotations

import asyncio
import random

import pytest

from tercet.fleet import admission
from tercet.fleet.admission import Admission, FleetLoad, RequestConcurrency, Ticket
from tercet.settings import Limits

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
