"""The edge's ledger of leases over the scheduler's own one: on every exit both are empty; and the story of a lease
across the ledgers, without a step that cannot be.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from prometheus_client import REGISTRY

from tercet.aio.tasks import TaskSet
from tercet.engine import agents as agent_calls
from tercet.engine import lease_timers
from tercet.engine.agents import AgentCalls
from tercet.engine.interface import KeyedPrompt
from tercet.engine.lease_timers import EdgeLease, InvalidTransition, LeaseStory, LeaseTimers, story
from tercet.engine.leases import LIFE, LeaseState
from tercet.protocol import BadRequest, EngineError, LeaseEnded, NoSpace, UnknownSequence, content_of, packed
from tercet.transport import ExtendLease, GrantLease, LeaseFilled, RevokeLease
from tercet.vllm_plugin.core.core_methods import CoreCalls
from tests.longest_wait import LONGEST_WAIT_S

from .tiny_engine import BLOCK, NUM_BLOCKS, FakeAgent, TinyEngine, tokens_of

NOTIFY = "tcp://127.0.0.1:1"


class TinyCore(CoreCalls):
    """Calls of a tiny engine's core; each waits for ``before`` and ``after`` it is carried out."""

    def __init__(self, engine: TinyEngine) -> None:
        client: Any = SimpleNamespace(engine_core=self)
        super().__init__(client)
        self.engine = engine
        self.before, self.after = asyncio.Event(), asyncio.Event()
        self.before.set()
        self.after.set()
        self.called: list[str] = []

    async def call_utility_async(self, name: str, *args: Any) -> Any:
        self.called.append(name)
        await self.before.wait()
        found = await self.engine.call_utility_async(name, *args)
        # Once the core has a call it carries it out, whether or not the caller still waits.
        await self.after.wait()
        return found


class Edge:
    def __init__(self, engine: TinyEngine) -> None:
        self.engine = engine
        self.core = TinyCore(engine)
        self.tasks = TaskSet()
        self.agents = [engine.agent, FakeAgent()]
        self.leases = LeaseTimers(self.core, AgentCalls(self.agents), self.tasks, reserve_wait=0.05)

    async def reserve(self, seq_id: str = "s", length: int = 40, ttl: float = 60.0) -> Any:
        return await self.leases.reserve(seq_id, KeyedPrompt(tokens_of(length)), ttl, NOTIFY)

    def end_soon(self, held: EdgeLease) -> None:
        """Let a lease that has its blocks end by itself, without a race for them."""
        held.ttl = 0.01
        self.leases.renew(held)

    def received(self, lease: str, *ends: int) -> None:
        for agent, end in zip(self.agents, ends, strict=True):
            agent.received[lease] = end

    async def closed(self, held: EdgeLease) -> bool:
        return await self.leases.closed(held, asyncio.get_running_loop().create_future())

    async def settled(self) -> None:
        assert await self.tasks.wait(LONGEST_WAIT_S)
        assert not list(self.leases)
        assert not len(self.leases)
        assert not any(agent.granted for agent in self.agents)
        self.engine.assert_nothing_held()


@pytest.fixture
async def edge(engine: TinyEngine) -> Edge:
    return Edge(engine)


def expired() -> float:
    return REGISTRY.get_sample_value("tercet_leases_expired_total") or 0


async def test_a_lease_belongs_to_its_sequence_until_it_is_released(edge: Edge) -> None:
    held = await edge.reserve()
    assert edge.leases.of("s")
    assert await edge.leases.release(held.name) == 0
    assert not edge.leases.of("s")
    with pytest.raises(UnknownSequence, match="not held here"):
        await edge.leases.release(held.name)
    await edge.settled()


async def test_a_lease_ends_by_itself(edge: Edge) -> None:
    before = expired()
    edge.end_soon(await edge.reserve())
    await asyncio.sleep(0.05)
    assert expired() == before + 1
    assert not edge.leases.of("s")
    await edge.settled()


async def test_no_space_leaves_nothing(edge: Edge) -> None:
    with pytest.raises(NoSpace):
        await edge.reserve(length=500)
    await edge.settled()


