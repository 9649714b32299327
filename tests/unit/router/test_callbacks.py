"""What a callback takes where it arrives counts as the client's: in the trace, for costs, and when an engine dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from tercet.fleet import EngineFleet, Member, Trace
from tercet.protocol import EngineUnreachable, Output, Request
from tercet.router.observe.metrics import Metrics
from tercet.router.serve.service import Service
from tests.unit.fakes import FakeEngine


class SteadyEngine(FakeEngine):
    """Lets whoever waits for an output have it before it makes the next one."""

    async def _outputs(self, request: Request, begin: int, output: Sequence[int]) -> AsyncGenerator[Output, None]:
        async for said in super()._outputs(request, begin, output):
            for _ in range(3):
                await asyncio.sleep(0)
            yield said


class House:
    """A router over engines, the first of which is the least loaded."""

    def __init__(self, metrics: Metrics, *engines: FakeEngine) -> None:
        self.engines = engines
        self.fleet = EngineFleet([Member(engine.name, "", "both", engine) for engine in engines])
        self.service = Service(self.fleet, "data_parallel", {}, metrics)
        self.trace = Trace()
        self.taken = list[int]()

    async def serve(self, max_tokens: int) -> list[int]:
        request = Request(seq_id="s", prompt=tuple(range(100)), sampling_params={"max_tokens": max_tokens})
        await self.service.run(request, self.trace).run(lambda output: self.taken.extend(output.token_ids))
        return self.taken

    def is_idle(self) -> bool:
        return (
            not any(member.in_flight for member in self.fleet.members)
            and all(self.fleet.costs.work(engine.name).idle for engine in self.engines)
            and not self.service.sequences
        )


async def test_what_a_callback_gets_is_noted(metrics: Metrics) -> None:
    house = House(metrics, SteadyEngine("a"))
    assert await house.serve(10) == list(range(100, 110))
    assert house.trace.ttft is not None
    assert house.trace.tpot is not None
    assert house.fleet.costs.model.output_of(10) == 10
    assert house.is_idle()


@pytest.mark.parametrize("after", [1, 2, 5])
async def test_another_engine_goes_on_behind_what_was_taken(metrics: Metrics, after: int) -> None:
    dying, other = SteadyEngine("a"), SteadyEngine("b")
    dying.fail_after, dying.failures["stream"] = after, EngineUnreachable("gone")
    house = House(metrics, dying, other)
    assert await house.serve(10) == list(range(100, 110))
    assert other.calls == [("start_generate", 0, tuple(range(100, 100 + after)))]
    assert house.is_idle()
