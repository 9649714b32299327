"""Running sequences go to another engine: clients see nothing of it, and what was taken is given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from tercet.decisions.migration import CountedMove, MovesUnderWay
from tercet.fleet import FleetView, RunningSequence, Trace
from tercet.protocol import (
    BadRequest,
    Conflict,
    EngineLoad,
    EngineUnreachable,
    LayoutMismatch,
    NoSpace,
    OutputStream,
    Request,
    Revision,
    Sent,
    TercetError,
    TransferFailed,
    UnknownEngine,
)
from tercet.router.observe.metrics import Metrics
from tercet.router.serve.moves import Rescheduler
from tercet.router.serve.plans import Plan
from tercet.router.serve.service import Service
from tercet.router.state.followers import Followers
from tercet.settings import MoveSettings, RescheduleSettings
from tests.longest_wait import LONGEST_WAIT_S

from .conftest import Engine, LiveRouter, counted

PROMPT = tuple(range(100))
TOKENS = 40
WHOLE = [PROMPT[-1] + 1 + position for position in range(TOKENS)]
HOLD = 10


@dataclass
class Client:
    """One request and what its client has got."""

    stream: OutputStream
    trace: Trace
    tokens: list[int] = field(default_factory=list[int])

    async def read(self) -> None:
        await self.stream.run(lambda output: self.tokens.extend(output.token_ids))

    async def iterate(self) -> None:
        async for output in self.stream:
            self.tokens.extend(output.token_ids)


async def turns(condition: object) -> None:
    for _ in range(2000):
        if condition():  # type: ignore[operator]
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


@asynccontextmanager
async def running(
    router: LiveRouter, program: str = "data_parallel", read: str = "read"
) -> AsyncGenerator[tuple[Client, RunningSequence]]:
    """A sequence that waits at ``d`` before its tenth token, and at ``p`` later; its client must get all in the end."""
    await router.use(Plan(program=program))
    await router.shared.change(lambda state: state.with_draining("p", True))
    router.engine("d").let(HOLD)
    router.engine("p").let(HOLD + 5)
    trace = Trace()
    request = Request(seq_id="s", prompt=PROMPT, sampling_params={"max_tokens": TOKENS})
    client = Client(router.service.run(request, trace), trace)
    task = asyncio.create_task(getattr(client, read)())
    await turns(lambda: len(client.tokens) == HOLD)
    (sequence,) = router.service.sequences
    try:
        yield client, sequence
        for engine in router.engines.values():
            engine.let(None)
        await asyncio.wait_for(task, LONGEST_WAIT_S)
        assert client.tokens == WHOLE
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, TercetError):
            await task
    assert await router.has_everything_back()
    assert len(router.service.moves.under_way) == 0


@pytest.mark.parametrize("read", ["read", "iterate"])
async def test_a_running_sequence_goes_on_at_another_engine(router: LiveRouter, read: str) -> None:
    async with running(router, read=read) as (client, sequence):
        move = await router.service.moves.move(sequence, "p", "test")
        assert (move.outcome, move.source, move.destination, move.recomputed) == ("moved", "d", "p", 0)
        assert [(stage.begin, stage.end) for stage in move.stages] == [(0, 109)]
        assert move.pause is not None
        assert sequence.engine == "p"
        assert router.engine("d").running == 0
        assert [member.in_flight for member in router.fleet.members] == [1, 0]
        assert (sequence.attempt, sequence.moves) == (0, 1)
    assert ("start_generate", 100, tuple(WHOLE[:HOLD])) in router.engine("p").calls
    assert [(event.verb, event.engine) for event in client.trace.events] == [
        ("start_generate", "d"), ("prep_recv", "p"), ("remote_send", "d"), ("start_generate", "p"), ("move", "d"),
    ]  # fmt: skip
    told = client.trace.events[-1]
    assert (told.to, told.number, told.reason, told.outcome, told.pause) == ("p", 1, "test", "moved", move.pause)


async def test_a_program_that_passes_outputs_on_by_itself_does_not_notice(router: LiveRouter, programs: str) -> None:
    async with running(router, program=f"{programs}:good") as (_, sequence):
        move = await router.service.moves.move(sequence, "p", "test")
        assert move.outcome == "moved"


def decodes_while_it_sends(monkeypatch: pytest.MonkeyPatch, source: Engine, client: Client, until: list[int]) -> None:
    """Before each of its sends is over, its client has so many tokens."""
    at_each_stage, send = iter(until), source.remote_send

    async def decode_meanwhile(*args: Any) -> Sent:
        at = next(at_each_stage)
        source.let(at)
        await turns(lambda: len(client.tokens) == at)
        return await send(*args)

    monkeypatch.setattr(source, "remote_send", decode_meanwhile)


async def test_stages_go_on_while_the_source_decodes(router: LiveRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage brings what came while the one before was on its way; the rest is computed at the destination."""
    source = router.engine("d")
    async with running(router) as (client, sequence):
        decodes_while_it_sends(monkeypatch, source, client, [HOLD + 8, HOLD + 14, HOLD + 17])
        router.engine("p").let(HOLD + 20)
        router.service.moves.settings = MoveSettings(stages=5, tail=4)
        move = await router.service.moves.move(sequence, "p", "test")
        assert [stage.end for stage in move.stages] == [len(PROMPT) + HOLD - 1 + sent for sent in (0, 8, 14)]
        assert move.recomputed == 3


