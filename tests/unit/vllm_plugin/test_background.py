"""Background requests in vLLM's own scheduler, with steps one after the other and planned ahead."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from .tiny_engine import BLOCK, MAX_BATCHED, NEXT_TOKEN, NUM_BLOCKS, TinyEngine, tokens_of

NUMBERS = itertools.count()


class Ahead(TinyEngine):
    """An engine that plans up to ``depth`` steps before the first of them has ended."""

    depth = 2

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config, scheduler=Scheduler if self.depth == 1 else AsyncScheduler)
        self.planned = deque[tuple[SchedulerOutput, dict[str, bool]]]()
        self.prompts_at = list[tuple[set[str], set[str]]]()  # of each step: requests in their prompts, and all

    def plan(self) -> SchedulerOutput:
        scheduler = self.scheduler
        before = {each.request_id: each.num_computed_tokens for each in scheduler.requests.values()}
        output = scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        samples = {each: not scheduler.requests[each].is_prefill_chunk for each in ids}
        cached = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        prompts = {
            each for each in ids
            if cached.get(each, before[each]) < scheduler.requests[each].num_prompt_tokens
        }  # fmt: skip
        self.prompts_at.append((prompts, set(ids)))
        self.planned.append((output, samples))
        if len(self.planned) == self.depth or not ids:
            self.end_step()
        return output

    def end_step(self) -> None:
        output, samples = self.planned.popleft()
        ids = {request_id: index for index, request_id in enumerate(samples)}
        sampled = [[NEXT_TOKEN] if does else [] for does in samples.values()]
        self.scheduler.update_from_output(output, ModelRunnerOutput(list(ids), ids, sampled))

    def until(self, *requests: Request, steps: int = 800) -> None:
        for _ in range(steps):
            if all(each.is_finished() for each in requests):
                break
            self.plan()
        assert all(each.is_finished() for each in requests), "they do not end"
        while self.planned:
            self.end_step()

    def ended(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)


class OneByOne(Ahead):
    depth = 1


@pytest.fixture(params=[OneByOne, Ahead])
def ahead(request: pytest.FixtureRequest, config: VllmConfig) -> Iterator[Ahead]:
    engine = request.param(config)
    yield engine
    while engine.planned:
        engine.end_step()
    engine.plan()
    engine.assert_nothing_held()
    assert not len(engine.side.background)


def is_vllms(scheduler: Scheduler) -> bool:
    return scheduler.schedule == MethodType(type(scheduler).schedule, scheduler)


def share(ahead: Ahead, tokens: int) -> None:
    """Give lines so many tokens of each step without prompts, whatever steps cost on this machine."""
    found: Any = ahead.side.background
    found._share.tokens = lambda now, has_prompts, decodes: 0 if has_prompts else tokens


def test_without_background_requests_the_scheduler_is_vllms(ahead: Ahead) -> None:
    assert is_vllms(ahead.scheduler)
    ahead.until(ahead.add("client", tokens_of(40)))
    assert is_vllms(ahead.scheduler)
    line = ahead.add("line", tokens_of(40, 200), background=True)
    assert not is_vllms(ahead.scheduler)
    ahead.until(line)
    assert is_vllms(ahead.scheduler)


def test_a_line_is_passed_over_while_another_request_is_in_its_prompt_and_keeps_its_blocks(ahead: Ahead) -> None:
    line = ahead.add("line", tokens_of(2 * BLOCK), 30, background=True)
    while len(line.output_token_ids) < 3:
        ahead.plan()
    blocks = ahead.blocks_of("line")
    client = ahead.add("client", tokens_of(2 * MAX_BATCHED + 5, 300), 4)
    steps = [ahead.plan() for _ in range(3)]
    assert [dict(each.num_scheduled_tokens) for each in steps] == [
        {"client": MAX_BATCHED}, {"client": MAX_BATCHED}, {"client": 5}
    ]  # fmt: skip
    assert ahead.blocks_of("line")[: len(blocks)] == blocks
    assert line.status == RequestStatus.RUNNING
    ahead.until(line, client)
    assert line.num_preemptions == 0
    assert list(line.output_token_ids) == [NEXT_TOKEN] * 30


def test_a_prompt_of_a_line_advances_little_by_little_while_others_generate(ahead: Ahead) -> None:
    client = ahead.add("client", tokens_of(20), 60)
    while not client.output_token_ids:
        ahead.plan()
    line = ahead.add("line", tokens_of(100, 300), 2, background=True)
    share(ahead, 10)
    steps = [dict(ahead.plan().num_scheduled_tokens) for _ in range(10)]
    assert steps == [{"client": 1, "line": 10}] * 10
    ahead.until(client, line)


def test_blocks_of_lines_go_to_others_at_once(ahead: Ahead) -> None:
    share(ahead, MAX_BATCHED)
    lines = [ahead.add(f"line-{at}", tokens_of(7 * BLOCK, 100 * at), 40, background=True) for at in range(3)]
    while not all(each.output_token_ids for each in lines):
        ahead.plan()
    assert ahead.free_blocks < 10 < NUM_BLOCKS
    client = ahead.add("client", tokens_of(10 * BLOCK, 500), 3)
    # With steps in flight, blocks are free when these have ended.
    steps = [ahead.plan().num_scheduled_tokens for _ in range(ahead.depth)]
    assert steps[-1] == {"client": MAX_BATCHED}
    assert [each.num_preemptions for each in lines] == [0, 0, 1]
    ahead.until(client, *lines)
    assert all(list(each.output_token_ids) == [NEXT_TOKEN] * 40 for each in lines)
    assert client.num_preemptions == 0


def test_places_of_lines_go_to_others_at_once(ahead: Ahead) -> None:
    share(ahead, MAX_BATCHED)
    lines = [ahead.add(f"line-{at}", tokens_of(5, 10 * at), 40, background=True) for at in range(8)]
    while not all(each.output_token_ids for each in lines):
        ahead.plan()
    assert len(ahead.scheduler.running) == ahead.scheduler.max_num_running_reqs == 8
    client = ahead.add("client", tokens_of(8, 500), 3)
    assert {"client": 8} in [ahead.plan().num_scheduled_tokens for _ in range(ahead.depth)]
    ahead.until(client, *lines)


def test_a_line_that_is_passed_over_ends_at_once(ahead: Ahead) -> None:
    line = ahead.add("line", tokens_of(2 * BLOCK), 30, background=True)
    while len(line.output_token_ids) < 3:
        ahead.plan()
    client = ahead.add("client", tokens_of(3 * MAX_BATCHED, 300), 4)
    ahead.plan()
    ahead.plan()
    ahead.ended("line")
    assert line.is_finished()
    assert "line" not in ahead.scheduler.requests
    assert is_vllms(ahead.scheduler)
    ahead.until(client)


def test_a_lease_of_a_line_does_not_keep_others_waiting(ahead: Ahead) -> None:
    """Its blocks are adopted by a request that waits; they are all that the other one needs."""
    tokens = tokens_of(20 * BLOCK)
    ahead.reserve("a" * 32, tokens)
    ahead.agent.received["a" * 32] = 20 * BLOCK
    ahead.commit("a" * 32, 20 * BLOCK)
    client = ahead.add("client", tokens_of(25 * BLOCK, 500), 3)
    line = ahead.add("line", [*tokens, 3], 3, lease="a" * 32, background=True)
    ahead.until(client, line)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.booleans(), st.integers(1, 150), st.integers(1, 20), st.integers(0, 60)),
        max_size=14,
    )
)
def test_others_are_computed_as_without_lines_and_all_ends(
    ahead: Ahead, requests: list[tuple[int, bool, int, int, int]]
) -> None:
    """Each request comes some steps after the last one; some are aborted when they have so many tokens."""
    begun, first = list[tuple[Request, bool, int]](), len(ahead.prompts_at)
    for number, (pause, background, length, most, gone_after) in enumerate(requests):
        for _ in range(pause):
            ahead.plan()
        name = f"{next(NUMBERS)}{'b' if background else 'c'}"
        found = ahead.add(name, tokens_of(length, 10 * number), most, background=background)
        begun.append((found, background, gone_after))
        for each, _, after in begun:
            if not each.is_finished() and 0 < after <= len(each.output_token_ids):
                ahead.ended(each.request_id)
    ahead.until(*[each for each, *_ in begun])
    for each, background, gone_after in begun:
        if each.status == RequestStatus.FINISHED_LENGTH_CAPPED:
            assert len(each.output_token_ids) == each.max_tokens
        else:
            assert gone_after
        assert background or not each.num_preemptions or not any(lines for _, lines, _ in begun)
    for prompts, all_of_step in ahead.prompts_at[first:]:
        if any(each.endswith("c") for each in prompts):
            assert not any(each.endswith("b") for each in all_of_step)
    assert is_vllms(ahead.scheduler)