@pytest.mark.parametrize("gate", ["before", "after"])
async def test_a_caller_that_goes_away_while_blocks_are_reserved_gets_none(edge: Edge, gate: str) -> None:
    getattr(edge.core, gate).clear()
    reserving = asyncio.ensure_future(edge.reserve())
    await asyncio.sleep(0)
    reserving.cancel()
    with suppress(asyncio.CancelledError):
        await reserving
    getattr(edge.core, gate).set()
    await edge.settled()


async def test_an_abort_while_blocks_are_reserved_wins(edge: Edge) -> None:
    edge.core.after.clear()
    reserving = asyncio.ensure_future(edge.reserve())
    await asyncio.sleep(0)
    aborting = asyncio.ensure_future(edge.leases.abort("s"))
    await asyncio.sleep(0)
    edge.core.after.set()
    with pytest.raises(LeaseEnded):
        await reserving
    assert await aborting
    await edge.settled()


async def test_a_lease_that_expires_while_blocks_are_reserved_is_over(edge: Edge) -> None:
    edge.core.after.clear()
    reserving = asyncio.ensure_future(edge.reserve(ttl=0.01))
    await asyncio.sleep(0.05)
    edge.core.after.set()
    with pytest.raises(LeaseEnded):
        await reserving
    await edge.settled()


async def test_a_release_goes_on_without_its_caller(edge: Edge) -> None:
    held = await edge.reserve()
    edge.core.before.clear()
    releasing = asyncio.ensure_future(edge.leases.release(held.name))
    await asyncio.sleep(0)
    releasing.cancel()
    with suppress(asyncio.CancelledError):
        await releasing
    edge.core.before.set()
    await edge.settled()


async def test_a_claimed_lease_is_the_requests(edge: Edge, engine: TinyEngine) -> None:
    held = await edge.reserve(length=2 * BLOCK)
    edge.received(held.name, 2 * BLOCK, 2 * BLOCK)
    edge.end_soon(held)
    claimed = edge.leases.claim("s", KeyedPrompt(tokens_of(2 * BLOCK + 5)))
    assert claimed is held
    assert await edge.closed(held)
    await asyncio.sleep(0.05)
    assert edge.core.called == ["tercet_reserve"], "its timer has no part in it any more"
    engine.add("r", tokens_of(2 * BLOCK + 5), lease=held.name, valid_end=held.closing.result())
    output, _ = engine.step()
    assert output.num_scheduled_tokens == {"r": 5}
    engine.abort("r")
    await edge.settled()


async def test_a_claimed_lease_that_no_request_adopts_is_released(edge: Edge) -> None:
    held = await edge.reserve()
    edge.leases.claim("s", KeyedPrompt(tokens_of(40)))
    edge.leases.release_soon(held)
    await edge.settled()


@pytest.mark.parametrize(("tokens", "position"), [(tokens_of(30), 30), ([9, *tokens_of(39, start=11)], 0)])
async def test_other_tokens_cannot_claim(edge: Edge, tokens: list[int], position: int) -> None:
    held = await edge.reserve()
    with pytest.raises(BadRequest, match=f"first at position {position}"):
        edge.leases.claim("s", KeyedPrompt(tokens))
    assert edge.leases.claim("t", KeyedPrompt(tokens)) is None
    await edge.leases.release(held.name)
    await edge.settled()


async def test_each_report_of_a_sender_renews_a_lease(edge: Edge) -> None:
    held = await edge.reserve(length=3 * BLOCK, ttl=30)
    first = held.timer.when()
    await asyncio.sleep(0.01)
    edge.leases.note(LeaseFilled(held.name, 0, content_of(b"", None)))
    assert held.timer.when() > first
    await edge.leases.release(held.name)
    assert held.timer.cancelled()
    await edge.settled()


