"""Sends of running sequences on an engine whose core does not answer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tercet.engine import verbs
from tercet.engine.agents import AgentCalls
from tercet.engine.block_tables import (
    BlockTableReader,
    BlockTableWriter,
    Bypass,
    TablePlace,
    TableShape,
    create_table,
    row_owner,
)
from tercet.engine.edge import Edge
from tercet.engine.interface import EngineDescription, KeyedPrompt, SendPlan
from tercet.engine.liveness_probe import LivenessProbe
from tercet.engine.verbs import DecodingSequence
from tercet.protocol import EngineError, KVAddrInfo, Output, RankAddress, Usage, content_of, packed
from tercet.protocol.wire import RemoteSendCall
from tercet.transport import CORE_WORDS, Push, PushCached, SendDone, core_word
from tercet.vllm_plugin.core import core_methods
from tercet.vllm_plugin.core.connector_messages import TercetParams
from tercet.vllm_plugin.core.core_methods import CoreCalls
from tercet.vllm_plugin.edge.llm_requests import LLMGeneration, LLMRequest
from tests.longest_wait import LONGEST_WAIT_S, until

from .tiny_engine import BLOCK, LAYOUT, NO_ADAPTERS, FakeAgent, tokens_of

EPOCH = 5
BLOCKS = [4, 9, 2, 11]
PATIENCE = 0.05
TOKENS = tokens_of(60)
SHAPE = TableShape(2, 8)


def published(computed: int, blocks: list[int] = BLOCKS, owner: int = 1) -> tuple[BlockTableWriter, Any, TablePlace]:
    words, place = create_table(SHAPE)
    writer = BlockTableWriter(words, SHAPE, lambda epoch: None, EPOCH)
    writer.begin()
    row = writer.enter(owner)
    assert row is not None
    writer.blocks(row, 0, blocks)
    writer.computed(row, computed)
    writer.end()
    return writer, words, place


def send_params(begin: int, end: int, base: int = 0) -> SendPlan:
    return SendPlan("s", "f" * 32, content_of(packed(TOKENS), None, end), base, begin, end, [], "")


# ---- what is found -------------------------------------------------------------------------------------------


def bypass_over(computed: int, blocks: list[int] = BLOCKS) -> Bypass:
    _, words, place = published(computed, blocks)
    os.close(int(place.path.rpartition("/")[2]))
    return Bypass(BlockTableReader(words, SHAPE), BLOCK)


def test_blocks_of_the_range_for_the_leases_slots() -> None:
    pushes, word = bypass_over(60).find([7, 1], send_params(2 * BLOCK, 50, base=BLOCK))
    assert pushes == [Push("s", 1, (2, 11))]
    assert word == core_word(EPOCH, 0)


def test_of_each_group_what_its_layers_look_back_at() -> None:
    shape = TableShape(2, 8, 2)
    words, place = create_table(shape)
    os.close(int(place.path.rpartition("/")[2]))
    writer = BlockTableWriter(words, shape, lambda epoch: None, EPOCH)
    bypass, windowed = Bypass(BlockTableReader(words, shape), BLOCK), [0, 0, 7, 8]
    writer.begin()
    for group, blocks in enumerate((BLOCKS, windowed)):
        row = writer.enter(row_owner(1, group, shape))
        assert row is not None
        writer.blocks(row, 0, blocks)
        writer.computed(row, 60)
    writer.end()
    params = msgspec.structs.replace(send_params(0, 60), group_begins=(0, 2 * BLOCK))
    assert bypass.find([1], params)[0] == [Push("s", 0, tuple(BLOCKS)), Push("s", 2, (7, 8), 1)]
    before = msgspec.structs.replace(send_params(0, 20), group_begins=(0, 2 * BLOCK))
    assert bypass.find([1], before)[0] == [Push("s", 0, tuple(BLOCKS[:2]))]
    for wanted in ((0, BLOCK), (0, 0)):
        with pytest.raises(EngineError, match="has not published"):
            bypass.find([1], msgspec.structs.replace(params, group_begins=wanted))


def test_each_send_has_a_word_of_its_own_until_there_are_none() -> None:
    bypass = bypass_over(60)
    words = [bypass.find([1], send_params(0, 60))[1] for _ in range(CORE_WORDS)]
    assert words == [core_word(EPOCH, index) for index in range(CORE_WORDS)]
    with pytest.raises(EngineError, match="which is the limit"):
        bypass.find([1], send_params(0, 60))


@pytest.mark.parametrize(
    ("computed", "blocks"),
    [(59, BLOCKS), (60, BLOCKS[:3]), (60, [4, 0, 2, 11])],
    ids=["not computed", "without blocks", "not kept"],
)
def test_what_is_not_there_for_certain_is_not_sent(computed: int, blocks: list[int]) -> None:
    with pytest.raises(EngineError, match="has not published"):
        bypass_over(computed, blocks).find([1], send_params(0, 60))


def test_nobody_elses_kv_is_sent() -> None:
    with pytest.raises(EngineError, match="has not published"):
        bypass_over(60).find([2], send_params(0, 60))


# ---- the verb ------------------------------------------------------------------------------------------------


class SilentCore(CoreCalls):
    """A core that answers nothing but while it ``goes_on``. What it is ``asked`` it does then, in order."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.asked: list[str] = []

    async def call(self, method: Any, *args: Any) -> Any:
        if method != "status":
            self.asked.append(method.__name__)
        await self.goes_on.wait()
        if method == "status":
            return {}
        return [Push(args[1].send_id, 0, (1, 2, 3, 4))] if method is core_methods.push_cached else None


