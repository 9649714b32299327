"""Sending a plan: who waits for whom, what carries over between turns, that no request is lost; and what is seen of a
point while it is measured.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from tercet_bench import traffic
from tercet_bench.bench_config import SECRET_HEADERS
from tercet_bench.openai_client import Client, Clock
from tercet_bench.traffic import LiveProgress, Style, Traffic, compose
from tercet_lab.bench.results import command_line, machine, summarize, versions
from tercet_lab.bench.workloads import Conversation, ConversationTurn
from tercet_lab.bench.workloads.conversations import HashedWords
from tercet_lab.tables import RequestRow
from tests.longest_wait import until
from tests.unit.bench.openai_server import MODEL, FakeServer

WORDS = HashedWords()


class Counting:
    """An observer that only counts."""

    def __init__(self) -> None:
        self.told: Counter[str] = Counter()

    def __call__(self, record: RequestRow | None) -> None:
        self.told["due" if record is None else "ok" if record.ok else "failed"] += 1


def talks(count: int, turns: int = 1, think: float = 0.0) -> list[Conversation]:
    return [
        Conversation(
            tuple(ConversationTurn((number, turn, 7), 3, think if turn else 0.0) for turn in range(turns)),
            group=f"{number}",
        )
        for number in range(count)
    ]


def style_of(server: FakeServer, **more: Any) -> Style:
    return Style(server.url, MODEL, WORDS, **more)


class Run:
    """One run of a plan, and what its observer was told."""

    def __init__(self, plan: Sequence[Conversation], style: Style, warmups: int = 0) -> None:
        self._composers = compose(style, plan, warmups)
        self.seen = Counting()
        self.traffic: Traffic | None = None

    async def records(self, due: Sequence[float] | None = None, concurrency: int | None = None) -> list[RequestRow]:
        async with Client(Clock(), 20.0) as client:
            self.traffic = Traffic(client, self._composers, due, concurrency, self.seen)
            return await self.traffic.run()

    def interrupt(self) -> None:
        assert self.traffic is not None
        self.traffic.interrupt()


@pytest.mark.slow
async def test_an_open_loop_sends_when_due_however_slow_the_target_is(server: FakeServer) -> None:
    server.behave = {"gap": 0.2}
    found = await Run(talks(5), style_of(server)).records([0.02 * i for i in range(5)])
    assert [record.id for record in found] == list(range(5))
    assert all(record.ok and record.sent >= record.scheduled for record in found)
    assert server.most_at_once == 5


async def test_a_cap_on_requests_in_flight_delays_the_send_and_not_the_schedule(server: FakeServer) -> None:
    server.behave = {"gap": 0.03}
    found = await Run(talks(4), style_of(server)).records([0.0] * 4, concurrency=1)
    assert server.most_at_once == 1
    assert {record.scheduled for record in found} == {0.0}
    by_send = sorted(found, key=lambda record: record.sent)
    assert all(later.sent >= earlier.ended for earlier, later in pairwise(by_send))
    found_summary = summarize(found)
    assert found_summary.ttft is not None
    assert found_summary.ttft_scheduled is not None
    assert found_summary.ttft_scheduled.max > found_summary.ttft.max


async def test_a_closed_loop_keeps_its_number_of_users(server: FakeServer) -> None:
    server.behave = {"gap": 0.02}
    found = await Run(talks(9), style_of(server)).records(concurrency=3)
    assert (len(found), server.most_at_once) == (9, 3)
    for place, record in enumerate(found[3:], start=3):  # due when a slot is free: all but two before it are over
        assert sum(other.ended <= record.scheduled for other in found) >= place - 2


async def test_a_turn_carries_on_what_was_said_and_waits_for_its_user(server: FakeServer) -> None:
    found = await Run(talks(1, turns=3, think=0.05), style_of(server)).records([0.0])
    prompts = [body["prompt"] for body in server.bodies]
    answer = WORDS.encode("w0 w1 w2")
    assert prompts == [[0, 0, 7], [0, 0, 7, *answer, 0, 1, 7], [0, 0, 7, *answer, 0, 1, 7, *answer, 0, 2, 7]]
    assert [record.input_tokens for record in found] == [record.planned_input for record in found] == [3, 9, 15]
    assert all(later.scheduled == earlier.ended + 0.05 for earlier, later in pairwise(found))


async def test_a_turn_uses_the_ids_that_the_target_tells(server: FakeServer) -> None:
    server.behave = {"at_once": 3}
    await Run(talks(1, turns=2), style_of(server)).records([0.0])
    assert server.bodies[0]["return_token_ids"] is True
    assert server.bodies[1]["prompt"] == [0, 0, 7, 0, 1, 2, 0, 1, 7]


async def test_salts_headers_and_warm_up(server: FakeServer) -> None:
    style = style_of(server, cache_salt="s", headers={"x-tercet-program": "p"}, extra={"temperature": 1.0})
    found = await Run(talks(3), style, warmups=2).records([0.0, 0.0, 0.0])
    assert [record.warmup for record in found] == [True, True, False]
    assert summarize(found).completed == 1
    assert {(body["cache_salt"], body["temperature"]) for body in server.bodies} == {("s", 1.0)}
    assert {headers["x-tercet-program"] for headers in server.headers} == {"p"}


async def test_turns_after_one_that_failed_count_as_failures(server: FakeServer) -> None:
    server.behave = {"status": 503}
    run = Run(talks(2, turns=3), style_of(server))
    found = await run.records([0.0, 0.0])
    assert [record.failure for record in found] == ["http", "unsent", "unsent"] * 2
    assert (summarize(found).failed, run.seen.told["failed"]) == (6, 6)


@pytest.mark.parametrize("how", [{"cut": 1}, {"error": 1}, {"silent": True}, {"status": 400}])
async def test_every_request_that_fails_is_there(server: FakeServer, how: dict[str, Any]) -> None:
    server.behave = how
    found = summarize(await Run(talks(6), style_of(server)).records([0.0] * 6, concurrency=2))
    assert (found.completed, found.failed, sum(found.errors.values())) == (0, 6, 6)


@pytest.mark.parametrize("concurrency", [None, 2])
async def test_an_interrupt_ends_what_is_under_way_and_loses_nothing_that_was_due(
    server: FakeServer, concurrency: int | None
) -> None:
    server.behave = {"hang": 1}
    run = Run(talks(5), style_of(server))
    running = asyncio.create_task(run.records([0.0, 0.0, 0.0, 0.0, 1e6], concurrency))
    await server.hung.wait()
    run.interrupt()
    found = await running
    assert [record.failure for record in found] == ["interrupted"] * 4
    assert run.seen.told == {"due": 4, "failed": 4}
    assert summarize(found).interrupted == 4


async def test_an_interrupt_before_the_first_step_of_a_request_that_is_due_loses_it_not(server: FakeServer) -> None:
    server.behave = {"hang": 0}
    run = Run(talks(3), style_of(server))
    running = asyncio.create_task(run.records([0.0] * 3))
    while not (run.traffic and run.traffic._tasks):
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # the dispatcher has made its tasks, and none of them has begun
    run.interrupt()
    found = await running
    assert len(found) == run.seen.told["due"] == 3


async def test_users_of_a_closed_loop_stop_when_interrupted(server: FakeServer) -> None:
    server.behave = {"hang": 1}
    run = Run(talks(9), style_of(server))
    running = asyncio.create_task(run.records(concurrency=2))
    await server.hung.wait()
    run.interrupt()
    assert len(await running) == len(server.bodies) <= 2


async def test_an_interrupt_before_the_start_sends_nothing(server: FakeServer) -> None:
    async with Client(Clock(), 20.0) as client:
        traffic = Traffic(client, compose(style_of(server), talks(2)), [0.0, 0.0], None, Counting())
        traffic.interrupt()
        assert await traffic.run() == []
    assert server.bodies == []


async def test_a_mistake_of_ours_is_raised(server: FakeServer) -> None:
    class Broken(Counting):
        def __call__(self, record: RequestRow | None) -> None:
            if record is not None:
                raise ZeroDivisionError

    async with Client(Clock(), 20.0) as client:
        traffic = Traffic(client, compose(style_of(server), talks(3)), [0.0, 0.0, 1e6], None, Broken())
        with pytest.raises(ZeroDivisionError):
            await traffic.run()


class Terminal(io.StringIO):
    """Text that was written to a terminal."""

    def isatty(self) -> bool:
        return True


def record(index: int, *, fine: bool = True) -> RequestRow:
    told = {"first_token": 0.25, "output_tokens": 11} if fine else {"failure": "http"}
    return RequestRow(id=index, scheduled=0.0, sent=0.0, ended=0.45, **told)  # type: ignore[arg-type]


def test_a_line_has_the_live_numbers() -> None:
    seen = LiveProgress("dp", 10, io.StringIO())
    assert re.fullmatch(r"dp: 0/10, 0 in flight, 0 tokens/s, \d+ s", seen.line())
    for _ in range(4):
        seen(None)
    seen(record(0))
    seen(record(1, fine=False))
    assert re.fullmatch(r"dp: 2/10, 2 in flight, 1 failed, \d+ tokens/s, \d+ s", seen.line())


async def test_a_terminal_has_a_line_that_is_rewritten_and_goes_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "TERMINAL_SECONDS", 0.01)
    out = Terminal()
    async with LiveProgress("dp", 2, out) as seen:
        seen(None)
        seen(record(0))
        await until(lambda: "\r\x1b[Kdp: 1/2" in out.getvalue())
    assert "\n" not in out.getvalue()
    assert out.getvalue().endswith("\r\x1b[K")


async def test_a_file_has_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "PLAIN_SECONDS", 0.01)
    out = io.StringIO()
    async with LiveProgress("dp", 2, out):
        await until(lambda: "dp: 0/2" in out.getvalue())
    assert "\x1b" not in out.getvalue()


async def test_a_reader_that_is_gone_is_no_reason_to_stop() -> None:
    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    async with LiveProgress("dp", 2, Gone()) as seen:
        seen(record(0))
    assert "1/2" in seen.line()


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        (["--header", "Authorization=Bearer x"], ["--header", "Authorization=..."]),
        (["--header=api-key=x=y"], ["--header=api-key=..."]),
        (["--header", "x-tercet-program=p"], ["--header", "x-tercet-program=p"]),
    ],
)
def test_the_command_is_kept_without_its_secrets(typed: list[str], kept: list[str]) -> None:
    assert command_line(["bench", *typed], SECRET_HEADERS) == ("bench", *kept)


def test_software_and_machine_are_told() -> None:
    assert {"tercet", "python", "aiohttp", "numpy", "uvloop"} <= versions().keys()
    told = machine()
    assert told["cores"] == os.cpu_count()
    assert told["cpu"]
