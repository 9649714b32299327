"""A worker that takes another one's place does not wait for engines that are away."""

from __future__ import annotations

import asyncio

import pytest

from tercet.fleet import membership
from tercet.fleet.membership import Promise
from tercet.protocol import EngineStatus, EngineUnreachable

from .conftest import Door, draining


async def test_engines_that_do_not_answer_are_asked_later(door: Door) -> None:
    door.engine("p").gone = True
    assert await door.membership.until_ready(0.01) == Promise(("m",), 1000)
    assert [member.reachable for member in door.fleet.members] == [False, True]


async def test_a_fleet_of_which_none_answers_promises_nothing(door: Door) -> None:
    for name in ("p", "d"):
        door.engine(name).gone = True
    with pytest.raises(EngineUnreachable, match="no engine"):
        await door.membership.until_ready(0.01)


async def test_where_clients_were_promised_something_nobody_waits(door: Door) -> None:
    for name in ("p", "d"):
        door.engine(name).gone = True
    assert (await door.shared.until_ready()).max_model_len == 1000
    assert [member.reachable for member in door.fleet.members] == [False, False]


async def test_an_engine_that_comes_back_as_another_model_is_not_picked(door: Door) -> None:
    door.engine("p").model = "another"
    await door.membership.look(0.01)
    assert [member.reachable for member in door.fleet.members] == [False, True]
    door.engine("p").model = "m"
    await door.membership.look(0.01)
    assert [member.reachable for member in door.fleet.members] == [True, True]


async def test_a_front_door_that_joins_holds_engines_to_what_was_promised(door: Door) -> None:
    door.membership.promise = None
    door.engine("p").model = "another"
    await door.shared.until_ready()
    assert [member.reachable for member in door.fleet.members] == [False, True]


async def test_no_engine_holds_up_or_ends_the_watch_over_others(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LOOK_SECONDS", 0.01)
    frozen, asked = door.engine("p"), 0

    async def freeze() -> EngineStatus:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()
        raise AssertionError

    async def raise_any() -> EngineStatus:
        monkeypatch.undo()
        raise RuntimeError("Session is closed")

    monkeypatch.setattr(frozen, "status", freeze)
    before = asyncio.all_tasks()
    watching = asyncio.ensure_future(door.membership.watch())
    for member in door.fleet.members:
        member.reachable = False
    async with asyncio.timeout(5):
        while not door.fleet.member("d").reachable:
            await asyncio.sleep(0.01)
    assert asked == 1, "its question is still open"
    monkeypatch.setattr(door.engine("d"), "status", raise_any)
    door.fleet.member("d").reachable = False
    async with asyncio.timeout(5):
        while not door.fleet.member("d").reachable:
            await asyncio.sleep(0.01)
    watching.cancel()
    await asyncio.wait({watching})
    assert asyncio.all_tasks() == before


async def test_a_change_asks_only_engines_that_are_away(door: Door) -> None:
    door.engine("p").gone = True  # too busy to answer in time
    door.fleet.member("d").reachable = False
    await door.shared.change(draining("d", True))
    assert [member.reachable for member in door.fleet.members] == [True, True]
