"""The verbs at the edge, over a core that answers when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tercet.aio import TaskSet
from tercet.engine.agents import AgentCalls
from tercet.engine.edge import Edge
from tercet.engine.interface import EngineDescription, PinnedPrefix
from tercet.engine.liveness_probe import LivenessProbe
from tercet.engine.verbs import remote_send
from tercet.protocol import BadRequest, KVAddrInfo, RankAddress, UnknownSequence, Usage, content_of, packed
from tercet.protocol.wire import RemoteSendCall
from tercet.transport import Push, SendDone
from tercet.vllm_plugin.core.core_methods import CoreCalls, end_send, push_cached, push_longest
from tercet.vllm_plugin.edge.llm_requests import LLMGeneration
from tests.longest_wait import LONGEST_WAIT_S

from .tiny_engine import LAYOUT, NO_ADAPTERS, FakeAgent

INFO = KVAddrInfo("f" * 32, "decode-0", 0, 48, "tcp", (RankAddress(0, ("tcp://127.0.0.1:9000",)),), LAYOUT)
PHASES = "asking", "cached", "computing", "computed", "asking for the longest", "longest"
SEND = RemoteSendCall(prompt=[1] * 48, seq_id="s", kv_addr_info=INFO, begin=0)


class Core(CoreCalls):
    """Has all KV cached, or none; what is asked of one that ``hangs`` does not come back."""

    def __init__(self, cached: bool, hangs: bool) -> None:
        self.cached, self.hangs = cached, hangs
        self.asked = asyncio.Event()
        self.ended: list[str] = []

    async def call(self, method: Any, *args: Any) -> Any:
        if method is end_send:
            self.ended.append(args[0])
            return None
        assert method in (push_cached, push_longest)
        self.asked.set()
        if self.hangs:
            await asyncio.Event().wait()
        if method is push_longest:
            send = args[1]
            return PinnedPrefix(32, [Push(send.send_id, 0, (1, 2))]) if self.cached else PinnedPrefix(send.begin, [])
        return [Push(args[1].send_id, 0, (1, 2, 3))] if self.cached else None


class Client:
    """As much of ``AsyncLLM`` as a send needs: ``computes`` says whether the forward pass ends."""

    def __init__(self, computes: bool) -> None:
        self._computes = computes
        self.log_stats = False
        self.output_processor = SimpleNamespace(update_scheduler_stats=lambda stats: None)
        model = SimpleNamespace(get_vocab_size=lambda: 1000, max_model_len=512, served_model_name="m")
        self.renderer = SimpleNamespace(mm_processor=None)
        self.vllm_config = SimpleNamespace(model_config=model, lora_config=None)
        self.generating = asyncio.Event()
        self.left = False

    async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[Any]:
        self.generating.set()
        try:
            if not self._computes:
                await asyncio.Event().wait()
            choice = SimpleNamespace(token_ids=[1], finish_reason="length", stop_reason=None, logprobs=None)
            yield SimpleNamespace(outputs=[choice], num_cached_tokens=0, prompt_logprobs=None)
        finally:
            self.left = True


class Phase:
    """A send that got as far as ``phase`` and no further."""

    def __init__(self, phase: str) -> None:
        self.core = Core(cached=phase in ("cached", "longest"), hangs=phase in ("asking", "asking for the longest"))
        self.client = Client(computes=phase == "computed")
        about = EngineDescription([["tcp://127.0.0.1:1"]], [], [], LAYOUT, "token", 60.0, 1.0, None)
        client: Any = self.client
        self.agent = FakeAgent()
        probe = LivenessProbe(partial(self.core.call, "status"), [], [])
        generation = LLMGeneration(client, "token")
        self.edge = Edge("e", about, self.core, generation, AgentCalls([self.agent]), NO_ADAPTERS, probe)

    async def begin(self, phase: str) -> asyncio.Task[Any]:
        call = msgspec.structs.replace(SEND, cached_only="longest" in phase)
        sending = asyncio.create_task(remote_send(self.edge, call))
        await self.core.asked.wait()
        if phase in ("computing", "computed"):
            await self.client.generating.wait()
        if phase == "computed":
            while not self.client.left:
                await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not sending.done()
        return sending

    async def require_back(self) -> None:
        tasks: TaskSet = self.edge.tasks
        assert await tasks.wait(LONGEST_WAIT_S)
        assert len(self.core.ended) == 1
        assert self.agent.cancelled == self.core.ended, "before the blocks are unpinned"
        assert not len(self.edge.work)
        assert not self.edge.reports._sends
        if self.client.generating.is_set():
            assert self.client.left
        self.edge.reports._task.cancel()


@pytest.mark.parametrize("phase", PHASES)
async def test_an_abort_ends_a_send_wherever_it_is(phase: str) -> None:
    found = Phase(phase)
    sending = await found.begin(phase)
    assert await found.edge.abort("s")
    with pytest.raises(UnknownSequence, match="s was aborted while its KV was being sent"):
        await asyncio.wait_for(sending, LONGEST_WAIT_S)
    assert not await found.edge.abort("s")
    await found.require_back()


@pytest.mark.parametrize("phase", PHASES)
async def test_a_caller_that_leaves_ends_a_send_wherever_it_is(phase: str) -> None:
    found = Phase(phase)
    sending = await found.begin(phase)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await found.require_back()


async def test_an_abort_of_one_sequence_leaves_the_others_sends() -> None:
    found = Phase("cached")
    sending = await found.begin("cached")
    other = asyncio.create_task(remote_send(found.edge, msgspec.structs.replace(SEND, seq_id="other")))
    await asyncio.sleep(0.01)
    await found.edge.abort("other")
    with pytest.raises(UnknownSequence):
        await other
    assert not sending.done()
    sending.cancel()
    await asyncio.wait([sending])
    assert await found.edge.tasks.wait(LONGEST_WAIT_S)
    found.edge.reports._task.cancel()


async def test_a_send_of_cached_kv_alone_says_how_far_it_came_and_computes_nothing() -> None:
    found = Phase("longest")
    sending = await found.begin("longest")
    (pushed,) = found.agent.pushed
    assert (pushed.plan.end, pushed.plan.content) == (32, content_of(packed([1] * 32), None))
    found.edge.reports._sends[pushed.plan.send_id].take(SendDone(pushed.plan.send_id, 0, 8, 2, "host"))
    sent = await sending
    assert (sent.begin, sent.end, sent.bytes, sent.usage) == (0, 32, 8, Usage(cached=32))
    assert not found.client.generating.is_set()
    await found.require_back()


async def test_without_cached_kv_no_agent_is_called_and_nothing_is_computed() -> None:
    found = Phase("nothing")
    sent = await remote_send(found.edge, msgspec.structs.replace(SEND, begin=16, cached_only=True))
    assert (sent.begin, sent.end, sent.bytes, sent.usage) == (16, 16, 0, Usage())
    assert await found.edge.tasks.wait(LONGEST_WAIT_S)
    assert (found.agent.pushed, found.agent.cancelled, found.core.ended) == ([], [], [])
    assert not found.client.generating.is_set()
    assert not len(found.edge.work)
    found.edge.reports._task.cancel()


async def test_cached_only_has_no_first_token() -> None:
    found = Phase("nothing")
    with pytest.raises(BadRequest, match="cached_only: computes nothing"):
        await remote_send(found.edge, msgspec.structs.replace(SEND, cached_only=True, sample=True))
    found.edge.reports._task.cancel()