async def test_an_extended_lease_is_for_more_tokens_and_renewed(edge: Edge, engine: TinyEngine) -> None:
    held = await edge.reserve(length=40, ttl=30)
    blocks, due = list(engine.agent.granted[held.name].blocks[0]), held.timer.when()
    await asyncio.sleep(0.01)
    assert await edge.leases.extend(held.name, "s", KeyedPrompt(tokens_of(100))) is held
    assert held.prompt.tokens == tokens_of(100)
    assert held.timer.when() > due
    grant = engine.agent.granted[held.name]
    assert (grant.tokens, grant.end, list(grant.blocks[0])[:3]) == (packed(tokens_of(100)), 100, blocks)
    with pytest.raises(BadRequest, match="first at position 40"):
        await edge.leases.extend(held.name, "s", KeyedPrompt(tokens_of(40)))
    with pytest.raises(BadRequest, match="cache_salt"):
        await edge.leases.extend(held.name, "s", KeyedPrompt(tokens_of(120), "salt"))
    for lease, seq_id in ((held.name, "t"), ("0" * 32, "s")):
        with pytest.raises(UnknownSequence):
            await edge.leases.extend(lease, seq_id, KeyedPrompt(tokens_of(120)))
    with pytest.raises(NoSpace):
        await edge.leases.extend(held.name, "s", KeyedPrompt(tokens_of(900)))
    assert held.prompt.tokens == tokens_of(100)
    await edge.leases.release(held.name)
    await edge.settled()


async def test_what_an_agent_does_not_open_is_not_the_leases(edge: Edge, engine: TinyEngine) -> None:
    held = await edge.reserve(length=40)
    engine.agent.fails_at = ExtendLease
    with pytest.raises(EngineError):
        await edge.leases.extend(held.name, "s", KeyedPrompt(tokens_of(100)))
    assert held.prompt.tokens == tokens_of(40)
    engine.agent.fails_at = None
    assert (await edge.leases.extend(held.name, "s", KeyedPrompt(tokens_of(100)))).prompt.tokens == tokens_of(100)
    await edge.leases.release(held.name)
    await edge.settled()


async def test_a_lease_that_ends_while_it_is_extended(edge: Edge, engine: TinyEngine) -> None:
    held = await edge.reserve(length=40)
    edge.core.after.clear()
    extending = asyncio.ensure_future(edge.leases.extend(held.name, "s", KeyedPrompt(tokens_of(100))))
    await asyncio.sleep(0)
    releasing = asyncio.ensure_future(edge.leases.release(held.name))
    await asyncio.sleep(0)
    edge.core.after.set()
    with pytest.raises(LeaseEnded):
        await extending
    await releasing
    await edge.settled()


async def test_another_salt_cannot_claim(edge: Edge) -> None:
    held = await edge.leases.reserve("s", KeyedPrompt(tokens_of(40), "mine"), 60.0, NOTIFY)
    for salt in (None, "", "yours"):
        with pytest.raises(BadRequest, match="cache_salt: differs") as raised:
            edge.leases.claim("s", KeyedPrompt(tokens_of(40), salt))
        assert raised.value.param == "cache_salt"
    assert edge.leases.claim("s", KeyedPrompt(tokens_of(40), "mine")) is held
    edge.leases.release_soon(held)
    await edge.settled()


async def test_what_every_rank_has_becomes_prefix_cache(edge: Edge, engine: TinyEngine) -> None:
    tokens = tokens_of(3 * BLOCK)
    held = await edge.reserve(length=3 * BLOCK)
    edge.leases.note(LeaseFilled(held.name, 0, content_of(packed(tokens[: 3 * BLOCK]), None)))
    assert len(edge.tasks) == 0
    edge.leases.note(LeaseFilled(held.name, 1, content_of(packed(tokens[: 2 * BLOCK]), None)))
    await edge.tasks.wait(LONGEST_WAIT_S)
    assert engine.cached(tokens) == 2 * BLOCK
    await edge.leases.release(held.name)
    edge.leases.note(LeaseFilled(held.name, 1, content_of(packed(tokens[: 3 * BLOCK]), None)))
    await edge.settled()


async def test_an_abort_of_what_has_no_lease_is_fine(edge: Edge) -> None:
    assert not await edge.leases.abort("nobody")


# ---- fences --------------------------------------------------------------------------------------------------------


