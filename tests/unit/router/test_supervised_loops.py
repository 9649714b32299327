"""A router's background tasks: an error at each await of each, such as a descriptor that is missing, and it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tercet.fleet import membership
from tercet.protocol.wire import JoinCall
from tercet.router import joined_members, reload, shared_state
from tercet.router.fleet_state import StateFile
from tercet.router.joined_members import GoneEngines, join, remove_gone
from tercet.router.routing import Plan
from tests.longest_wait import LONGEST_WAIT_S
from tests.unit.aio.test_supervision import soon, with_an_error_at_each_await

from .conftest import Engine, LiveRouter

__all__ = ["soon"]
AWAITS = 4


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONGEST_WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (joined_members, shared_state, membership):
        monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.002)
    monkeypatch.setattr(shared_state, "ALONE_POLL_INTERVAL_S", 0.002)


async def test_vanished_engines_are_removed(router: LiveRouter) -> None:
    router.engines["http://e"] = Engine("e")
    gone = GoneEngines(asyncio.get_running_loop().time, 0.01)

    def is_there() -> bool:
        return any(member.name == "e" for member in router.fleet.members)

    async def vanish() -> None:
        await join(router.shared, "e", JoinCall(url="http://e", uid="1"))
        router.fleet.member("e").reachable = False

    async def is_removed() -> None:
        if not is_there():
            await vanish()
        await until(lambda: not is_there())

    await with_an_error_at_each_await(partial(remove_gone, router.shared, gone), is_removed, 8, vanish)


async def test_changes_of_other_processes_are_applied(router: LiveRouter) -> None:
    file = StateFile(router.directory / "state.json")

    async def one_is_applied() -> None:
        wanted = not router.fleet.member("d").draining
        file.update(lambda state: state.with_draining("d", wanted), router.shared.state)
        await until(lambda: router.fleet.member("d").draining is wanted)

    await with_an_error_at_each_await(router.shared.follow, one_is_applied, AWAITS)


async def test_engines_are_polled(router: LiveRouter) -> None:
    async def one_is_found() -> None:
        router.fleet.member("d").reachable = False
        await until(lambda: router.fleet.member("d").reachable)

    await with_an_error_at_each_await(router.membership.watch, one_is_found, AWAITS)


async def test_changed_programs_are_loaded(router: LiveRouter, programs: str) -> None:
    await router.use(Plan(program=f"{programs}:good"))

    async def one_is_loaded() -> None:
        before = router.shared.state.program.number
        file, lines = Path(programs), 0
        async with asyncio.timeout(LONGEST_WAIT_S):
            while router.shared.state.program.number == before:
                lines += 1
                file.write_text(file.read_text() + f"# {lines}\n")
                await asyncio.sleep(0.02)

    await with_an_error_at_each_await(partial(reload.reload_on_change, router.shared, 0.002), one_is_loaded, 2)
