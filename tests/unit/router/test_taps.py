"""Tokens that are taken where they arrive count as the client's: in the trace, for costs, and when an engine dies."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import pytest

from tercet.fleet import EngineFleet, Member, Trace
from tercet.protocol import EngineUnreachable, Output, Request, Stream, Tap
from tercet.router.metrics import Metrics
from tercet.router.service import Service

from ..fakes import FakeEngine


class TappedEngine(FakeEngine):
    """Offers all but the first and the last of its outputs to its tap."""

    def start_generate(self, request: Request, begin: int = 0, output: Sequence[int] = ()) -> Stream:
        tap = Tap()
        return Stream(self._generate(request, begin, output, tap), tap)

    async def _generate(
        self, request: Request, begin: int, output: Sequence[int], tap: Tap
    ) -> AsyncGenerator[Output, None]:
        async for said in self._outputs(request, begin, output):
            if said.usage is not None or said.finished or not tap.offer(said):
                yield said


class House:
    """A front door over engines, the first of which is the least loaded."""

    def __init__(self, metrics: Metrics, *engines: FakeEngine) -> None:
        self.engines = engines
        self.fleet = EngineFleet([Member(engine.name, "", "both", engine) for engine in engines])
        self.service = Service(self.fleet, "data_parallel", {}, metrics)
        self.trace = Trace()
        self.taken = list[int]()

    def take(self, output: Output) -> bool:
        self.taken += output.token_ids
        return True

    async def serve(self, max_tokens: int) -> list[int]:
        request = Request(seq_id="s", prompt=tuple(range(100)), sampling_params={"max_tokens": max_tokens})
        outputs = self.service.run(request, self.trace, take=self.take)
        return [token async for output in outputs for token in output.token_ids]

    def is_idle(self) -> bool:
        return not any(member.in_flight for member in self.fleet.members) and all(
            self.fleet.costs.work(engine.name).idle for engine in self.engines
        )


async def test_what_is_taken_is_not_yielded_and_is_noted(metrics: Metrics) -> None:
    house = House(metrics, TappedEngine("a"))
    assert await house.serve(10) == [100, 109]
    assert house.taken == list(range(101, 109))
    assert house.trace.ttft is not None
    assert house.trace.tpot is not None
    assert house.fleet.costs.model.output_of(10) == 10
    assert house.is_idle()


@pytest.mark.parametrize("after", [1, 2, 5])
async def test_another_engine_goes_on_behind_what_was_taken(metrics: Metrics, after: int) -> None:
    dying, other = TappedEngine("a"), TappedEngine("b")
    dying.fail_after, dying.failures["stream"] = after, EngineUnreachable("gone")
    house = House(metrics, dying, other)
    yielded = await house.serve(10)
    assert sorted([*yielded, *house.taken]) == list(range(100, 110))
    assert other.calls == [("start_generate", 0, tuple(range(100, 100 + after)))]
    assert house.is_idle()


async def test_a_tap_that_leaves_everything_changes_nothing(metrics: Metrics) -> None:
    house = House(metrics, TappedEngine("a"))
    house.take = lambda output: False  # type: ignore[method-assign]
    assert await house.serve(6) == list(range(100, 106))


async def test_an_engine_that_cannot_be_tapped_is_waited_for(metrics: Metrics) -> None:
    house = House(metrics, FakeEngine("a"))
    assert await house.serve(6) == list(range(100, 106))
    assert house.taken == []