async def test_the_slowest_rank_says_how_far_kv_is_valid(edge: Edge, engine: TinyEngine) -> None:
    held = await edge.reserve(length=3 * BLOCK)
    edge.received(held.name, 3 * BLOCK, 2 * BLOCK)
    assert await edge.leases.release(held.name) == 2 * BLOCK
    assert engine.cached(tokens_of(3 * BLOCK)) == 2 * BLOCK
    await edge.settled()


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_grant_that_one_rank_refuses_is_revoked_on_all(edge: Edge, rank: int) -> None:
    edge.agents[rank].fails_at = GrantLease
    with pytest.raises(EngineError, match=f"KV agent {rank}: out of memory"):
        await edge.reserve()
    await edge.settled()
    assert edge.agents[0].ended == edge.agents[1].ended
    edge.agents[rank].fails_at = None
    await edge.leases.release((await edge.reserve()).name)
    await edge.settled()


async def test_a_stopped_agent_takes_a_grant_too_late(
    edge: Edge, engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_calls, "ANSWER_SECONDS", 0.01)
    edge.agents[1].frozen = True
    with pytest.raises(EngineError, match="KV agent 1 did not answer"):
        await edge.reserve(length=2 * BLOCK)
    assert not await edge.tasks.wait(0.05)
    assert engine.free_blocks == NUM_BLOCKS - 1 - 3, "it may still open the lease, when it goes on"
    edge.agents[1].thaw()
    await edge.settled()


async def test_blocks_of_a_lease_wait_for_a_stopped_agent_and_the_engine_goes_on(
    edge: Edge, engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_timers, "RELEASE_SECONDS", 0.01)
    held = await edge.reserve(length=2 * BLOCK)
    blocks = set(engine.agent.granted[held.name].blocks[0])
    edge.agents[1].frozen = True
    with pytest.raises(EngineError, match="are freed only when"):
        await edge.leases.release(held.name)
    request = engine.add("other", tokens_of(300, start=400), max_tokens=50)
    while not request.is_finished():
        engine.step()
        if "other" in engine.scheduler.requests:
            assert blocks.isdisjoint(engine.blocks_of("other"))
    assert engine.status()["leases"] == 1
    edge.agents[1].thaw()
    await edge.settled()


async def test_a_sequence_does_without_its_lease_while_an_agent_is_stopped(
    edge: Edge, engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_timers, "ADOPT_SECONDS", 0.01)
    held = await edge.reserve(length=2 * BLOCK)
    edge.received(held.name, 2 * BLOCK, 2 * BLOCK)
    edge.agents[0].frozen = True
    assert edge.leases.claim("s", KeyedPrompt(tokens_of(40))) is held
    assert not await edge.closed(held)
    assert not await edge.tasks.wait(0.05)
    assert engine.status()["leases"] == 1
    edge.agents[0].thaw()
    await edge.tasks.wait(LONGEST_WAIT_S)
    assert engine.cached(tokens_of(2 * BLOCK)) == 2 * BLOCK, "what had arrived is not lost"
    await edge.settled()


@pytest.mark.parametrize("end", ["abort", "leave"])
async def test_a_sequence_that_is_over_while_it_waits_for_the_fence_leaves_nothing(edge: Edge, end: str) -> None:
    held = await edge.reserve()
    edge.agents[1].frozen = True
    edge.leases.claim("s", KeyedPrompt(tokens_of(40)))
    given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(edge.leases.closed(held, given_up))
    await asyncio.sleep(0.01)
    if end == "abort":
        given_up.cancel()
        assert not await waiting
    else:
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
    edge.agents[1].thaw()
    await edge.settled()


async def test_blocks_of_an_expired_lease_wait_for_a_stopped_agent(edge: Edge, engine: TinyEngine) -> None:
    edge.end_soon(await edge.reserve())
    edge.agents[0].frozen = True
    await asyncio.sleep(0.1)
    assert not edge.leases.of("s")
    assert engine.status()["leases"] == 1
    edge.agents[0].thaw()
    await edge.settled()


async def test_a_fence_that_an_agent_fails_at_is_asked_for_again(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_calls, "RETRY_SECONDS", 0.01)
    held = await edge.reserve()
    edge.agents[1].fails_at = RevokeLease
    edge.leases.release_soon(held)
    assert not await edge.tasks.wait(0.05)
    edge.agents[1].fails_at = None
    await edge.tasks.wait(LONGEST_WAIT_S)
    assert REGISTRY.get_sample_value("tercet_fences_open") == 0
    edge.leases.remove(held)
    await edge.settled()


