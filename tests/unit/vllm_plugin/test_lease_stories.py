"""The story of a lease: its life across the ledgers of time, blocks and the fence, and no step that cannot be."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import get_args

import pytest

from tercet.engine import lease_timers
from tercet.engine.interface import KeyedPrompt
from tercet.engine.lease_timers import InvalidTransition, LeaseStory, story
from tercet.engine.leases import LIFE, LeaseState
from tercet.protocol import EngineError, NoSpace, content_of, packed
from tercet.transport import GrantLease, LeaseFilled

from .test_lease_timers import NOTIFY, Edge
from .tiny_engine import BLOCK, TinyEngine, tokens_of

HALF_FILLED = ["asked", "reserved", "open", "filled"]


@pytest.fixture
async def edge(engine: TinyEngine) -> Edge:
    return Edge(engine)


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
