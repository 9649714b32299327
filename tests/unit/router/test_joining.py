"""A worker that takes another one's place does not wait for engines that are away."""

from __future__ import annotations

import asyncio

import pytest

from tercet.fleet import membership
from tercet.fleet.membership import Promise
from tercet.protocol import BadRequest, EngineStatus, EngineUnreachable
from tercet.protocol.types import TextFingerprint
from tercet.settings import EngineAddress

from .conftest import Door, Engine, draining


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


async def test_engines_that_have_become_another_models_are_told_of_as_what_they_are(door: Door) -> None:
    for name in ("p", "d"):
        door.engine(name).model = "another"
    await door.membership.look(0.01)
    why = "the engine there serves the model another, and this fleet serves m"
    assert {member.refused for member in door.fleet.members} == {why}
    with pytest.raises(EngineUnreachable) as refused:
        door.fleet.require_answers()
    assert f"p answers, but {why}. Put engines" in refused.value.message
    door.engine("d").gone = True
    await door.membership.look(0.01)
    assert [member.refused for member in door.fleet.members] == [why, ""]
    said = door.shared.refusal()
    assert said is not None
    assert f"{why}, and 1 of 2 do not answer" in said.message
    door.engine("p").gone = True
    await door.membership.ask(door.fleet.members)
    with pytest.raises(EngineUnreachable, match="no engine that may be picked answers"):
        door.fleet.require_answers()
    for name in ("p", "d"):
        door.engine(name).gone, door.engine(name).model = False, "m"
    await door.membership.ask(door.fleet.members)
    assert [(member.reachable, member.refused) for member in door.fleet.members] == [(True, ""), (True, "")]


OURS = TextFingerprint("words", "template")


@pytest.mark.parametrize(
    ("theirs", "is_refused"),
    [(OURS, False), (TextFingerprint("swapped", "template"), True), (TextFingerprint("words", "another"), True),
     (TextFingerprint(), False), (TextFingerprint("words"), False), (TextFingerprint("", "another"), True)],
)  # fmt: skip
async def test_an_engine_with_other_words_is_not_picked(door: Door, theirs: TextFingerprint, is_refused: bool) -> None:
    door.engine("p").text, door.engine("d").text = theirs, OURS
    await door.membership.speak(OURS)
    assert [member.reachable for member in door.fleet.members] == [not is_refused, True]
    assert ("fingerprint" in door.fleet.member("p").refused) == is_refused
    door.engine("p").text = OURS
    await door.membership.ask(door.fleet.members)
    assert [member.refused for member in door.fleet.members] == ["", ""]


@pytest.mark.parametrize("ours", [TextFingerprint(), TextFingerprint("words")])
async def test_what_this_front_door_does_not_go_by_is_not_compared(door: Door, ours: TextFingerprint) -> None:
    for name in ("p", "d"):
        door.engine(name).text = TextFingerprint("words", "another")
    await door.membership.speak(ours)
    assert door.fleet.answers


async def test_a_front_door_whose_words_no_engine_shares_does_not_start(door: Door) -> None:
    for name in ("p", "d"):
        door.engine(name).text = TextFingerprint("swapped", "template")
    with pytest.raises(BadRequest, match="another tokenizer") as refused:
        await door.membership.speak(OURS)
    assert refused.value.param == "model"
    door.engine("p").gone = door.engine("d").gone = True
    await door.membership.speak(OURS)  # who does not answer has not said that it is another one


async def test_an_engine_with_other_words_does_not_join(door: Door) -> None:
    await door.membership.speak(OURS)
    new = door.engines["http://new"] = Engine("new")
    new.text = TextFingerprint("swapped", "template")
    with pytest.raises(BadRequest, match="another tokenizer") as refused:
        await door.membership.check(EngineAddress("new", "http://new"))
    assert refused.value.param == "url"


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