async def test_what_was_sent_until_a_move_failed_is_on_record(
    router: LiveRouter, monkeypatch: pytest.MonkeyPatch, metrics: Metrics
) -> None:
    source = router.engine("d")
    send, calls = source.remote_send, 0

    async def second_portion_is_lost(*args: Any) -> Sent:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise TransferFailed("lost")
        return msgspec.structs.replace(await send(*args), bytes=64)

    monkeypatch.setattr(source, "remote_send", second_portion_is_lost)
    before = counted("tercet_moved_bytes_total")
    async with running(router) as (_, sequence):
        router.service.moves.settings = MoveSettings(portion=64)
        with pytest.raises(TransferFailed):
            await router.service.moves.move(sequence, "p", "test")
    (move,) = router.service.moves.since(0)
    assert (move.outcome, [(stage.begin, stage.end) for stage in move.stages], move.bytes) == ("failed", [(0, 64)], 64)
    assert counted("tercet_moved_bytes_total") == before + 64


async def test_the_number_of_stages_is_bounded(router: LiveRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    source = router.engine("d")
    async with running(router) as (client, sequence):
        decodes_while_it_sends(monkeypatch, source, client, [HOLD + 7, HOLD + 14, HOLD + 21])
        router.engine("p").let(HOLD + 24)
        router.service.moves.settings = MoveSettings(stages=2, tail=4)
        move = await router.service.moves.move(sequence, "p", "test")
        assert (len(move.stages), move.recomputed) == (2, 7)


async def test_a_sequence_that_waits_at_its_engine_moves_without_kv(router: LiveRouter) -> None:
    await router.use(Plan(program="data_parallel"))
    await router.shared.change(lambda state: state.with_draining("p", True))
    router.engine("d").let(0)
    client = Client(
        router.service.run(Request(seq_id="s", prompt=PROMPT, sampling_params={"max_tokens": TOKENS}), Trace()), Trace()
    )
    task = asyncio.create_task(client.read())
    await turns(lambda: "start_generate" in router.engine("d").verbs)
    (sequence,) = router.service.sequences
    move = await router.service.moves.move(sequence, "p", "test")
    assert (move.outcome, move.stages, move.pause) == ("moved", (), None)
    await asyncio.wait_for(task, LONGEST_WAIT_S)
    assert client.tokens == WHOLE
    assert "prep_recv" not in router.engine("p").verbs
    assert await router.has_everything_back()


async def test_there_and_back_again_and_again(router: LiveRouter) -> None:
    async with running(router) as (_, sequence):
        for turn in range(10):
            source, destination = ("d", "p") if turn % 2 == 0 else ("p", "d")
            router.engine(destination).let(HOLD + 1 + turn)
            move = await router.service.moves.move(sequence, destination, "test")
            assert (move.source, sequence.engine) == (source, destination)
            await turns(lambda at=HOLD + 1 + turn: len(sequence.tokens) == at)
        assert sequence.moves == 10
        assert router.engine("d").running + router.engine("p").running == 1


@pytest.mark.parametrize("verb", ["prep_recv", "remote_send"])
@pytest.mark.parametrize("error", [NoSpace("full"), EngineUnreachable("gone")])
async def test_a_move_that_fails_leaves_the_sequence_where_it_is(
    router: LiveRouter, verb: str, error: TercetError
) -> None:
    router.engine("p" if verb == "prep_recv" else "d").failures[verb] = error
    async with running(router) as (_, sequence):
        with pytest.raises(type(error)):
            await router.service.moves.move(sequence, "p", "test")
        assert (sequence.engine, sequence.attempt, sequence.moves) == ("d", 0, 0)
        (move,) = router.service.moves.since(0)
        assert (move.outcome, move.error) == ("failed", error.message)
        assert not router.engine("p").leases


async def test_a_destination_that_does_not_begin_is_tried_elsewhere(router: LiveRouter) -> None:
    router.engine("p").failures["start_generate"] = EngineUnreachable("gone")
    async with running(router) as (_, sequence):
        with pytest.raises(EngineUnreachable):
            await router.service.moves.move(sequence, "p", "test")
        router.engine("d").let(None)
        await turns(lambda: sequence.attempt == 1)


async def test_the_end_of_a_sequence_ends_its_move(router: LiveRouter) -> None:
    router.engine("p").pause.clear()
    async with running(router) as (_, sequence):
        move = asyncio.create_task(router.service.moves.move(sequence, "p", "test"))
        await turns(lambda: "prep_recv" in router.engine("p").verbs)
        router.engine("d").let(None)
        with pytest.raises(Conflict):
            await asyncio.wait_for(move, LONGEST_WAIT_S)
        (record,) = router.service.moves.since(0)
        assert record.outcome == "ended"


@pytest.mark.parametrize("verb", ["prep_recv", "remote_send", "start_generate"])
async def test_a_client_that_leaves_in_the_middle_of_a_move(router: LiveRouter, verb: str) -> None:
    await router.use(Plan(program="data_parallel"))
    await router.shared.change(lambda state: state.with_draining("p", True))
    source, destination = router.engine("d"), router.engine("p")
    source.let(HOLD)
    destination.let(HOLD)
    held = source if verb == "remote_send" else destination
    request = Request(seq_id="s", prompt=PROMPT, sampling_params={"max_tokens": TOKENS})
    client = Client(router.service.run(request, Trace()), Trace())
    task = asyncio.create_task(client.read())
    await turns(lambda: len(client.tokens) == HOLD)
    (sequence,) = router.service.sequences
    if verb != "start_generate":
        held.pause.clear()
    move = asyncio.create_task(router.service.moves.move(sequence, "p", "test"))
    await turns(lambda: verb in held.verbs)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    with pytest.raises(TercetError):
        await asyncio.wait_for(move, LONGEST_WAIT_S)
    held.pause.set()
    assert await router.has_everything_back()


async def test_who_moves_twice_at_a_time_or_to_nowhere_is_told(router: LiveRouter) -> None:
    async with running(router) as (_, sequence):
        with pytest.raises(UnknownEngine):
            await router.service.moves.move(sequence, "x", "test")
        with pytest.raises(BadRequest):
            await router.service.moves.move(sequence, "d", "test")
        router.engine("p").pause.clear()
        first = asyncio.create_task(router.service.moves.move(sequence, "p", "test"))
        await turns(lambda: "prep_recv" in router.engine("p").verbs)
        with pytest.raises(Conflict):
            await router.service.moves.move(sequence, "p", "test")
        router.engine("p").pause.set()
        assert (await first).outcome == "moved"


async def test_a_move_that_takes_too_long_ends(router: LiveRouter) -> None:
    router.service.moves.settings = MoveSettings(deadline_s=0.01)
    router.engine("p").pause.clear()
    async with running(router) as (_, sequence):
        with pytest.raises(Conflict, match="longer than"):
            await router.service.moves.move(sequence, "p", "test")
        assert sequence.engine == "d"
        router.engine("p").pause.set()


async def test_nothing_moves_to_an_engine_that_does_not_answer(router: LiveRouter) -> None:
    async with running(router) as (_, sequence):
        router.fleet.member("p").reachable = False
        with pytest.raises(EngineUnreachable, match="destination: the engine p does not answer"):
            await router.service.moves.move(sequence, "p", "test")
        assert (sequence.engine, list(router.service.moves.since(0))) == ("d", [])


async def test_an_engine_that_stood_still_already_when_it_was_to_begin_is_given_up(router: LiveRouter) -> None:
    """It was found to stand still between the last look at it and the cut-over."""
    now, liveness = router.fleet.costs.clock(), router.fleet.liveness
    async with running(router) as (_, sequence):
        liveness.heard("p", now)
        liveness.look(now, 0.5)
        liveness.heard("d", now + 6.0)
        assert [stuck.engine for stuck in liveness.look(now + 6.0, 6.0)] == ["p"]
        router.engine("p").pause.clear()
        move = asyncio.create_task(router.service.moves.move(sequence, "p", "test"))
        await turns(lambda: "prep_recv" in router.engine("p").verbs)
        assert router.fleet.health.stand_still(0.5) == [], "that is no news"
        with pytest.raises(EngineUnreachable, match="p is stuck"):
            await asyncio.wait_for(move, LONGEST_WAIT_S)
        assert not router.fleet.member("p").reachable
        router.engine("p").pause.set()


# ---- the rescheduler ---------------------------------------------------------------------------------------------


def rescheduler_of(router: LiveRouter, **settings: Any) -> Rescheduler:
    service = router.service
    return Rescheduler(router.fleet, service.sequences, service.moves, RescheduleSettings(**settings))


async def test_a_policy_that_there_is_not_is_said_at_once(router: LiveRouter) -> None:
    with pytest.raises(BadRequest, match="there is no policy 'x'"):
        rescheduler_of(router, policies=("x",))


async def test_two_routers_move_their_own_sequences_within_common_limits(router: LiveRouter, metrics: Metrics) -> None:
    """Both see the load of the whole fleet; neither needs a third that decides."""
    service, other = (
        router.service,
        Service(router.fleet, "data_parallel", {}, metrics, moves=MoveSettings(per_engine=1)),
    )
    others_file = Followers(router.directory / "state.json")
    other.moves.under_way.shared = others_file
    service.moves.settings = MoveSettings(per_engine=1)
    service.moves.under_way = MovesUnderWay(service.moves.settings, service.moves.under_way.shared)
    reschedule = RescheduleSettings(policies=("decode_load",), threshold=0.1)
    both = [Rescheduler(router.fleet, each.sequences, each.moves, reschedule) for each in (service, other)]
    try:
        async with running(router) as (_, sequence):
            client = Client(other.run(msgspec.structs.replace(sequence.request, seq_id="t"), Trace()), Trace())
            task = asyncio.create_task(client.read())
            await turns(lambda: len(client.tokens) == HOLD)
            await router.shared.change(lambda state: state.with_draining("p", False).with_role("p", "decode"))
            for member in router.fleet.members:
                member.kv_tokens = 1000
            router.fleet.report("d", EngineLoad(waiting=0, running=2, kv_usage=0.8))
            router.fleet.report("p", EngineLoad(waiting=0, running=0, kv_usage=0.1))
            router.engine("p").pause.clear()
            for each in both:
                await each.look()
            assert [len(each.moves.under_way) for each in (service, other)] == [1, 0], "one at a time between the two"
            assert len(other.moves.under_way.everywhere()) == 1
            router.engine("p").pause.set()
            await turns(lambda: [move.outcome for move in service.moves.since(0)] == ["moved"])
            await both[1].look()
            await turns(lambda: [move.outcome for move in other.moves.since(0)] == ["moved"])
            assert [move.seq_id for each in (service, other) for move in each.moves.since(0)] == ["s", "t"]
            for engine in router.engines.values():
                engine.let(None)
            await task
            assert client.tokens == WHOLE
    finally:
        others_file.close()


async def test_the_end_of_a_rescheduler_leaves_nothing_behind(router: LiveRouter) -> None:
    async with running(router):
        await router.shared.change(lambda state: state.with_draining("p", False).with_draining("d", True))
        router.engine("p").pause.clear()
        task = asyncio.create_task(rescheduler_of(router).run())
        await turns(lambda: len(router.service.moves.under_way) == 1)
        task.cancel()
        await asyncio.wait({task})
        assert len(router.service.moves.under_way) == 0
        router.engine("p").pause.set()


async def test_a_drained_engine_is_emptied(router: LiveRouter) -> None:
    rescheduler = rescheduler_of(router)
    async with running(router) as (_, sequence):
        await rescheduler.look()
        assert len(router.service.moves.under_way) == 0
        await router.shared.change(lambda state: state.with_draining("p", False).with_draining("d", True))
        await rescheduler.look()
        await turns(lambda: [move.outcome for move in router.service.moves.since(0)] == ["moved"])
        assert sequence.engine == "p"
        (move,) = router.service.moves.since(0)
        assert move.reason == "drain"


async def test_an_engine_that_says_that_it_stops_is_emptied_and_taken_again_once_it_is_another(
    router: LiveRouter,
) -> None:
    rescheduler = rescheduler_of(router)
    stopping = EngineLoad(waiting=0, running=1, kv_usage=0.1, stopping=True)
    async with running(router) as (_, sequence):
        await router.shared.change(lambda state: state.with_draining("p", False))
        router.fleet.report("d", stopping)
        with FleetView(router.fleet).pick() as engine:
            assert engine.name == "p"
        await rescheduler.look()
        await turns(lambda: sequence.engine == "p")
        await turns(lambda: [move.reason for move in router.service.moves.since(0)] == ["drain"])
        assert not router.fleet.member("d").draining, "that is its operator's to say"
        router.fleet.health.restarted("d")
        with FleetView(router.fleet).pick() as one, FleetView(router.fleet).pick() as other:
            assert {one.name, other.name} == {"d", "p"}


async def test_with_nobody_else_a_drained_engine_finishes_its_own(router: LiveRouter) -> None:
    rescheduler = rescheduler_of(router)
    async with running(router):
        await router.shared.change(lambda state: state.with_draining("d", True))
        await rescheduler.look()
        assert not router.service.moves.since(0)


async def test_nothing_moves_between_engines_that_exchange_no_kv(router: LiveRouter) -> None:
    rescheduler = rescheduler_of(router)
    router.fleet.member("d").revision = Revision("0.3.0", "0.32.0", "weights")
    router.fleet.member("p").revision = Revision("0.3.0", "0.33.0", "weights")
    async with running(router) as (_, sequence):
        with pytest.raises(LayoutMismatch, match=r"d and p must not exchange KV: their versions of vLLM differ"):
            await router.service.moves.move(sequence, "p", "test")
        await router.shared.change(lambda state: state.with_draining("p", False).with_draining("d", True))
        await rescheduler.look()
        assert (sequence.engine, router.engine("p").verbs) == ("d", [])
        assert not router.service.moves.since(0)


async def test_a_drained_engine_is_emptied_within_the_limits(router: LiveRouter) -> None:
    await router.use(Plan(program="data_parallel"))
    await router.shared.change(lambda state: state.with_draining("p", True))
    router.engine("d").let(HOLD)
    requests = [Request(seq_id=f"s{n}", prompt=PROMPT, sampling_params={"max_tokens": TOKENS}) for n in range(6)]
    clients = [Client(router.service.run(request, Trace()), Trace()) for request in requests]
    tasks = [asyncio.create_task(client.read()) for client in clients]
    await turns(lambda: all(len(client.tokens) == HOLD for client in clients))
    await router.shared.change(lambda state: state.with_draining("p", False).with_draining("d", True))
    router.engine("p").pause.clear()
    rescheduler = rescheduler_of(router)
    await rescheduler.look()
    assert len(router.service.moves.under_way) == router.service.moves.settings.per_engine == 2
    router.engine("p").pause.set()
    for done in (2, 4, 6):
        await turns(lambda done=done: sum(move.outcome == "moved" for move in router.service.moves.since(0)) == done)
        await rescheduler.look()
    await asyncio.gather(*tasks)
    assert [client.tokens for client in clients] == [WHOLE] * 6
    assert await router.has_everything_back()


async def test_moves_are_asked_for_and_shown_by_http(router: LiveRouter) -> None:
    async with running(router), router.client() as client:
        answer = await client.post("/sequences/s/move", json={"destination": "p"})
        assert (answer.status_code, answer.json()["outcome"], answer.json()["number"]) == (200, "moved", 1)
        assert (await client.get("/moves")).json() == [answer.json()]
        assert (await client.get("/moves?since=1")).json() == []
        refusals = [
            await client.post("/sequences/x/move", json={"destination": "p"}),
            await client.post("/sequences/s/move", json={"destination": "x"}),
            await client.post("/sequences/s/move", json={"to": "p"}),
            await client.get("/moves?since=-1"),
            await client.get(f"/moves?since={'9' * 5000}"),
        ]
        assert [answer.status_code for answer in refusals] == [404, 404, 400, 400, 400]
        assert (await client.get("/contexts")).json() == []  # without warm start
        assert (await client.get("/contexts?since=x")).status_code == 400


async def test_sequences_leave_prefill_engines_after_their_first_token(router: LiveRouter) -> None:
    """Llumnix's disaggregation: requests are dispatched to prefill engines only, and move once they have a token."""
    await router.use(Plan(program="data_parallel", args={"role": "prefill"}))
    router.engine("p").let(0)
    router.engine("d").let(HOLD)
    rescheduler = rescheduler_of(router, policies=("prefill_to_decode",))
    client = Client(
        router.service.run(Request(seq_id="s", prompt=PROMPT, sampling_params={"max_tokens": TOKENS}), Trace()), Trace()
    )
    task = asyncio.create_task(client.read())
    await turns(lambda: "start_generate" in router.engine("p").verbs)
    await rescheduler.look()
    assert not router.service.moves.since(0)
    router.engine("p").let(1)
    await turns(lambda: len(client.tokens) == 1)
    await rescheduler.look()
    await turns(lambda: len(client.tokens) == HOLD)
    (move,) = router.service.moves.since(0)
    assert (move.source, move.destination, move.reason) == ("p", "d", "prefill_to_decode")
    router.engine("d").let(None)
    await task
    assert client.tokens == WHOLE
    assert await router.has_everything_back()


async def test_loads_are_balanced_by_what_engines_report(router: LiveRouter) -> None:
    rescheduler = rescheduler_of(router, policies=("decode_load",), threshold=0.1)
    async with running(router) as (_, sequence):
        await router.shared.change(lambda state: state.with_draining("p", False).with_role("p", "decode"))
        for member in router.fleet.members:
            member.kv_tokens = 1000
        await rescheduler.look()
        assert not router.service.moves.since(0), "nobody has reported anything"
        router.fleet.report("d", EngineLoad(waiting=0, running=1, kv_usage=0.4))
        router.fleet.report("p", EngineLoad(waiting=0, running=0, kv_usage=0.1))
        await rescheduler.look()
        await turns(lambda: sequence.engine == "p")
        await turns(lambda: [move.outcome for move in router.service.moves.since(0)] == ["moved"])
        router.fleet.report("p", EngineLoad(waiting=0, running=1, kv_usage=0.9))
        await rescheduler.look()
        assert len(list(router.service.moves.since(0))) == 1, "what was just moved is left alone for a while"


async def test_an_engine_without_progress_is_emptied_before_it_is_given_up(router: LiveRouter) -> None:
    rescheduler = rescheduler_of(router, stale_after_s=0.5)
    async with running(router) as (_, sequence):
        await router.shared.change(lambda state: state.with_draining("p", False))
        now = router.fleet.costs.clock()
        router.fleet.liveness.heard("d", now, stalled_s=0.4)
        router.fleet.liveness.heard("p", now)
        assert router.fleet.liveness.look(now, 0.5) == []
        await rescheduler.look()
        assert not router.service.moves.since(0)
        router.fleet.liveness.heard("d", now, stalled_s=1.0)
        await rescheduler.look()
        assert not router.service.moves.since(0), "it had shown progress, whatever it says now"
        router.fleet.liveness.look(now + 0.5, 0.5)
        await rescheduler.look()
        await turns(lambda: [move.outcome for move in router.service.moves.since(0)] == ["moved"])
        (move,) = router.service.moves.since(0)
        assert (sequence.engine, move.reason) == ("p", "failover")


async def test_limits_hold_for_all_processes_of_a_router_together(router: LiveRouter, metrics: Metrics) -> None:
    followers = Followers(router.directory / "state.json")
    elsewhere = MovesUnderWay(MoveSettings(), followers)
    try:
        async with running(router) as (_, sequence):
            await router.shared.change(lambda state: state.with_draining("p", False).with_draining("d", True))
            with elsewhere.counted(CountedMove("x", "p", 10)), elsewhere.counted(CountedMove("y", "p", 10)):
                with pytest.raises(NoSpace, match="2 sequences move to p, and at most 2 may"):
                    await router.service.moves.move(sequence, "p", "asked")
                rescheduler = rescheduler_of(router)
                await rescheduler.look()
                assert metrics._moves_held_back._value.get() == 1
            assert not list(router.service.moves.since(0)), "what never began is not on record"
            await rescheduler.look()
            await turns(lambda: [move.outcome for move in router.service.moves.since(0)] == ["moved"])
        with ExitStack() as stack:
            for source in ("x", "y"):
                stack.enter_context(elsewhere.counted(CountedMove(source, "p", 10)))
            with pytest.raises(NoSpace):
                stack.enter_context(elsewhere.counted(CountedMove("z", "p", 10)))
        assert elsewhere.everywhere() == []
    finally:
        followers.close()


async def test_the_moves_of_a_process_that_has_ended_count_no_more(router: LiveRouter) -> None:
    followers = Followers(router.directory / "state.json")
    followers.announce([CountedMove("x", "p", 10)] * 2)
    assert len(router.service.moves.under_way.everywhere()) == 2
    followers.close()
    assert router.service.moves.under_way.everywhere() == []