@dataclass
class Standing:
    """An engine that generates for a sequence of ``TOKENS``, and whose core stands still after it has published."""

    place: TablePlace | None
    core: SilentCore = field(default_factory=SilentCore)
    agent: FakeAgent = field(default_factory=FakeAgent)

    async def start(self) -> None:
        model = SimpleNamespace(get_vocab_size=lambda: 1000, max_model_len=512, served_model_name="m")
        client: Any = SimpleNamespace(
            log_stats=False,
            output_processor=SimpleNamespace(update_scheduler_stats=lambda stats: None),
            renderer=SimpleNamespace(mm_processor=None),
            vllm_config=SimpleNamespace(model_config=model, lora_config=None),
        )
        about = EngineDescription(
            [["tcp://127.0.0.1:1"]], [], [], LAYOUT, "token", 60.0, 1.0, None, tables=self.place
        )  # fmt: skip
        self.probe = LivenessProbe(partial(self.core.call, "status"), [], [])
        await self.probe.start()
        generation = LLMGeneration(client, "token")
        self.edge = Edge("e", about, self.core, generation, AgentCalls([self.agent]), NO_ADAPTERS, self.probe)
        request = LLMRequest(client, KeyedPrompt(TOKENS[:40], "salt"), {}, TercetParams("token"))
        decoding = DecodingSequence("r", 1, request, TOKENS[:40], lambda cached: Usage(), lambda begun: None)
        self.edge.generated.add(decoding)
        decoding.counted(Output(tuple(TOKENS[40:])))
        self.core.goes_on.clear()

    def send(self, tokens: list[int] = TOKENS, salt: str | None = "salt") -> asyncio.Task[Any]:
        end = len(tokens)
        info = KVAddrInfo("f" * 32, "d", 0, end, "tcp", (RankAddress(0, ("tcp://127.0.0.1:9000",)),), LAYOUT)
        call = RemoteSendCall(prompt=tokens, seq_id="m", kv_addr_info=info, begin=0, cache_salt=salt)
        self._sending = asyncio.create_task(verbs.remote_send(self.edge, call))
        return self._sending

    async def pushed(self) -> PushCached:
        while not self.agent.pushed:
            await asyncio.sleep(0.01)
            if self._sending.done():
                self._sending.result()
        return self.agent.pushed[-1]

    def report(self, push: PushCached) -> None:
        done = SendDone(push.plan.send_id, 0, 100, 1, "host")
        self.edge.reports._take(msgspec.msgpack.encode(["SendDone", done]))

    async def close(self) -> None:
        self.core.goes_on.set()
        assert await self.edge.tasks.wait(LONGEST_WAIT_S)
        self.edge.reports._task.cancel()
        await self.probe.close()