HALF_FILLED = ["asked", "reserved", "open", "filled"]


def fill(edge: Edge, lease: str, end: int, ranks: int = 2) -> None:
    """Agents report KV of the first ``end`` tokens."""
    for rank in range(ranks):
        edge.agents[rank].received[lease] = end
        edge.leases.note(LeaseFilled(lease, rank, content_of(packed(tokens_of(end)), None)))


def lived(edge: Edge, seq_id: str = "s") -> list[str]:
    """The states of the only lease of a sequence."""
    (found,) = edge.leases.stories(seq_id)
    times = [step.seconds for step in found.steps]
    assert times == sorted(times)
    assert all(step.ledger == LIFE[step.state][0] for step in found.steps)
    return [step.state for step in found.steps]


async def test_a_lease_that_is_adopted(edge: Edge, engine: TinyEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, lease_timers.__name__)
    held = await edge.reserve(length=2 * BLOCK)
    fill(edge, held.name, 2 * BLOCK)
    claimed = edge.leases.claim("s", KeyedPrompt(tokens_of(2 * BLOCK + 5)))
    assert claimed is held
    assert await edge.closed(held)
    engine.add("r", tokens_of(2 * BLOCK + 5), lease=held.name, valid_end=held.closing.result())
    engine.step()
    edge.leases.adopted(held)  # as the verb does with the first output
    assert lived(edge) == [*HALF_FILLED, "filled", "claimed", "fenced", "adopted"]
    ledgers = [step.ledger for step in story(held)]
    assert [*dict.fromkeys(ledgers)] == ["timers", "reservations", "grants"], "all three ledgers"
    assert ledgers[-3:] == ["timers", "grants", "reservations"]
    assert story(held)[-2].cause == f"no agent writes any more; KV of {2 * BLOCK} tokens is valid"
    engine.abort("r")
    await edge.settled()
    assert not caplog.records


async def test_a_request_of_the_engines_own_api_adopts_without_a_report(edge: Edge, engine: TinyEngine) -> None:
    held = await edge.reserve(length=2 * BLOCK)
    edge.received(held.name, 2 * BLOCK, 2 * BLOCK)
    edge.leases.claim("s", KeyedPrompt(tokens_of(2 * BLOCK + 5)))
    assert await edge.closed(held)
    engine.add("r", tokens_of(2 * BLOCK + 5), lease=held.name, valid_end=2 * BLOCK)
    engine.step()
    await edge.leases.release_soon(held)  # at the end of its HTTP request
    assert lived(edge)[-3:] == ["claimed", "fenced", "adopted"]
    engine.abort("r")
    await edge.settled()


async def test_a_lease_that_expires(edge: Edge, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, lease_timers.__name__)
    held = await edge.reserve()
    edge.end_soon(held)
    await asyncio.sleep(0.05)
    await edge.settled()
    assert lived(edge) == ["asked", "reserved", "open", "ending", "fenced", "freed"]
    (logged,) = [record.getMessage() for record in caplog.records]
    assert f"lease {held.name} of s has failed" in logged
    assert "timers: ending, it expired" in logged
    assert "grants: fenced" in logged


async def test_a_lease_whose_sender_dies(edge: Edge, engine: TinyEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, lease_timers.__name__)
    held = await edge.reserve(length=3 * BLOCK)
    fill(edge, held.name, BLOCK)  # the last report of either rank: the connection broke
    edge.end_soon(held)
    await asyncio.sleep(0.05)
    await edge.settled()
    assert lived(edge) == [*HALF_FILLED, "filled", "ending", "fenced", "freed"]
    causes = {step.state: step.cause for step in story(held)}
    assert causes["filled"] == f"rank 1 has valid KV of {BLOCK} tokens"
    assert causes["freed"] == f"KV of {BLOCK} tokens stays in the prefix cache"
    assert engine.cached(tokens_of(3 * BLOCK)) == BLOCK
    assert len(caplog.records) == 1


