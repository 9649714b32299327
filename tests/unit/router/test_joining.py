"""A worker that takes another one's place does not wait for engines that are away."""

from __future__ import annotations

import pytest

from tercet.fleet.membership import Promise
from tercet.protocol import EngineUnreachable

from .conftest import Door


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
