"""A router's background tasks: an error at each await of each, such as a descriptor that is missing, and it goes on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tercet.decisions.planning import Observed
from tercet.decisions.roles import Pressures, RoleEffects, RoleFlip
from tercet.fleet import membership
from tercet.protocol.wire import JoinCall
from tercet.router.page import watch
from tercet.router.serve import sessions
from tercet.router.serve.plans import Plan
from tercet.router.state import fleet_adapters, joined_members, loaded_code, roles, shared_state
from tercet.router.state.fleet_state import StateFile
from tercet.router.state.joined_members import GoneEngines, join
from tercet.settings.fleet_settings import Objectives, SessionSettings
from tercet_lab.bench.simulated.moving_fleet import SessionCounts
from tests.longest_wait import LONGEST_WAIT_S, until
from tests.unit.fleet.test_adapters import Host, fleet_of, membership_of, report
from tests.unit.supervision import Works, kept, with_an_error_at_each_await

from .conftest import Engine, LiveRouter

SCHEDULING = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: queue-scorer
  - pluginRef: max-score-picker
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (joined_members, shared_state, membership):
        monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.002)
    monkeypatch.setattr(shared_state, "ALONE_POLL_INTERVAL_S", 0.002)


async def test_vanished_engines_are_removed(router: LiveRouter) -> None:
    router.engines["http://e"] = Engine("e")

    async def one_is_removed() -> None:
        if not any(member.name == "e" for member in router.fleet.members):
            await join(router.shared, "e", JoinCall(url="http://e", uid="1"))
        router.fleet.member("e").reachable = False
        await until(lambda: not any(member.name == "e" for member in router.fleet.members))

    def started() -> Any:
        gone = GoneEngines(asyncio.get_running_loop().time, 0.01)
        return kept(lambda: joined_members.remove_gone(router.shared, gone), one_is_removed)

    await with_an_error_at_each_await("router/state/joined_members.py:remove_gone", started)


async def test_changes_of_other_processes_are_applied(router: LiveRouter) -> None:
    file = StateFile(router.directory / "state.json")

    async def one_is_applied() -> None:
        wanted = not router.fleet.member("d").draining
        file.update(lambda state: state.with_draining("d", wanted), router.shared.state)
        await until(lambda: router.fleet.member("d").draining is wanted)

    started = partial(kept, lambda: router.shared.follow(), one_is_applied)
    await with_an_error_at_each_await("router/state/shared_state.py:SharedState.follow", started)


async def test_engines_are_polled(router: LiveRouter) -> None:
    async def one_is_found() -> None:
        router.fleet.member("d").reachable = False
        await until(lambda: router.fleet.member("d").reachable)

    started = partial(kept, lambda: router.membership.watch(), one_is_found)
    await with_an_error_at_each_await("fleet/membership.py:Membership.watch", started)


async def test_changed_programs_are_loaded(router: LiveRouter, programs: str, tmp_path: Path) -> None:
    await router.use(Plan(program=f"{programs}:good"))
    scheduling = tmp_path / "scheduling.yaml"
    scheduling.write_text(SCHEDULING)
    await router.shared.use_scheduling(str(scheduling))

    async def all_are_loaded() -> None:
        before = router.shared.state
        assert before.scheduling is not None
        for file in (Path(programs), scheduling):
            async with asyncio.timeout(LONGEST_WAIT_S):
                while (now := router.shared.state).program.number == before.program.number or (
                    file == scheduling and now.scheduling == before.scheduling
                ):
                    file.write_text(file.read_text() + "# one more line\n")
                    await asyncio.sleep(0.005)

    started = partial(kept, lambda: loaded_code.reload_on_change(router.shared, 0.002), all_are_loaded)
    await with_an_error_at_each_await("router/state/loaded_code.py:reload_on_change", started)


async def test_sessions_are_looked_at(router: LiveRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "LOOK_INTERVAL_S", 0.002)
    looks: list[int] = []

    class Counts(SessionCounts):
        def sizes(self, sessions: int, kept: int) -> None:
            looks.append(sessions)

    settings = msgspec.convert({"sessions": "on"}, SessionSettings)

    @asynccontextmanager
    async def started() -> AsyncGenerator[Works]:
        running = asyncio.create_task(sessions.Sessions(router.fleet, settings, Counts(), "test").run())

        async def works() -> None:
            before = len(looks)
            await until(lambda: len(looks) > before)

        try:
            yield works
        finally:
            running.cancel()
            await asyncio.wait({running})

    await with_an_error_at_each_await("router/serve/sessions.py:Sessions._watch", started)


async def test_roles_are_decided(router: LiveRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "INTERVAL_S", 0.002)
    flips = [RoleFlip(("d",), "prefill", "pressed"), RoleFlip(("d",), "decode", "pressed")]

    class Decides:
        def __init__(self, _: object, **__: object) -> None: ...

        def on_tick(self, observed: Observed) -> RoleEffects:
            flip = flips[router.fleet.member("d").role == "prefill"]
            return RoleEffects(observed.now, flip.reason, Pressures(1.5, 0.5), {"prefill": 1, "decode": 1}, flip=flip)

    monkeypatch.setattr("tercet.router.state.roles.RoleController", Decides)

    @asynccontextmanager
    async def started() -> AsyncGenerator[Works]:
        keeper = roles.RoleKeeper(router.shared, router.directory / "state.json", Objectives(ttft=1.0, tpot=0.1))
        running = asyncio.create_task(keeper.run())

        async def works() -> None:
            before = router.shared.state.version
            await until(lambda: router.shared.state.version > before + 1)

        try:
            yield works
        finally:
            running.cancel()
            await asyncio.wait({running})

    await with_an_error_at_each_await("router/state/roles.py:RoleKeeper._decide", started)


async def test_adapters_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_adapters, "POLL_INTERVAL_S", 0.002)
    numbers = itertools.count()

    def started() -> Any:
        fleet = fleet_of(x=Host(most=1000))
        loader = fleet_adapters.AdapterLoader(fleet, membership_of(fleet))

        async def one_is_loaded() -> None:
            name = f"a{next(numbers)}"
            fleet.adapters.declared = [report(name, path="/a")]
            await until(lambda: name in fleet.member("x").adapters)

        return kept(lambda: loader.run(), one_is_loaded)

    await with_an_error_at_each_await("router/state/fleet_adapters.py:AdapterLoader.run", started)


async def test_other_workers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "NAMES_INTERVAL_S", 0.002)

    @asynccontextmanager
    async def started() -> AsyncGenerator[Works]:
        names: list[str] = []
        read: list[str] = []

        async def named() -> list[str]:
            await asyncio.sleep(0)
            return names

        async def frames_of(name: str) -> AsyncGenerator[bytes]:
            read.append(name)
            await asyncio.Event().wait()
            yield b""

        others = watch.OtherWorkers(named, frames_of)
        others.begin()

        async def works() -> None:
            names.append(f"w{len(names)}")
            await until(lambda: names[-1] in read)

        try:
            yield works
        finally:
            others.end()

    await with_an_error_at_each_await("router/page/watch.py:OtherWorkers._find", started)