async def test_a_lease_without_room_is_refused(edge: Edge) -> None:
    with pytest.raises(NoSpace) as raised:
        await edge.reserve(length=500)
    assert lived(edge) == ["asked", "refused"]
    assert edge.leases.stories("s")[0].steps[-1].cause == str(raised.value)
    await edge.settled()


async def test_a_lease_that_a_rank_does_not_open_fails(edge: Edge, engine: TinyEngine) -> None:
    engine.agent.fails_at = GrantLease
    with pytest.raises(EngineError):
        await edge.reserve()
    engine.agent.fails_at = None
    await edge.settled()
    assert lived(edge) == ["asked", "reserved", "ending", "fenced", "freed"]
    assert edge.leases.stories("s")[0].steps[2].cause.startswith("it could not be opened: KV agent 0")


async def test_a_caller_that_goes_away_and_an_abort(edge: Edge) -> None:
    edge.core.before.clear()
    reserving = asyncio.ensure_future(edge.reserve())
    await asyncio.sleep(0)
    reserving.cancel()
    with suppress(asyncio.CancelledError):
        await reserving
    edge.core.before.set()
    await edge.settled()
    assert lived(edge)[:2] == ["asked", "ending"]
    assert lived(edge)[-1] == "freed"
    await edge.reserve("t")
    await edge.leases.abort("t")
    assert lived(edge, "t") == ["asked", "reserved", "open", "ending", "fenced", "freed"]
    assert edge.leases.stories("t")[0].steps[3].cause == "its sequence was aborted"
    await edge.settled()


async def test_a_fence_that_is_late(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_timers, "ADOPT_SECONDS", 0.01)
    held = await edge.reserve()
    edge.agents[0].frozen = True
    edge.leases.claim("s", KeyedPrompt(tokens_of(40)))
    assert not await edge.closed(held)
    assert lived(edge)[-2:] == ["claimed", "ending"]
    edge.agents[0].thaw()
    await edge.settled()
    assert lived(edge)[-3:] == ["ending", "fenced", "freed"]


async def test_a_lease_that_grows_keeps_the_beginning_and_the_end(edge: Edge) -> None:
    held = await edge.reserve(length=BLOCK)
    for end in range(BLOCK + 1, BLOCK + 40):
        await edge.leases.extend(held.name, "s", KeyedPrompt(tokens_of(end)))
    await edge.leases.release(held.name)
    await edge.settled()
    states = lived(edge)
    assert len(states) == lease_timers.MOST_STEPS
    assert (states[:3], states[-3:]) == (["asked", "reserved", "open"], ["ending", "fenced", "freed"])
    assert story(held)[-4].cause == f"extended to {BLOCK + 39} tokens"


async def test_stories_are_bounded_and_a_report_names_no_whole_lease(edge: Edge) -> None:
    held = await edge.leases.reserve("s", KeyedPrompt(tokens_of(8)), 60.0, NOTIFY)
    report = held.story.report()
    assert len(report.lease) == 8
    assert abs(report.at - time.time()) < 60
    assert report.steps == [tuple(step) for step in story(held)]
    await edge.leases.release(held.name)
    for _ in range(lease_timers.KEPT_STORIES):
        edge.leases._stories.append(LeaseStory("f" * 32, "t", "asked for"))
    assert not edge.leases.stories("s")
    await edge.settled()


def test_what_cannot_be_is_refused_with_the_story() -> None:
    lease = LeaseStory("f" * 32, "s", "asked for")
    lease.enter("reserved", "now it has blocks")
    with pytest.raises(InvalidTransition, match=r"become freed \(at once\): 0\.000 s timers: asked, asked for; "):
        lease.enter("freed", "at once")
    assert lease.state == "reserved"


def test_no_lease_frees_or_adopts_blocks_before_its_fence() -> None:
    assert {state for state, (_, after) in LIFE.items() if after & {"adopted", "freed"}} == {"fenced"}
    assert {state for state, (_, after) in LIFE.items() if not after} == {"adopted", "freed", "refused"}
    assert {*LIFE} == {*get_args(LeaseState)}
