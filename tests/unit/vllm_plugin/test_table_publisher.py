"""What a core publishes of its sequences, on vLLM's own scheduler, beside a memory that says what each step writes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tercet.engine import edge
from tercet.engine.block_tables import NULL_BLOCK, BlockTableReader, Residence, open_table
from tercet.engine.edge import SequenceTable
from tercet.engine.interface import KeyedPrompt, RequestInCore
from tercet.engine.verbs import DecodingSequence
from tercet.protocol import Conflict, MoveProposal, NoSpace, Output, SequenceReport, UnknownSequence, Usage
from tercet.protocol.wire import MoveCall
from tercet.transport import KVRegion, core_word
from tercet.vllm_plugin.core import core_methods
from tercet.vllm_plugin.core.connector_messages import REQUEST_PREFIX, TercetParams
from tercet.vllm_plugin.edge.llm_requests import LLMRequest

from .tiny_engine import BLOCK, FULL, MAX_BATCHED, NEXT_TOKEN, NUM_BLOCKS, TinyEngine, tokens_of

# What a position of a block holds: the tokens up to there, as KV does.
Position = tuple[int, int]
Kept = tuple[int, list[int], list[Residence]]
WINDOW = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32, sliding_window=40)


class Published:
    """A tiny engine that publishes, its region, and what its workers have written into each position of each block."""

    scheduler: type[Scheduler] = Scheduler

    def __init__(self, config: VllmConfig, region: KVRegion, specs: Sequence[KVCacheSpec] = (FULL,)) -> None:
        self.region = region
        words = f"/proc/self/fd/{region.fd}", region.shape.words
        self.engine = TinyEngine(config, words=words, scheduler=self.scheduler, specs=specs)
        assert self.engine.side.tables is not None
        self.place = self.engine.side.tables.place
        self.reader: BlockTableReader = open_table(self.place)
        self.written: dict[Position, int] = {}
        self.tokens: dict[int, list[int]] = {}  # of all that were ever added
        self.kept: list[Kept] = []  # what was found, and whose it was

    def add(self, number: int, tokens: list[int], max_tokens: int = 40) -> None:
        request = self.engine.add(str(number), tokens, max_tokens, number=number, ignore_eos=True)
        self.tokens[number] = request._all_token_ids

    def step(self) -> None:
        self.engine.step(self._run)
        self.check()

    def _run(self, output: SchedulerOutput) -> None:
        self.check()  # it may stop before its workers run, and while they do
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request = self.engine.scheduler.requests[request_id]
            first = request.num_computed_tokens - scheduled
            for blocks in self.tables_of(request_id):
                for at in range(first, first + scheduled):
                    self.write(blocks[at // BLOCK], at % BLOCK, request._all_token_ids[: at + 1])
        self.check()

    def tables_of(self, request_id: str) -> list[list[int]]:
        return [list(blocks) for blocks in self.engine.scheduler.kv_cache_manager.get_block_ids(request_id)]

    def write(self, block: int, at: int, tokens: list[int]) -> None:
        self.written[block, at] = hash(tuple(tokens))

    def find(self, number: int) -> Residence | None:
        """What is said of the first group of layers."""
        found = self.reader.find_all(number)
        return None if found is None else found[0]

    def check(self) -> None:
        """All that the table says is true; and so is what it said before, as long as its words stand."""
        for number, tokens in self.tokens.items():
            found = self.reader.find_all(number)
            if found is not None:
                assert self.stands(found[0])
                self.kept.append((number, tokens, found))
        self.kept = [kept for kept in self.kept if self.stands(kept[2][0])]
        for _, tokens, found in self.kept:
            for each in found:
                self.require(tokens, each)

    def stands(self, found: Residence) -> bool:
        return self.region.has_word(core_word(found.epoch, 3))

    def require(self, tokens: list[int], found: Residence) -> None:
        for at in range(found.computed):
            if found.blocks[at // BLOCK] == NULL_BLOCK:
                continue  # it has left a window
            assert self.written[found.blocks[at // BLOCK], at % BLOCK] == hash(tuple(tokens[: at + 1])), at

    def idle(self) -> None:
        """No step is under way."""

    def close(self) -> None:
        self.idle()
        for number in self.tokens:
            if str(number) in self.engine.scheduler.requests:
                self.engine.abort(str(number))
        self.engine.assert_nothing_held()
        os.close(int(self.place.path.rpartition("/")[2]))


@dataclass
class Step:
    """A step that is planned: what it computes of which request, where, and whether a token comes of it."""

    output: SchedulerOutput
    parts: list[tuple[Request, list[list[int]], range, bool]]


class PublishedAhead(Published):
    """One that plans a step while another one is under way, as vLLM does on accelerators."""

    scheduler = AsyncScheduler

    def __init__(self, config: VllmConfig, region: KVRegion, specs: Sequence[KVCacheSpec] = (FULL,)) -> None:
        super().__init__(config, region, specs)
        self._steps: list[Step] = []

    def step(self) -> None:
        output = self.engine.scheduler.schedule()
        self.check()
        parts = list[tuple[Request, list[list[int]], range, bool]]()
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request = self.engine.scheduler.requests[request_id]
            computes = range(request.num_computed_tokens - scheduled, request.num_computed_tokens)
            parts.append((request, self.tables_of(request_id), computes, not request.is_prefill_chunk))
        self._steps.append(Step(output, parts))
        if len(self._steps) == 2 or not parts:
            self._finish(self._steps.pop(0))

    def _finish(self, step: Step) -> None:
        for request, tables, computes, _ in step.parts:
            tokens = [*request._all_token_ids, NEXT_TOKEN, NEXT_TOKEN]
            for blocks in tables:
                for at in computes:
                    self.write(blocks[at // BLOCK], at % BLOCK, tokens[: at + 1])
        self.check()
        ids = {request.request_id: index for index, (request, *_) in enumerate(step.parts)}
        sampled = [[NEXT_TOKEN] if samples else [] for *_, samples in step.parts]
        self.engine.scheduler.update_from_output(step.output, ModelRunnerOutput(list(ids), ids, sampled))
        self.check()

    def idle(self) -> None:
        while self._steps:
            self._finish(self._steps.pop(0))


@contextmanager
def publishing(
    config: VllmConfig, kind: type[Published] = Published, specs: Sequence[KVCacheSpec] = (FULL,)
) -> Generator[Published]:
    region = KVRegion.create(1, NUM_BLOCKS, 64)
    try:
        found = kind(config, region, specs)
        yield found
        found.close()
    finally:
        region.close()


@pytest.fixture
def published(config: VllmConfig) -> Iterator[Published]:
    with publishing(config) as found:
        yield found


def test_after_each_step_it_says_what_is_computed_and_where(published: Published) -> None:
    published.add(1, tokens_of(20))
    assert published.find(1) is None
    published.step()
    for computed in range(20, 40):
        found = published.find(1)
        assert found is not None
        assert found.computed == computed, "as many as whoever has the last token can know of"
        assert found.blocks == published.engine.blocks_of("1")[: len(found.blocks)]
        published.step()


def test_a_prompt_is_there_from_its_first_chunk_on(published: Published) -> None:
    published.add(1, tokens_of(MAX_BATCHED + 30))
    published.step()
    found = published.find(1)
    assert found is not None
    assert found.computed == MAX_BATCHED


def test_a_step_that_is_under_way_does_not_count(config: VllmConfig) -> None:
    with publishing(config, PublishedAhead) as published:
        published.add(1, tokens_of(20))
        published.step()
        assert published.find(1) is None
        for computed in range(20, 40):
            published.step()
            found = published.find(1)
            assert found is not None
            assert found.computed == computed


def test_what_nobody_can_ask_for_is_not_there(published: Published) -> None:
    published.engine.add("plain", tokens_of(20), max_tokens=5)
    for _ in range(3):
        published.step()
    assert published.find(0) is None
    published.engine.abort("plain")


def test_one_that_is_over_is_gone_and_its_blocks_stand_until_others_get_them(published: Published) -> None:
    published.add(1, tokens_of(60))
    for _ in range(3):
        published.step()
    found = published.find(1)
    assert found is not None
    published.engine.abort("1")
    assert published.find(1) is None
    assert published.stands(found)
    published.engine.reserve("a" * 32, tokens_of(20, start=300))
    assert not published.stands(found), "a peer writes there from now on"
    published.engine.release("a" * 32)


def test_a_reservation_between_two_steps_revokes_and_the_next_step_says_it_again(published: Published) -> None:
    published.add(1, tokens_of(60))
    published.step()
    before = published.find(1)
    assert before is not None
    published.engine.reserve("a" * 32, tokens_of(20, start=300))
    assert published.find(1) is None
    published.step()
    again = published.find(1)
    assert again is not None
    assert again.epoch > before.epoch
    assert again.blocks[: len(before.blocks)] == before.blocks
    published.engine.release("a" * 32)


def test_a_prefix_that_it_found_counts_once_a_step_of_its_own_has_run(published: Published) -> None:
    published.add(1, tokens_of(100), max_tokens=1)
    while "1" in published.engine.scheduler.requests:
        published.step()
    published.add(2, tokens_of(100))
    output = published.engine.scheduler.schedule()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 96
    assert published.find(2) is None
    published.engine.abort("2")
    del published.tokens[1], published.tokens[2]


def test_one_that_lost_its_blocks_begins_anew(published: Published) -> None:
    published.add(1, tokens_of(60))
    for _ in range(3):
        published.step()
    assert published.find(1) is not None
    assert published.engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    published.engine.step(lambda _: _nothing_is_found(published))
    found = published.find(1)
    assert found is not None
    assert found.computed >= 60


def _nothing_is_found(published: Published) -> None:
    assert published.find(1) is None, "it has blocks again, and has computed nothing"


def test_without_the_workers_memory_nothing_is_published(config: VllmConfig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tercet.vllm_plugin.core.scheduler_side"):
        engine = TinyEngine(config)
    assert engine.side.tables is None
    engine.run(engine.add("1", tokens_of(20), number=1))
    engine.assert_nothing_held()


actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 150), st.sampled_from([0, 0, 500]), st.integers(1, 60)),
        st.tuples(st.just("step"), st.integers(1, 12), st.just(0), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 30), st.just(0), st.just(0)),
        st.tuples(st.just("lease"), st.integers(1, 120), st.sampled_from([0, 700]), st.just(0)),
        st.tuples(st.just("end lease"), st.integers(0, 5), st.just(0), st.just(0)),
        st.tuples(st.just("reset"), st.just(0), st.just(0), st.just(0)),
    ),
    max_size=30,
)


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW)], ids=["one group", "windows"])
@pytest.mark.parametrize("kind", [Published, PublishedAhead])
def test_whatever_happens_what_stands_is_true(
    config: VllmConfig, kind: type[Published], specs: Sequence[KVCacheSpec]
) -> None:
    """A pool of few blocks: requests are preempted, and their blocks given to others and to peers under a lease."""

    @given(actions)
    @settings(max_examples=settings().max_examples * 3 // 5, deadline=None)
    def happens(wanted: list[tuple[str, int, int, int]]) -> None:
        with publishing(config, kind, specs) as published:
            leases: list[str] = []
            for number, action in enumerate(wanted, 1):
                do(published, number, leases, *action)
                published.check()
            for lease in leases:
                published.engine.release(lease)

    happens()


def do(published: Published, number: int, leases: list[str], action: str, value: int, start: int, more: int) -> None:
    engine = published.engine
    match action:
        case "add":
            published.add(number, tokens_of(value, start=10 + start), more)
        case "step":
            for _ in range(value):
                published.step()
        case "abort" if published.tokens:
            whose = str(list(published.tokens)[value % len(published.tokens)])
            engine.scheduler.finish_requests(whose, RequestStatus.FINISHED_ABORTED)
        case "lease":
            reserve(published, f"{number:032x}", tokens_of(value, start=10 + start), leases)
        case "end lease" if leases:
            engine.release(leases.pop(value % len(leases)))
        case "reset" if not leases:
            published.idle()
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        case _:
            pass


def reserve(published: Published, lease: str, tokens: list[int], leases: list[str]) -> None:
    """A peer writes into all that it is given."""
    try:
        matched = published.engine.reserve(lease, tokens)
    except NoSpace:
        return
    leases.append(lease)
    grant = published.engine.agent.granted[lease]
    for at in range(matched, len(tokens)):
        published.write(grant.blocks[0][(at - matched) // BLOCK], at % BLOCK, tokens[: at + 1])


# What an engine reports of the sequences that it generates: its edge's knowledge and its core's, put together.


def sequence_of(seq_id: str, tokens: int) -> DecodingSequence:
    client: Any = None
    request = LLMRequest(client, KeyedPrompt([1] * tokens), {}, TercetParams("token"))
    return DecodingSequence(seq_id, 1, request, [1] * tokens, lambda cached: Usage(), lambda begun: None)


def answering(*answer: RequestInCore) -> Callable[[], Awaitable[Sequence[RequestInCore]]]:
    async def ask() -> Sequence[RequestInCore]:
        return answer

    return ask


def in_core(sequence: DecodingSequence, blocks: int, running: bool = True) -> RequestInCore:
    return RequestInCore(sequence.request.request_id, blocks, running)


def told(found: SequenceReport) -> tuple[str, int, int, bool, str]:
    assert found.age >= 0
    return found.seq_id, found.tokens, found.blocks, found.running, found.router


async def test_the_core_says_blocks_and_whether_it_runs_the_edge_the_rest() -> None:
    one, two, new = sequence_of("one", 40), sequence_of("two", 7), sequence_of("new", 9)
    table = SequenceTable(answering(in_core(two, 0, False), in_core(one, 3)))
    for sequence in (one, two, new):
        table.add(sequence)
    one.counted(Output((1, 2)))
    sender: Any = SimpleNamespace(connection=SimpleNamespace(address="10.0.0.9:40711"))
    two.sender = sender
    assert [told(found) for found in await table.reports()] == [
        ("one", 42, 3, True, ""),
        ("two", 7, 0, False, "10.0.0.9:40711"),
        ("new", 9, 0, False, ""),  # the core has not got it yet
    ]
    table.remove(one)
    assert [found.seq_id for found in await table.reports()] == ["two", "new"]


async def test_of_a_core_that_stands_still_its_last_word_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "ANSWER_SECONDS", 0.01)
    one, asked, frozen = sequence_of("one", 40), list[int](), asyncio.Event()

    async def ask() -> Sequence[RequestInCore]:
        asked.append(1)
        if len(asked) == 2:
            await frozen.wait()
        return [in_core(one, len(asked))]

    table = SequenceTable(ask)
    table.add(one)
    assert [told(found) for found in await table.reports()] == [("one", 40, 1, True, "")]
    for _ in range(3):
        one.counted(Output((1,)))
        assert (await table.reports())[0].blocks == 1
    assert (await table.reports())[0].tokens == 43
    assert len(asked) == 2, "it is asked again when it has answered"
    frozen.set()
    await asyncio.sleep(0.01)
    assert (await table.reports())[0].blocks == 3


async def test_a_core_that_has_ended_is_no_error_of_the_report() -> None:
    async def ask() -> Sequence[RequestInCore]:
        raise RuntimeError("EngineCore died")

    table = SequenceTable(ask)
    table.add(sequence_of("one", 40))
    assert [told(found) for found in await table.reports()] == [("one", 40, 0, False, "")]


async def test_without_sequences_nobody_is_asked() -> None:
    async def ask() -> Sequence[RequestInCore]:
        raise AssertionError("asked")

    assert await SequenceTable(ask).reports() == []


async def test_the_core_tells_of_our_requests_only(engine: TinyEngine) -> None:
    request_id = f"{REQUEST_PREFIX}{'0' * 32}"
    ours = engine.add(f"{request_id}-a1b2c3d4", tokens_of(40))
    theirs = engine.add("cmpl-1", tokens_of(20, 200))

    async def report() -> list[RequestInCore]:
        return [
            RequestInCore(**found)
            for found in (await engine.call_utility_async(core_methods.name_of(core_methods.sequences)))[0]
        ]

    assert await report() == [RequestInCore(request_id, 0, False)]
    engine.step()
    assert await report() == [RequestInCore(request_id, -(-40 // BLOCK), True)]
    engine.run(theirs)
    engine.run(ours)
    assert await report() == []


async def test_a_proposal_goes_to_whoever_has_the_sequence() -> None:
    table, told = SequenceTable(answering()), list[MoveProposal]()
    table.add(streamed("s.2", told))
    table.add(sequence_of("plain", 40))
    call = MoveCall(destination="d", reason="why")
    table.propose_move("s.2", call)
    table.propose_move("s", call)
    assert told == [MoveProposal("s.2", "d", "why")] * 2
    with pytest.raises(Conflict, match="plain is not run by a router"):
        table.propose_move("plain", call)
    table.add(streamed("left", told, is_open=False))
    with pytest.raises(Conflict, match="left is not run"):
        table.propose_move("left", call)
    with pytest.raises(UnknownSequence):
        table.propose_move("t", call)


def streamed(seq_id: str, told: list[MoveProposal], is_open: bool = True) -> DecodingSequence:
    sender: Any = SimpleNamespace(propose=told.append, open=is_open)
    sequence = sequence_of(seq_id, 40)
    sequence.sender = sender
    return sequence
