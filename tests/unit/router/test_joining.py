"""A worker that takes another one's place does not wait for engines that are away."""

from __future__ import annotations

import asyncio

import pytest

from tercet.fleet import membership
from tercet.fleet.membership import ServedModel
from tercet.protocol import BadRequest, EngineStatus, EngineUnreachable
from tercet.protocol.addresses import TextFingerprint
from tercet.settings import EngineAddress
from tests.longest_wait import LONGEST_WAIT_S, until

from .conftest import Engine, LiveRouter, draining


async def test_engines_that_do_not_answer_are_asked_later(router: LiveRouter) -> None:
    router.engine("p").gone = True
    assert await router.membership.until_ready(0.01) == ServedModel(("m",), 1000)
    assert [member.reachable for member in router.fleet.members] == [False, True]


async def test_a_fleet_of_which_none_answers_promises_nothing(router: LiveRouter) -> None:
    for name in ("p", "d"):
        router.engine(name).gone = True
    with pytest.raises(EngineUnreachable, match="no engine"):
        await router.membership.until_ready(0.01)


async def test_where_clients_were_promised_something_nobody_waits(router: LiveRouter) -> None:
    for name in ("p", "d"):
        router.engine(name).gone = True
    assert (await router.shared.until_ready()).max_model_len == 1000
    assert [member.reachable for member in router.fleet.members] == [False, False]


async def test_an_engine_that_comes_back_as_another_model_is_not_picked(router: LiveRouter) -> None:
    router.engine("p").model = "another"
    await router.membership.look(0.01)
    assert [member.reachable for member in router.fleet.members] == [False, True]
    router.engine("p").model = "m"
    await router.membership.look(0.01)
    assert [member.reachable for member in router.fleet.members] == [True, True]


async def test_engines_that_have_become_another_models_are_told_of_as_what_they_are(router: LiveRouter) -> None:
    for name in ("p", "d"):
        router.engine(name).model = "another"
    await router.membership.look(0.01)
    why = "the engine at this URL serves the model another, and this fleet serves m"
    assert {member.refused for member in router.fleet.members} == {why}
    with pytest.raises(EngineUnreachable) as refused:
        router.fleet.health.require_answers()
    assert f"p answers, but {why}. Start engines" in refused.value.message
    router.engine("d").gone = True
    await router.membership.look(0.01)
    assert [member.refused for member in router.fleet.members] == [why, ""]
    said = router.shared.reports.refusal()
    assert said is not None
    assert f"{why}, and 1 of 2 do not answer" in said.message
    router.engine("p").gone = True
    await router.membership.ask(router.fleet.members)
    with pytest.raises(EngineUnreachable, match="no engine that may be picked answers"):
        router.fleet.health.require_answers()
    for name in ("p", "d"):
        router.engine(name).gone, router.engine(name).model = False, "m"
    await router.membership.ask(router.fleet.members)
    assert [(member.reachable, member.refused) for member in router.fleet.members] == [(True, ""), (True, "")]


OURS = TextFingerprint("words", "template")


@pytest.mark.parametrize(
    ("theirs", "is_refused"),
    [(OURS, False), (TextFingerprint("swapped", "template"), True), (TextFingerprint("words", "another"), True),
     (TextFingerprint(), False), (TextFingerprint("words"), False), (TextFingerprint("", "another"), True)],
)  # fmt: skip
async def test_an_engine_with_other_words_is_not_picked(
    router: LiveRouter, theirs: TextFingerprint, is_refused: bool
) -> None:
    router.engine("p").text, router.engine("d").text = theirs, OURS
    await router.membership.speak(OURS)
    assert [member.reachable for member in router.fleet.members] == [not is_refused, True]
    assert ("fingerprint" in router.fleet.member("p").refused) == is_refused
    router.engine("p").text = OURS
    await router.membership.ask(router.fleet.members)
    assert [member.refused for member in router.fleet.members] == ["", ""]


@pytest.mark.parametrize("ours", [TextFingerprint(), TextFingerprint("words")])
async def test_what_this_router_does_not_go_by_is_not_compared(router: LiveRouter, ours: TextFingerprint) -> None:
    for name in ("p", "d"):
        router.engine(name).text = TextFingerprint("words", "another")
    await router.membership.speak(ours)
    assert router.fleet.health.answers


async def test_a_router_whose_words_no_engine_shares_does_not_start(router: LiveRouter) -> None:
    for name in ("p", "d"):
        router.engine(name).text = TextFingerprint("swapped", "template")
    with pytest.raises(BadRequest, match="another tokenizer") as refused:
        await router.membership.speak(OURS)
    assert refused.value.param == "model"
    router.engine("p").gone = router.engine("d").gone = True
    await router.membership.speak(OURS)  # who does not answer has not said that it is another one


async def test_an_engine_with_other_words_does_not_join(router: LiveRouter) -> None:
    await router.membership.speak(OURS)
    new = router.engines["http://new"] = Engine("new")
    new.text = TextFingerprint("swapped", "template")
    with pytest.raises(BadRequest, match="another tokenizer") as refused:
        await router.membership.check(EngineAddress("new", "http://new"))
    assert refused.value.param == "url"


async def test_a_router_that_joins_holds_engines_to_what_was_promised(router: LiveRouter) -> None:
    router.membership.served_model = None
    router.engine("p").model = "another"
    await router.shared.until_ready()
    assert [member.reachable for member in router.fleet.members] == [False, True]


async def test_no_engine_holds_up_or_ends_the_watch_over_others(
    router: LiveRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "POLL_INTERVAL_S", 0.01)
    frozen, asked = router.engine("p"), 0

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
    watching = asyncio.ensure_future(router.membership.watch())
    for member in router.fleet.members:
        member.reachable = False
    await until(lambda: router.fleet.member("d").reachable)
    assert asked == 1, "its question is still open"
    monkeypatch.setattr(router.engine("d"), "status", raise_any)
    router.fleet.member("d").reachable = False
    await until(lambda: router.fleet.member("d").reachable)
    watching.cancel()
    await asyncio.wait({watching})
    assert asyncio.all_tasks() == before


async def test_a_change_asks_only_engines_that_are_away(router: LiveRouter) -> None:
    router.engine("p").gone = True  # too busy to answer in time
    router.fleet.member("d").reachable = False
    await router.shared.change(draining("d", True))
    assert [member.reachable for member in router.fleet.members] == [True, True]


@pytest.mark.parametrize("how", ["refuses", "is silent"])
async def test_a_router_begins_by_those_that_answer(
    router: LiveRouter, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(membership, "OTHERS_SECONDS", 0.05)

    async def silent() -> EngineStatus:
        await asyncio.sleep(LONGEST_WAIT_S * 10)
        raise AssertionError

    router.engine("p").gone = True
    if how == "is silent":
        monkeypatch.setattr(router.engine("p"), "status", silent)
    async with asyncio.timeout(LONGEST_WAIT_S):
        for wait in (router.membership.until_ready, router.membership.until_one_answers):
            assert await wait(LONGEST_WAIT_S * 10) == ServedModel(("m",), 1000)
    assert [member.reachable for member in router.fleet.members] == [False, True]


async def test_engines_that_answer_a_moment_later_than_the_first_count_for_the_promise(
    router: LiveRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "OTHERS_SECONDS", LONGEST_WAIT_S)
    late = router.engine("d")
    late.max_model_len, late.gone = 500, True
    asyncio.get_running_loop().call_later(0.05, setattr, late, "gone", False)
    assert await router.membership.until_ready() == ServedModel(("m",), 500)
