"""Long bodies: one of each client is prepared at a time, a client's others wait, and the loop takes one at a time."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
from contextlib import ExitStack, suppress
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import pytest

from tercet.fleet.admission import ClientLeft
from tercet.protocol import BadRequest, Saturated
from tercet.router import request_bodies
from tercet.router.request_bodies import (
    LONG_BYTES,
    LONG_ITEMS,
    BodiesHeld,
    BodyTurn,
    LongBodies,
    is_long,
    is_short,
    require_few_items,
    require_readable,
    require_small_structures,
)
from tercet.settings import Limits
from tercet.wire.serving.server_access import read_whole


@pytest.fixture
def refused() -> list[str]:
    return []


@pytest.fixture
def bodies(refused: list[str]) -> LongBodies:
    return LongBodies(Limits(long_queued=2, queue_timeout_s=5.0), refused.append)


def never() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


async def wanted(bodies: LongBodies, client: str) -> asyncio.Task[BodyTurn]:
    task = asyncio.create_task(bodies.turn(client, never))
    await asyncio.sleep(0)
    return task


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"x" * LONG_BYTES, True),
        (b"x" * (LONG_BYTES - 1), False),
        (b"{" * (LONG_ITEMS // 2) + b"[" * (LONG_ITEMS // 2), True),
        (b"{" * (LONG_ITEMS - 1), False),
        (b",5" * (16 * LONG_ITEMS), True),
        (b"", False),
    ],
)
def test_what_is_long(content: bytes, expected: bool) -> None:
    assert is_long(content) is expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"x" * (LONG_BYTES // 8 - 1), True),
        (b"x" * (LONG_BYTES // 8), False),
        (b"{" * (LONG_ITEMS // 8 - 1), True),
        (b"[" * (LONG_ITEMS // 8), False),
        (b",5" * (2 * LONG_ITEMS), False),
        (b"", True),
    ],
)
def test_what_is_short(content: bytes, expected: bool) -> None:
    assert is_short(content) is expected


async def test_a_client_has_one_in_work_and_others_have_theirs(bodies: LongBodies) -> None:
    first = await bodies.turn("a", never)
    second, other = await wanted(bodies, "a"), await wanted(bodies, "b")
    assert (await other) is not first
    assert not second.done()
    first.end()
    (await second).end()
    other.result().end()
    assert len(bodies) == 0


async def test_a_turn_ends_once(bodies: LongBodies) -> None:
    first = await bodies.turn("a", never)
    second, third = await wanted(bodies, "a"), await wanted(bodies, "a")
    first.end()
    first.end()
    await second
    await asyncio.sleep(0)
    assert not third.done()
    second.result().end()
    (await third).end()


async def test_beyond_the_queue_it_is_429_and_for_that_client_alone(bodies: LongBodies, refused: list[str]) -> None:
    turn = await bodies.turn("a", never)
    waiting = [await wanted(bodies, "a") for _ in range(2)]
    with pytest.raises(Saturated, match=r"limit \(max-long-queued\)") as error:
        await bodies.turn("a", never)
    assert error.value.retry_after
    assert refused == ["long_queue_full"]
    (await bodies.turn("b", never)).end()
    turn.end()
    for each in waiting:
        (await each).end()
    assert len(bodies) == 0


async def test_one_that_waits_for_too_long_is_429(refused: list[str]) -> None:
    bodies = LongBodies(Limits(long_queued=2, queue_timeout_s=0.01), refused.append)
    turn = await bodies.turn("a", never)
    with pytest.raises(Saturated, match=r"0\.01 s"):
        await bodies.turn("a", never)
    assert refused == ["long_queue_timeout"]
    turn.end()
    assert len(bodies) == 0


async def test_a_client_that_leaves_while_it_waits_waits_no_longer(bodies: LongBodies) -> None:
    turn, left = await bodies.turn("a", never), never()
    waiting = asyncio.create_task(bodies.turn("a", lambda: left))
    await asyncio.sleep(0)
    left.set_result(None)
    with pytest.raises(ClientLeft):
        await waiting
    turn.end()
    assert len(bodies) == 0


@pytest.mark.parametrize("steps", range(4))
async def test_a_turn_that_is_cancelled_as_it_comes_goes_to_the_next(bodies: LongBodies, steps: int) -> None:
    turn = await bodies.turn("a", never)
    cancelled, last = await wanted(bodies, "a"), await wanted(bodies, "a")
    turn.end()
    for _ in range(steps):
        await asyncio.sleep(0)
    if cancelled.done():
        cancelled.result().end()
    cancelled.cancel()
    (await asyncio.wait_for(last, 1)).end()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert len(bodies) == 0


async def test_the_loop_takes_one_long_body_at_a_time(bodies: LongBodies) -> None:
    """Everything else that is ready runs between two of them."""
    order: list[str] = []

    async def prepare(name: str) -> None:
        await bodies.alone("a")
        order.append(name)

    async def stream() -> None:
        while len(order) < 9:
            order.append("token")
            await asyncio.sleep(0)

    await asyncio.gather(*(prepare(name) for name in "abcd"), stream())
    long = [at for at, each in enumerate(order) if each != "token"]
    assert [order[at] for at in long] == list("abcd")
    assert all(after - before > 1 for before, after in itertools.pairwise(long))


async def test_clients_take_turns_at_the_loop(bodies: LongBodies) -> None:
    order: list[str] = []

    async def prepare(client: str) -> None:
        await bodies.alone(client)
        order.append(client)

    await asyncio.gather(*(prepare(client) for client in "aaaaabbc"))
    assert order == list("aabcabaa")


async def test_one_that_is_cancelled_before_it_is_alone_holds_up_nobody(bodies: LongBodies) -> None:
    await bodies.alone("a")
    waiting = [asyncio.create_task(bodies.alone("a")) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.wait_for(asyncio.gather(*waiting[1:]), 1)
    await asyncio.wait_for(bodies.alone("a"), 1)


# Bodies of clients who have not come in yet: small ones pass, and the largest makes room.


async def test_the_largest_body_makes_room_while_it_waits() -> None:
    bodies = BodiesHeld(1000)
    with bodies.one() as large, bodies.one() as small:
        large.add(800)
        ended: list[str] = []

        async def wait() -> None:
            try:
                async with large.until_let_go():
                    await asyncio.Event().wait()
            except Saturated as error:
                ended.append(error.message)

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        for _ in range(3):
            small.add(100)
        await waiting
        assert "1000 bytes" in ended[0]
        assert (bodies.size, len(bodies)) == (300, 1)
        with pytest.raises(Saturated):
            large.add(1)
        with pytest.raises(Saturated):
            async with large.until_let_go():
                pass
        assert bodies.size == 300
    assert (bodies.size, len(bodies)) == (0, 0)


async def test_a_body_that_is_the_largest_itself_is_refused() -> None:
    bodies = BodiesHeld(1000)
    with bodies.one() as first, bodies.one() as second:
        first.add(400)
        second.add(500)
        with pytest.raises(Saturated) as refused:
            second.add(200)
        assert refused.value.retry_after
        first.add(600)
    assert (bodies.size, len(bodies)) == (0, 0)


async def test_bodies_without_bytes_are_not_counted() -> None:
    bodies = BodiesHeld(10)
    with bodies.one():
        assert (bodies.size, len(bodies)) == (0, 0)


class Piece(bytes):
    """Says when it is gone."""

    gone = 0

    def __del__(self) -> None:
        Piece.gone += 1


async def test_bytes_of_a_body_that_is_let_go_are_gone_at_once() -> None:
    """What is raised refers to where it was raised, and to itself: only a full collection would find it."""
    bodies, Piece.gone = BodiesHeld(1000), 0
    gc.collect()
    gc.disable()

    async def receive() -> dict[str, object]:
        if received:
            await asyncio.Event().wait()
        received.append(True)
        return {"type": "http.request", "body": Piece(900), "more_body": True}

    async def read() -> None:
        with suppress(Saturated), bodies.one() as body:
            async with body.until_let_go():
                await read_whole(receive, "", 10_000, "this", body)

    received: list[bool] = []
    try:
        reading = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        with bodies.one() as other:
            other.add(500)
            await reading
        assert Piece.gone == 1
    finally:
        gc.enable()


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGESIZE


@pytest.mark.parametrize("sizes", [(1,), (70_000,), (300_000,), (5_000_000, 200_000)])
async def test_a_body_is_what_its_pieces_were(sizes: tuple[int, ...]) -> None:
    bodies = BodiesHeld(100_000_000)
    for size in sizes:
        expected = bytes(range(256)) * (size // 256 + 1)
        with bodies.one() as body:
            for begin in range(0, len(expected), 65_521):
                body.take(expected[begin : begin + 65_521])
            assert bodies.size == body.size == len(expected)
            body.end()
            assert body.content == expected
            assert bodies.size == len(expected)
            body.forget()
            assert (body.content, bodies.size, len(bodies)) == (b"", 0, 0)


async def test_unfinished_bodies_take_the_memory_of_their_limit_and_give_it_back() -> None:
    """Measured in pages of the process: between pieces of dropped bodies lie objects that stay."""
    bodies, between, most = BodiesHeld(32 * 2**20), list[bytes](), 0
    before = resident()
    with ExitStack() as held:
        begun = [held.enter_context(bodies.one()) for _ in range(14)]
        for _ in range(240):
            for body in [*begun]:
                try:
                    body.take(bytes(64 * 1024))
                except Saturated:
                    begun.remove(body)
                between.append(bytes(600))
            most = max(most, resident() - before)
            assert bodies.size <= 32 * 2**20
    assert len(begun) < 5
    assert most < 48 * 2**20
    assert resident() - before < 16 * 2**20


# What makes a body long for the event loop is bounded, whichever field it is in; long texts are not.

TURN = {"role": "user", "content": "x"}
PART = {"type": "text", "text": "x"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MOST = 64


async def asked(path: str, value: Any) -> None:
    await require_few_items(path, json.dumps(value).encode(), value, MOST)


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/chat/completions", {"messages": [TURN] * 65}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [PART] * 65}]}, "messages"),
        ("/v1/chat/completions", {"messages": [TURN], "tools": [CALL] * 40}, "tools"),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [CALL] * 40}]}, "messages"),
        ("/v1/chat/completions", {"response_format": {"schema": {str(n): {} for n in range(65)}}}, "response_format"),
        ("/v1/completions", {"structured_outputs": {"choice": ["x"] * 200}}, "structured_outputs"),
        ("/v1/completions", {"stop": ["x"] * 200}, "stop"),
        ("/v1/completions", {"prompt": list(range(10_000))}, "prompt"),
        ("/v1/completions", {"prompt": [[1, 2]] * 60 + [[1] * 7000]}, "prompt"),
        ("/v1/completions", {"allowed_token_ids": [1.5] * 2100}, "allowed_token_ids"),
        ("/v1/completions", {"stop_token_ids": [5] * 130}, "stop_token_ids"),
        ("/detokenize", {"tokens": [5] * 2100}, "tokens"),
        ("/v1/completions", {"logit_bias": {str(n): 1 for n in range(200)}}, "logit_bias"),
        ("/v1/messages", {"system": [PART] * 65}, "system"),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": {}}] * 40}, "tools"),
        ("/v1/responses", {"input": [TURN] * 9}, "input"),
        ("/v1/responses", {"input": "x", "tools": [{}] * 3}, "tools"),
        ("/tokenize", {"messages": [TURN] * 65}, "messages"),
        ("/v1/chat/completions", {"nobody_reads_this": [[]] * 65}, "nobody_reads_this"),
    ],
)
async def test_too_many_are_refused_by_their_field(path: str, fields: Any, named: str) -> None:
    with pytest.raises(BadRequest, match="max-request-items") as refused:
        await asked(path, fields)
    assert refused.value.param == named


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": list(range(6000))}),
        ("/v1/completions", {"prompt": "1, " * 10_000, "allowed_token_ids": [5] * 2000}),
        ("/v1/completions", {"prompt": "[{" * 1000}),
        ("/v1/completions", {"prompt": '"a": ' * 1000}),
        ("/v1/chat/completions", {"messages": [TURN] * 60}),
        ("/v1/responses", {"input": [TURN] * 4, "tools": [{}] * 2}),
    ],
)
async def test_long_texts_and_token_ids_are_no_items(path: str, fields: Any) -> None:
    await asked(path, fields)


def test_what_takes_too_long_to_read_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_bodies, "MOST_SEPARATORS", 100)
    require_readable(json.dumps(list(range(90))).encode())
    with pytest.raises(BadRequest, match="100 values"):
        require_readable(json.dumps(list(range(110))).encode())


SCHEMA = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(2000)}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"structured_outputs": {"choice": ["x"] * 6000}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "x" * 1_000_000}}, "structured_outputs.regex"),
        (
            {"sampling_params": {"structured_outputs": {"regex": "x" * 1_000_000}}},
            "sampling_params.structured_outputs.regex",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "response_format"),
        ({"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "text.format"),
        ({"output_config": {"format": {"schema": SCHEMA}}}, "output_config.format"),
    ],
)
async def test_structures_are_refused_before_anybody_reads_all_of_them(fields: Any, named: str) -> None:
    with pytest.raises(BadRequest) as refused:
        await require_small_structures(json.dumps(fields).encode(), fields)
    assert refused.value.param == named
    assert refused.value.message.startswith(named)


async def test_structures_that_are_none_are_not_looked_at() -> None:
    for fields in ({}, {"structured_outputs": 7, "response_format": "x", "text": []}, {"text": {"format": None}}):
        await require_small_structures(b"{}", fields)