@pytest.fixture
def place() -> Iterator[TablePlace]:
    _, _, found = published(len(TOKENS))
    yield found
    os.close(int(found.path.rpartition("/")[2]))


@pytest.fixture
async def standing(place: TablePlace, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Standing]:
    monkeypatch.setattr(verbs, "BYPASS_SECONDS", PATIENCE)
    found = Standing(place)
    await found.start()
    yield found
    await found.close()


async def test_kv_goes_out_under_a_word_and_what_the_core_pins_later_is_unpinned(standing: Standing) -> None:
    sending = standing.send()
    push = await standing.pushed()
    assert push.pushes == (Push(push.plan.send_id, 0, tuple(BLOCKS)),)
    assert push.word == core_word(EPOCH, 0)
    standing.report(push)
    sent = await asyncio.wait_for(sending, LONGEST_WAIT_S)
    assert (sent.begin, sent.end, sent.bytes) == (0, len(TOKENS), 100)
    await until(lambda: len(standing.core.asked) >= 2)
    assert standing.core.asked == ["push_cached", "end_send"]
    assert standing.agent.cancelled == [push.plan.send_id]


async def test_a_core_that_answers_in_time_is_asked(standing: Standing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "BYPASS_SECONDS", 600.0)
    sending = standing.send()
    asyncio.get_running_loop().call_later(PATIENCE, standing.core.goes_on.set)
    push = await standing.pushed()
    assert push.word is None
    assert [each.blocks for each in push.pushes] == [(1, 2, 3, 4)]
    standing.report(push)
    await asyncio.wait_for(sending, LONGEST_WAIT_S)


async def test_patience_begins_with_the_last_progress_not_with_the_question(standing: Standing) -> None:
    await asyncio.wait_for(standing.probe.core_stands_still(PATIENCE), LONGEST_WAIT_S)
    with pytest.raises(StopIteration):  # it returns at once: it does not wait at all
        standing.probe.core_stands_still(PATIENCE / 2).send(None)
    standing.core.goes_on.set()
    await standing.probe.news(30)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(standing.probe.core_stands_still(600.0), 4 * PATIENCE)


@pytest.mark.parametrize(
    ("tokens", "salt"),
    [([*TOKENS[:-1], 999], "salt"), (TOKENS, None), ([*TOKENS, 7], "salt")],
    ids=["another token", "another salt", "a token too many"],
)
async def test_what_no_sequence_here_has_waits_for_the_core(standing: Standing, tokens: list[int], salt: str) -> None:
    sending = standing.send(tokens, salt)
    done, _ = await asyncio.wait({sending}, timeout=6 * PATIENCE)
    assert not done
    assert not standing.agent.pushed
    standing.core.goes_on.set()
    push = await standing.pushed()
    assert push.word is None
    standing.report(push)
    await asyncio.wait_for(sending, LONGEST_WAIT_S)


async def test_what_was_revoked_is_an_error_at_once(standing: Standing, monkeypatch: pytest.MonkeyPatch) -> None:
    assert standing.edge.bypass is not None
    monkeypatch.setattr(standing.edge.bypass._tables, "find", lambda owner: None)
    with pytest.raises(EngineError, match="does not answer, and has not published"):
        await asyncio.wait_for(standing.send(), LONGEST_WAIT_S)


async def test_without_a_table_the_core_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "BYPASS_SECONDS", PATIENCE)
    found = Standing(None)
    await found.start()
    sending = found.send()
    done, _ = await asyncio.wait({sending}, timeout=6 * PATIENCE)
    assert not done
    found.core.goes_on.set()
    found.report(await found.pushed())
    await asyncio.wait_for(sending, LONGEST_WAIT_S)
    await found.close()
