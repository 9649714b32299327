"""A fleet becomes what is wanted: by an operator's state, or as another router lists it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from tercet.fleet import EngineFleet
from tercet.fleet.members import MemberState
from tercet.fleet.membership import Membership
from tercet.protocol import Engine, Role
from tercet.settings import EngineAddress
from tests.unit.fakes import FakeEngine


def wanted(name: str, url: str, role: Role = "both", draining: bool = False) -> MemberState:
    return MemberState(EngineAddress(name, url, role), draining)


async def test_members_come_and_go_and_change_as_is_wanted() -> None:
    fleet, opened, closed = EngineFleet(()), list[str](), list[str]()

    @asynccontextmanager
    async def connect(name: str, url: str, _: Any) -> AsyncGenerator[Engine]:
        opened.append(url)
        yield FakeEngine(name)
        closed.append(url)

    def state() -> list[tuple[str, str, str, bool, bool]]:
        return sorted((each.name, each.url, each.role, each.draining, each.reachable) for each in fleet.members)

    async with Membership(fleet, connect) as members:
        new = await members.become([wanted("a", "http://a"), wanted("b", "http://b")])
        assert [each.name for each in new] == ["a", "b"]
        assert state() == [("a", "http://a", "both", False, False), ("b", "http://b", "both", False, False)]
        fleet.member("b").reachable = True
        new = await members.become([wanted("a", "http://other"), wanted("b", "http://b", "decode", draining=True)])
        assert [each.url for each in new] == ["http://other"]
        assert state() == [("a", "http://other", "both", False, False), ("b", "http://b", "decode", True, True)]
        assert await members.become([]) == []
        assert state() == []
    assert (opened, sorted(closed)) == (["http://a", "http://b", "http://other"], sorted(opened))
