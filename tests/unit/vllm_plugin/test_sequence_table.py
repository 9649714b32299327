"""What an engine reports of the sequences that it generates: its edge's knowledge and its core's, put together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tercet.engine import sequences
from tercet.engine.interface import KeyedPrompt, RequestInCore
from tercet.engine.sequences import DecodingSequence, SequenceTable
from tercet.protocol import Conflict, MoveProposal, Output, SequenceReport, UnknownSequence, Usage
from tercet.protocol.wire import MoveCall
from tercet.vllm_plugin.core import core_methods
from tercet.vllm_plugin.core.connector_messages import REQUEST_PREFIX, TercetParams
from tercet.vllm_plugin.edge.llm_requests import LLMRequest

from .tiny_engine import BLOCK, TinyEngine, tokens_of


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
    monkeypatch.setattr(sequences, "ANSWER_SECONDS", 0.01)
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
