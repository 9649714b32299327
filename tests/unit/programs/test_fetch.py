"""`fetch`: KV that another engine has is pulled, and whatever goes wrong costs one call and is computed."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import pytest

from tercet.decisions.cost import pulls
from tercet.fleet import EngineFleet, FleetView, Member, Trace
from tercet.programs import load_program, outputs_of
from tercet.protocol import (
    BadRequest,
    DeadlineExceeded,
    EngineUnreachable,
    NoSpace,
    Output,
    Request,
    TercetError,
    TransferFailed,
)
from tests.unit.fakes import BLOCK, FakeEngine

LENGTH = 400
HELD = 320


def request_of(length: int = LENGTH) -> Request:
    return Request(seq_id="s", prompt=tuple(range(length)))


class Fetching:
    """The engine ``here`` is less busy, and ``there`` is believed to have :data:`HELD` tokens of the prompt."""

    def __init__(self, has: int = HELD) -> None:
        self.here, self.there = FakeEngine("here"), FakeEngine("there", matched=has)
        members = [Member("there", "", "both", self.there), Member("here", "", "both", self.here)]
        self.fleet, self.trace = EngineFleet(members, seed=0), Trace()
        members[0].in_flight = 1
        prompt = request_of().prompt
        self.fleet.knowledge.store("there", BLOCK, list(range(HELD // BLOCK)), None, prompt[:HELD])

    async def run(self, request: Request | None = None) -> list[Output]:
        request = request or request_of()
        outputs = outputs_of(load_program("fetch")(request, FleetView(self.fleet, self.trace)))
        found = [output async for output in outputs]
        assert not self.here.leases
        assert not self.fleet.costs.pulls._running
        assert [member.in_flight for member in self.fleet.members] == [1, 0]
        return found

    @property
    def begin(self) -> object:
        """Where the generation began."""
        (found,) = [call for call in self.here.calls if call[0] == "start_generate"]
        return found[1]


@pytest.fixture
def fetching() -> Fetching:
    return Fetching()


async def test_what_another_engine_has_is_pulled(fetching: Fetching) -> None:
    assert await fetching.run()
    assert fetching.here.verbs == ["prep_recv", "start_generate"]
    assert fetching.there.verbs == ["remote_send"]
    assert fetching.begin == HELD
    (sent,) = [event for event in fetching.trace.events if event.verb == "remote_send"]
    assert (sent.cached_only, sent.predicted, sent.cached, sent.to) == (True, HELD, HELD, "here")


@pytest.mark.parametrize("has", [0, 160])
async def test_a_stale_belief_costs_one_call(has: int) -> None:
    fetching = Fetching(has)
    assert await fetching.run()
    assert fetching.there.verbs == ["remote_send"]
    assert fetching.begin == has
    (sent,) = [event for event in fetching.trace.events if event.verb == "remote_send"]
    assert (sent.predicted, sent.cached) == (HELD, has)


@pytest.mark.parametrize(
    "error",
    [
        EngineUnreachable("it died"),
        TransferFailed("lost"),
        BadRequest("Object contains unknown field `cached_only`", "cached_only"),
    ],
)
async def test_a_pull_that_fails_is_computed(fetching: Fetching, error: TercetError) -> None:
    fetching.there.failures["remote_send"] = error
    assert await fetching.run()
    assert fetching.begin == 0
    assert [(event.verb, event.cached_only) for event in fetching.trace.failed] == [("remote_send", True)]


async def test_without_room_for_a_reservation_it_is_computed(fetching: Fetching) -> None:
    fetching.here.failures["prep_recv"] = NoSpace("full")
    assert await fetching.run()
    assert (fetching.there.verbs, fetching.begin) == ([], 0)


async def test_an_engine_that_does_not_answer_is_given_up(fetching: Fetching) -> None:
    fetching.there.pause.clear()
    with patch.object(pulls, "LEAST_PATIENCE_S", 0.01):
        assert await asyncio.wait_for(fetching.run(), 10)
    assert fetching.begin == 0
    assert [event.code for event in fetching.trace.failed] == [DeadlineExceeded("").code]
    assert fetching.there.running == 0


async def test_nothing_is_pulled_where_nobody_has_more_or_it_costs_more(fetching: Fetching) -> None:
    assert await fetching.run(Request(seq_id="s", prompt=tuple(range(5000, 5400))))
    assert (fetching.there.verbs, fetching.here.verbs) == ([], ["start_generate"])
    slow = Fetching()
    for _ in range(30):
        slow.fleet.costs.model.sent(100.0, HELD)
    assert await slow.run()
    assert (slow.there.verbs, slow.here.verbs) == ([], ["start_generate"])


async def test_a_client_that_leaves_during_a_pull_leaves_nothing(fetching: Fetching) -> None:
    fetching.there.pause.clear()
    running = asyncio.create_task(fetching.run())
    while not fetching.there.running:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running})
    assert not fetching.here.leases
    assert (fetching.there.running, [member.in_flight for member in fetching.fleet.members]) == (0, [1, 0])
    assert not fetching.fleet.costs.pulls._running


async def test_an_engine_that_was_removed_after_its_pick_serves_without_a_pull(fetching: Fetching) -> None:
    with FleetView(fetching.fleet).pick(by="least_loaded") as engine:
        fetching.fleet.remove("here")
        assert FleetView(fetching.fleet).source(request_of(), engine) is None
