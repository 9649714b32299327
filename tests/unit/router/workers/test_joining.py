"""A worker that takes another one's place does not wait for engines that are away."""

from __future__ import annotations

import pytest

from tercet.protocol import EngineUnreachable

from ..conftest import Door


async def test_engines_that_do_not_answer_are_asked_later(door: Door) -> None:
    door.engine("p").gone = True
    assert await door.membership.until_some_ready(0.01) == 1000
    assert [member.reachable for member in door.fleet.members] == [False, True]


async def test_a_fleet_of_which_none_answers_is_none(door: Door) -> None:
    for name in ("p", "d"):
        door.engine(name).gone = True
    with pytest.raises(EngineUnreachable, match="no engine"):
        await door.membership.until_some_ready(0.01)
