"""A move is stopped at each turn of the event loop, from either side; and programs that catch whatever comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tercet.fleet import RunningSequence, Trace
from tercet.protocol import EngineUnreachable, Request, TercetError
from tercet.router.serve.plans import Plan
from tests.longest_wait import LONGEST_WAIT_S

from .conftest import LiveRouter
from .test_moves import HOLD, PROMPT, TOKENS, WHOLE, Client, running, turns

# More than a move takes from its beginning to the first output at the destination.
MOST_TURNS = 40


@asynccontextmanager
async def held(router: LiveRouter, number: int) -> AsyncGenerator[tuple[Client, RunningSequence, asyncio.Task[None]]]:
    """A sequence that waits at ``d`` before its tenth token, and at ``p`` a little later."""
    router.engine("d").let(HOLD)
    router.engine("p").let(HOLD + 5)
    request = Request(seq_id=f"s{number}", prompt=PROMPT, sampling_params={"max_tokens": TOKENS})
    client = Client(router.service.run(request, Trace()), Trace())
    task = asyncio.create_task(client.read())
    await turns(lambda: len(client.tokens) == HOLD)
    (sequence,) = router.service.sequences
    try:
        yield client, sequence, task
    finally:
        let_go(router)
        task.cancel()
        await asyncio.wait([task])
    assert await router.has_everything_back()
    assert (len(router.service.sequences), len(router.service.moves.under_way)) == (0, 0)


@asynccontextmanager
async def moving(
    router: LiveRouter, number: int
) -> AsyncGenerator[tuple[Client, RunningSequence, asyncio.Task[None], asyncio.Task[Any]]]:
    """The same, ``number`` turns after a move of it to ``p`` has been asked for."""
    async with held(router, number) as (client, sequence, task):
        move = asyncio.create_task(router.service.moves.move(sequence, "p", "test"))
        await after(number)
        yield client, sequence, task, move


def let_go(router: LiveRouter) -> None:
    for engine in router.engines.values():
        engine.let(None)


async def runs_to_its_end(router: LiveRouter, task: asyncio.Task[None]) -> None:
    let_go(router)
    await asyncio.wait_for(task, LONGEST_WAIT_S)


async def prepare(router: LiveRouter) -> None:
    await router.use(Plan(program="data_parallel"))
    await router.shared.change(lambda state: state.with_draining("p", True))


async def after(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def outcome_of(move: asyncio.Task[Any]) -> str:
    with suppress(TercetError, asyncio.CancelledError):
        return (await asyncio.wait_for(move, LONGEST_WAIT_S)).outcome
    return "not moved"


async def test_the_client_leaves_at_each_turn(router: LiveRouter) -> None:
    await prepare(router)
    outcomes = set[str]()
    for number in range(MOST_TURNS):
        async with moving(router, number) as (client, _, task, move):
            task.cancel()
            await asyncio.wait([task])
            outcomes.add(await outcome_of(move))
            assert client.tokens == WHOLE[: len(client.tokens)]
    assert outcomes == {"moved", "not moved"}


async def test_whoever_asked_for_the_move_leaves_at_each_turn(router: LiveRouter) -> None:
    """The sequence goes on, here or there; nothing of the move is left."""
    await prepare(router)
    engines = set[str]()
    for number in range(MOST_TURNS):
        async with moving(router, number) as (client, sequence, task, move):
            move.cancel()
            await asyncio.wait([move])
            await runs_to_its_end(router, task)
            assert client.tokens == WHOLE
            assert sequence.attempt == 0, "a move spends no retry"
            engines.add(sequence.engine)
    assert engines == {"p", "d"}


async def test_the_sequence_ends_at_each_turn(router: LiveRouter) -> None:
    await prepare(router)
    outcomes = set[str]()
    for number in range(MOST_TURNS):
        async with moving(router, number) as (client, sequence, task, move):
            await runs_to_its_end(router, task)
            outcomes.add(await outcome_of(move))
            assert client.tokens == WHOLE
            assert sequence.attempt == 0
    assert outcomes == {"moved", "not moved"}


@pytest.mark.parametrize("verb", ["prep_recv", "remote_send"])
async def test_either_engine_fails_at_each_turn_of_its_verb(router: LiveRouter, verb: str) -> None:
    """An engine that fails before the cut-over leaves the sequence where it is."""
    await prepare(router)
    failing = router.engine("p" if verb == "prep_recv" else "d")
    for number in range(12):
        async with moving(router, number) as (client, sequence, task, move):
            failing.failures[verb] = EngineUnreachable("gone")
            outcome = await outcome_of(move)
            failing.failures.clear()
            assert sequence.engine == ("p" if outcome == "moved" else "d")
            await runs_to_its_end(router, task)
            assert client.tokens == WHOLE


CATCHING = """
from tercet.protocol import Output

async def around_its_yield(request, fleet):
    with fleet.pick("decode") as engine:
        try:
            yield engine.start_generate(request)
        except GeneratorExit:
            raise
        except BaseException:
            yield Output((666,), "stop")

async def silently(request, fleet):
    with fleet.pick("decode") as engine:
        try:
            yield engine.start_generate(request)
        except BaseException:
            return

async def around_its_loop(request, fleet):
    with fleet.pick("decode") as engine:
        try:
            async for output in engine.start_generate(request):
                try:
                    yield output
                except BaseException:
                    pass
        except BaseException:
            yield Output((666,), "stop")

async def around_each_step(request, fleet):
    with fleet.pick("decode") as engine:
        stream = engine.start_generate(request)
        while True:
            try:
                output = await anext(stream, None)
            except BaseException:
                continue
            if output is None:
                return
            yield output

async def by_a_timeout_of_its_own(request, fleet):
    import asyncio
    with fleet.pick("decode") as engine:
        try:
            async with asyncio.timeout(60):
                async for output in engine.start_generate(request):
                    yield output
        except Exception:
            yield Output((666,), "stop")
"""


@pytest.mark.parametrize(
    "program", ["around_its_yield", "silently", "around_its_loop", "around_each_step", "by_a_timeout_of_its_own"]
)
async def test_a_program_that_catches_everything_does_not_notice_moves(
    router: LiveRouter, tmp_path: Path, program: str
) -> None:
    """Nothing is raised where it waits, so there is nothing to swallow; the counts of its pick go along."""
    (tmp_path / "catching.py").write_text(CATCHING)
    async with running(router, program=f"{tmp_path / 'catching.py'}:{program}") as (_, sequence):
        for turn in range(6):
            destination, other = ("p", "d") if turn % 2 == 0 else ("d", "p")
            router.engine(destination).let(HOLD + 1 + turn)
            move = await router.service.moves.move(sequence, destination, "test")
            assert move.outcome == "moved"
            assert {member.name: member.in_flight for member in router.fleet.members} == {destination: 1, other: 0}
            await turns(lambda at=HOLD + 1 + turn: len(sequence.tokens) == at)
        assert (sequence.attempt, sequence.moves) == (0, 6)
    assert router.service.routing.failures == {}
