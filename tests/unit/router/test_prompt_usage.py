"""What a client is told of its prompt's tokens, and what a callback takes where it arrives: it counts as the
client's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from tercet.fleet import EngineFleet, Member, Trace
from tercet.protocol import EngineUnreachable, Output, Request, Usage
from tercet.protocol.spans import FALLBACK, TraceEvent, VerbTrace
from tercet.router.observe.metrics import Metrics
from tercet.router.serve.service import RequestRun, Service
from tercet.wire.serving.server_access import RequestContext
from tercet_lab.sim import SimEngine
from tests.unit.fakes import FakeEngine
from tests.unit.lab.sim.models import BLOCK, engines_of, request_of, tokens_of
from tests.virtual_time import in_virtual_time

LENGTH = 442
SPLIT = ("balanced", "disaggregated")


class House:
    """A router over an engine that prefills and one that decodes."""

    def __init__(self, metrics: Metrics, program: str, **options: Any) -> None:
        self.prefill, self.decode = engines_of("p", "d", stream_every=1)
        members = [Member("p", "", "prefill", self.prefill), Member("d", "", "decode", self.decode)]
        fleet = EngineFleet(members, clock=asyncio.get_running_loop().time)
        self.service = Service(fleet, program, options, metrics)

    async def cached(self, request: Request) -> int:
        """How many of the prompt's tokens its client is told were cached."""
        run = RequestRun(self.service, request, RequestContext("/v1/completions", {}))
        told = list[int]()

        def first(output: Any) -> None:
            if not told:
                usage = run.prompt_usage(output.usage)
                told.append(usage.cached + usage.received)  # vLLM's layer calls both cached

        await run.stream.run(first)
        return told[0]


async def warm(engine: SimEngine, length: int) -> None:
    await tokens_of(engine, request_of("before", length, 1))


@pytest.mark.parametrize("program", SPLIT)
@in_virtual_time
async def test_kv_that_was_received_is_not_cached(metrics: Metrics, program: str) -> None:
    house = House(metrics, program)
    assert await house.cached(request_of("cold", LENGTH)) == 0
    assert house.decode.pool.cached


@pytest.mark.parametrize("program", SPLIT)
@pytest.mark.parametrize("there", [10, 20])
@in_virtual_time
async def test_what_the_prefilling_engine_had_is_cached(metrics: Metrics, program: str, there: int) -> None:
    house = House(metrics, program)
    await warm(house.prefill, there * BLOCK)
    await warm(house.decode, 15 * BLOCK)
    assert await house.cached(request_of("warm", LENGTH)) == there * BLOCK


@pytest.mark.parametrize("program", SPLIT)
@in_virtual_time
async def test_what_the_decoding_engine_had_is_not_if_another_one_computed_it(metrics: Metrics, program: str) -> None:
    house = House(metrics, program)
    await warm(house.decode, 15 * BLOCK)
    assert await house.cached(request_of("there", LENGTH)) == 0


@pytest.mark.parametrize("program", [*SPLIT, "data_parallel"])
@in_virtual_time
async def test_an_engine_that_prefills_by_itself_tells_its_own(metrics: Metrics, program: str) -> None:
    options = {"role": "decode"} if program == "data_parallel" else {"min_send": 1000}
    house = House(metrics, program, **options)
    await warm(house.decode, 15 * BLOCK)
    assert await house.cached(request_of("own", LENGTH)) == 15 * BLOCK


def event(verb: str, cached: int) -> TraceEvent:
    return TraceEvent(verb, "e", cached=cached)


@pytest.mark.parametrize(
    ("events", "usage", "cached"),
    [
        # The first attempt's engine was lost after it had received; the second one prefills by itself.
        ([("prep_recv", 0), ("remote_send", 300), ("prep_recv", 16)], Usage(cached=16, computed=400), 16),
        ([("prep_recv", 0), ("remote_send", 300), (FALLBACK, 0)], Usage(cached=16, computed=400), 16),
        ([("prep_recv", 0), (FALLBACK, 0), ("remote_send", 300)], Usage(cached=0, received=384), 300),
        # What was sent was not taken.
        ([("prep_recv", 16), ("remote_send", 300)], Usage(cached=16, computed=400), 16),
        # What was sent came to the cache, and was found there.
        ([("prep_recv", 16), ("remote_send", 300)], Usage(cached=384, computed=58), 300),
        ([("prep_recv", 16), ("remote_send", 0)], Usage(cached=16, received=368, computed=58), 0),
        # The first token is the prefilling engine's.
        ([("prep_recv", 16), ("remote_send", 300)], None, 300),
        ([("remote_send", 300), ("prep_recv", 16)], None, 0),
        ([], None, 0),
    ],
)
def test_of_several_attempts_the_last_one_counts(
    metrics: Metrics, events: list[tuple[str, int]], usage: Usage | None, cached: int
) -> None:
    service = Service(EngineFleet([]), "data_parallel", {}, metrics)
    context = RequestContext("/v1/completions", {})
    run = RequestRun(service, request_of("r"), context)
    trace: VerbTrace = context.traces[0]
    trace.events += [event(*each) for each in events]
    told = run.prompt_usage(usage)
    assert told.cached + told.received == cached


class SteadyEngine(FakeEngine):
    """Lets whoever waits for an output have it before it makes the next one."""

    async def _outputs(self, request: Request, begin: int, output: Sequence[int]) -> AsyncGenerator[Output, None]:
        async for said in super()._outputs(request, begin, output):
            for _ in range(3):
                await asyncio.sleep(0)
            yield said


class HouseOfCallbacks:
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
    house = HouseOfCallbacks(metrics, SteadyEngine("a"))
    assert await house.serve(10) == list(range(100, 110))
    assert house.trace.ttft is not None
    assert house.trace.tpot is not None
    assert house.fleet.costs.model.output_of(10) == 10
    assert house.is_idle()


@pytest.mark.parametrize("after", [1, 2, 5])
async def test_another_engine_goes_on_behind_what_was_taken(metrics: Metrics, after: int) -> None:
    dying, other = SteadyEngine("a"), SteadyEngine("b")
    dying.fail_after, dying.failures["stream"] = after, EngineUnreachable("gone")
    house = HouseOfCallbacks(metrics, dying, other)
    assert await house.serve(10) == list(range(100, 110))
    assert other.calls == [("start_generate", 0, tuple(range(100, 100 + after)))]
    assert house.is_idle()
