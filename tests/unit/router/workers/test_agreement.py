"""Every worker makes every change, in one order; who cannot is ended; who comes later catches up."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.router.workers.agreement import Agreement, Lost
from tercet.router.workers.messages import Call, Reply
from tercet.router.workers.sharing import concerns_all, together


class Worker:
    """Notes what it is asked; ``refuses`` are bodies that it does not take."""

    def __init__(self, *refuses: bytes) -> None:
        self.made: list[bytes] = []
        self.asked: list[bytes] = []
        self.refuses = set(refuses)
        self.ended = ""
        self.lost = False

    async def perform(self, call: Call) -> Reply:
        for _ in range(len(self.asked) % 3):
            await asyncio.sleep(0)
        if self.lost:
            raise Lost
        self.asked.append(call.body)
        if call.body in self.refuses:
            return Reply(400, b"{}")
        if call.changes:
            self.made.append(call.body)
        return Reply(200, call.body)

    def end(self, why: str) -> None:
        self.ended = why


def put(body: bytes) -> Call:
    return Call("PUT", "/tercet/v1/program", body)


async def joined(agreement: Agreement, *workers: Worker) -> None:
    for worker in workers:
        await agreement.join(worker)


async def test_a_change_is_made_by_all() -> None:
    agreement, a, b = Agreement(), Worker(), Worker()
    await joined(agreement, a, b)
    replies = await agreement.settle(b, put(b"x"))
    assert [reply.status for reply in replies] == [200, 200]
    assert a.made == b.made == [b"x"]


async def test_what_the_first_refuses_is_made_by_nobody() -> None:
    agreement, a, b = Agreement(), Worker(b"x"), Worker()
    await joined(agreement, a, b)
    assert [reply.status for reply in await agreement.settle(a, put(b"x"))] == [400]
    assert b.asked == []
    late = Worker()
    await agreement.join(late)
    assert late.asked == []


async def test_who_does_not_follow_is_ended() -> None:
    agreement, a, b = Agreement(), Worker(), Worker(b"x")
    await joined(agreement, a, b)
    assert len(await agreement.settle(a, put(b"x"))) == 1
    assert "400" in b.ended
    assert not a.ended


async def test_who_is_lost_does_not_hold_others_up() -> None:
    agreement, a, b = Agreement(), Worker(), Worker()
    await joined(agreement, a, b)
    b.lost = True
    assert len(await agreement.settle(a, put(b"x"))) == 1
    agreement.leave(b)
    agreement.leave(b)
    assert list(agreement.peers) == [a]
    a.lost = True
    with pytest.raises(Lost):
        await agreement.settle(a, put(b"y"))
    late = Worker()
    await agreement.join(late)
    assert late.made == [b"x"]


async def test_questions_are_no_changes() -> None:
    agreement, a, b = Agreement(), Worker(), Worker(b"")
    await joined(agreement, a, b)
    assert len(await agreement.settle(a, Call("GET", "/tercet/v1/engines"))) == 1
    assert not b.ended
    late = Worker()
    await agreement.join(late)
    assert late.asked == []


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.binary(min_size=1, max_size=2)), max_size=12), st.integers(0, 12))
async def test_all_make_the_same_changes_in_the_same_order(wishes: list[tuple[int, bytes]], late_at: int) -> None:
    agreement, workers = Agreement(), [Worker(), Worker(), Worker()]
    await joined(agreement, *workers)
    late, work = Worker(), list[Any]()
    for index, (who, body) in enumerate(wishes):
        if index == late_at:
            work.append(agreement.join(late))
        work.append(agreement.settle(workers[who], put(body)))
    await asyncio.gather(*work)
    assert workers[0].made == workers[1].made == workers[2].made
    if late_at < len(wishes):
        assert late.made == workers[0].made


def engine(name: str, in_flight: int, reachable: bool) -> dict[str, Any]:
    return {"name": name, "in_flight": in_flight, "reachable": reachable}


def test_lists_of_engines_add_up() -> None:
    lists = [[engine("a", 1, False), engine("b", 2, True)], [engine("b", 3, False), engine("a", 4, True)], []]
    found = json.loads(together([Reply(200, json.dumps(item).encode()) for item in lists]).body)
    assert found == [engine("a", 5, True), engine("b", 5, True)]


@pytest.mark.parametrize(
    ("method", "path", "common"),
    [
        ("PUT", "/tercet/v1/program", True),
        ("PUT", "/tercet/v1/scheduling", True),
        ("POST", "/tercet/v1/engines", True),
        ("DELETE", "/tercet/v1/engines/a", True),
        ("POST", "/tercet/v1/engines/a/drain", True),
        ("GET", "/tercet/v1/engines", True),
        ("GET", "/tercet/v1/program", False),
        ("POST", "/tercet/v1/migrate_context", False),
        ("POST", "/tercet/v1/programs", False),
        ("POST", "/v1/completions", False),
    ],
)
def test_what_concerns_all_workers(method: str, path: str, common: bool) -> None:
    assert concerns_all(method, path) == common
