"""Routers that share a state: what one decides all apply, and who cannot says so."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tercet.aio.files import FileThread
from tercet.fleet import EngineFleet
from tercet.fleet.membership import Membership
from tercet.protocol import BadRequest, Conflict, EngineLoad, EngineUnreachable
from tercet.router.observe.metrics import Metrics
from tercet.router.serve.plans import Plan
from tercet.router.serve.service import Service
from tercet.router.state import followers
from tercet.router.state.fleet_state import FleetState
from tercet.router.state.shared_state import SharedState
from tercet.settings import EngineAddress
from tests.longest_wait import until

from .conftest import Engine, LiveRouter, draining


class Other:
    """A second router over the same engines, that follows the same file."""

    def __init__(self, router: LiveRouter, metrics: Metrics) -> None:
        self.fleet = EngineFleet(())
        self.membership = Membership(self.fleet, router._connect)
        self.service = Service(self.fleet, "disaggregated", {}, metrics, return_after=3)
        self.shared = SharedState(router.directory / "state.json", self.membership, self.service)

    @property
    def program(self) -> tuple[int, str | None]:
        return self.service.routing.current.number, self.service.routing.current.plan.program


@asynccontextmanager
async def joined(router: LiveRouter, metrics: Metrics) -> AsyncGenerator[Other]:
    other = Other(router, metrics)
    async with other.membership:
        await other.shared.start(router.shared.state)
        other.membership.served_model = await other.shared.until_ready()
        await other.shared.serving()
        following = asyncio.ensure_future(other.shared.follow())
        try:
            yield other
        finally:
            following.cancel()
            await asyncio.wait({following})
            other.shared.close()


@pytest.fixture
async def other(router: LiveRouter, metrics: Metrics) -> AsyncIterator[Other]:
    async with joined(router, metrics) as other:
        yield other


async def test_a_change_is_made_by_all_before_it_is_answered(router: LiveRouter, other: Other, programs: str) -> None:
    router.engines["http://late"] = Engine("late")
    await router.use(Plan(program=f"{programs}:good"))
    assert other.program == (2, f"{programs}:good")
    assert await router.shared.add(EngineAddress("late", "http://late", "decode", {"zone": "a"})) == []
    late = other.fleet.member("late")
    assert (late.role, late.labels, late.reachable) == ("decode", {"zone": "a"}, True)
    assert await router.shared.change(draining("late", True)) == []
    assert await router.shared.change(lambda state: state.with_role("late", "both")) == []
    assert (late.draining, late.role) == (True, "both")
    assert await router.shared.change(lambda state: state.without_member("late")) == []
    assert [member.name for member in other.fleet.members] == ["p", "d"]


async def test_what_one_refuses_nobody_does(router: LiveRouter, other: Other) -> None:
    before = router.shared.state
    with pytest.raises(BadRequest, match="nowhere"):
        await router.use(Plan(program="nowhere"))
    router.engines["http://gone"] = Engine("gone")
    router.engine("gone").gone = True
    with pytest.raises(EngineUnreachable):
        await router.shared.add(EngineAddress("gone", "http://gone"))
    with pytest.raises(Conflict):
        await router.shared.add(EngineAddress("p", "http://x"))
    with pytest.raises(BadRequest):
        await router.shared.use_scheduling("/nowhere.yaml")
    assert router.shared.state is before
    assert other.shared.state == before


async def test_who_comes_late_reads_one_state(
    router: LiveRouter, metrics: Metrics, programs: str, tmp_path: Path
) -> None:
    (tmp_path / "s.yaml").write_text("plugins: []\nschedulingProfiles: [{name: mine}]\n")
    for name in ("good", "marked", "good"):
        await router.use(Plan(program=f"{programs}:{name}"))
    await router.shared.use_scheduling(str(tmp_path / "s.yaml"))
    await router.shared.change(draining("d", True))
    async with joined(router, metrics) as late:
        assert late.program == (4, f"{programs}:good")
        assert late.service.routing.previous is not None
        assert late.service.routing.previous.number == 3, "to return to"
        assert list(late.fleet.scheduling.profiles) == ["mine"]
        assert [member.draining for member in late.fleet.members] == [False, True]


async def test_an_engine_that_is_away_is_no_reason_not_to_join(router: LiveRouter, metrics: Metrics) -> None:
    router.engine("d").gone = True
    async with joined(router, metrics) as late:
        assert [member.reachable for member in late.fleet.members] == [True, False]
        assert late.membership.served_model == router.membership.served_model


async def test_a_state_that_cannot_be_applied_leaves_the_last_good_one_and_is_said(
    router: LiveRouter, other: Other, programs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await router.use(Plan(program=f"{programs}:good"))

    async def refuse(_: Plan) -> None:
        raise BadRequest("program: it does not load here", "program")

    monkeypatch.setattr(other.service, "load", refuse)
    said = await router.shared.use_program(Plan(program=f"{programs}:marked"))
    assert len(said) == 1
    assert "it does not load here" in said[0]
    assert other.program == (2, f"{programs}:good")
    monkeypatch.undo()
    assert await router.shared.use_program(Plan(program=f"{programs}:marked")) == []
    assert other.program == (4, f"{programs}:marked")


async def test_who_does_not_follow_is_named(router: LiveRouter, other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "FOLLOW_SECONDS", 0.2)

    async def hang(*_: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(other.shared, "_apply", hang)
    (said,) = await router.shared.change(draining("d", True))
    # It has begun with the version, and says so once it is done with it.
    assert "has not applied the change within" in said


async def test_garbage_in_the_file_changes_nothing(
    router: LiveRouter, other: Other, caplog: pytest.LogCaptureFixture
) -> None:
    file = router.directory / "state.json"
    whole, before = file.read_text(), other.shared.state
    file.write_text(whole[: len(whole) // 2])
    await until(lambda: "is not the state of a fleet" in caplog.text)
    assert other.shared.state is before
    with pytest.raises(BadRequest, match="is not the state of a fleet"):
        await router.shared.change(draining("d", True))
    file.write_text(whole)
    assert await router.shared.change(draining("d", True)) == []
    assert other.fleet.member("d").draining


async def test_sequences_of_all_are_counted(router: LiveRouter, other: Other) -> None:
    router.fleet.member("d").in_flight, other.fleet.member("d").in_flight = 2, 3
    await until(lambda: router.shared.reports.engines()["d"].in_flight == 5)
    async with router.client() as client:
        found = {engine["name"]: engine for engine in (await client.get("/engines")).json()}
    assert found["d"]["in_flight"] == 5
    router.fleet.member("d").in_flight = other.fleet.member("d").in_flight = 0


@pytest.mark.parametrize("who", ["router", "other"])
async def test_an_engine_that_one_of_them_finds_dead_is_shown_dead_by_all(
    router: LiveRouter, other: Other, who: str
) -> None:
    for fleet in (router.fleet, other.fleet):
        fleet.report("p", EngineLoad(waiting=3, running=2, kv_usage=0.5))
    (router if who == "router" else other).fleet.member("p").reachable = False
    await until(lambda: not router.shared.reports.engines()["p"].reachable)
    async with router.client() as client:
        found = {engine["name"]: engine for engine in (await client.get("/engines")).json()}
    assert (found["p"]["reachable"], found["p"]["report"]) == (False, None)
    assert found["d"]["reachable"]


async def test_those_who_have_not_followed_are_in_the_answer(
    router: LiveRouter, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_: Plan) -> None:
        raise BadRequest("program: not here,\r\nsays\x00 K\u00f6ln \u2713", "program")

    monkeypatch.setattr(other.service, "load", refuse)
    async with router.client() as client:
        answer = await client.put("/program", json={"program": "data_parallel"})
    assert answer.status_code == 200
    assert answer.headers["x-tercet-behind"].endswith(r"not here, says K\xf6ln \u2713"), "one line of ascii"


async def test_the_file_is_for_people_too(router: LiveRouter) -> None:
    await router.shared.change(draining("d", True))
    found = json.loads((router.directory / "state.json").read_text())
    assert (found["version"], found["members"][1]["draining"]) == (3, True)


@pytest.mark.slow
async def test_reports_that_cannot_be_written_end_nothing(
    router: LiveRouter, other: Other, caplog: pytest.LogCaptureFixture
) -> None:
    directory = router.directory / "state.json.followers"
    shutil.rmtree(directory)
    directory.write_text("in the way")
    assert await router.shared.change(draining("d", True)) == []
    await until(lambda: other.fleet.member("d").draining)
    await until(lambda: caplog.text.count("cannot write this process's report") >= 2)
    await asyncio.sleep(0.3)
    assert caplog.text.count("cannot write this process's report") == 2, "each of both says it once"
    directory.unlink()
    await until(lambda: len(router.shared._followers.others()) == 1)
    assert await router.shared.change(draining("d", False)) == []
    assert not other.fleet.member("d").draining


async def test_a_change_whose_client_has_gone_is_made_to_its_end(
    router: LiveRouter, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()
    apply = router.shared._apply_members

    async def wait(state: FleetState, from_scratch: bool) -> None:
        reached.set()
        await go_on.wait()
        await apply(state, from_scratch)

    monkeypatch.setattr(router.shared, "_apply_members", wait)
    request = asyncio.ensure_future(router.shared.change(draining("d", True)))
    await reached.wait()
    assert router.shared.reports.own().version == router.shared.state.version, "not applied yet"
    request.cancel()
    await asyncio.wait({request})
    go_on.set()
    await until(lambda: router.fleet.member("d").draining and other.fleet.member("d").draining)
    assert router.shared.state.version == router.shared.reports.own().version == 3


async def test_a_state_that_is_gone_is_written_again(router: LiveRouter, other: Other) -> None:
    await router.shared.change(draining("d", True))
    before, file = other.shared.state, router.directory / "state.json"
    file.unlink()
    await until(lambda: file.exists())
    assert json.loads(file.read_text())["version"] == before.version
    assert await router.shared.change(draining("d", False)) == []
    assert (other.shared.state.version, other.fleet.member("d").draining) == (before.version + 1, False)


@pytest.mark.slow
@pytest.mark.parametrize("edited", [False, True])
async def test_an_old_state_that_is_put_back_is_followed_as_a_new_one(
    router: LiveRouter, other: Other, edited: bool
) -> None:
    file = router.directory / "state.json"
    old = file.read_text()
    await router.use(Plan(program="data_parallel"))
    await router.shared.change(draining("d", True))
    if edited:
        old = (
            file.read_text().replace('"draining": true', '"draining": false').replace("data_parallel", "disaggregated")
        )
    file.write_text(old)
    following = asyncio.ensure_future(router.shared.follow())
    await until(lambda: not (router.fleet.member("d").draining or other.fleet.member("d").draining))
    following.cancel()
    assert json.loads(file.read_text())["version"] == router.shared.state.version == other.shared.state.version == 5
    assert other.program == (3, "disaggregated")
    assert router.service.routing.current.plan.program == "disaggregated"
    assert await router.shared.change(draining("d", True)) == []
    assert (other.shared.state.version, other.fleet.member("d").draining) == (6, True)


async def test_the_commands_own_programs_are_not_returned_to_where_the_state_has_others(
    router: LiveRouter, metrics: Metrics, programs: str
) -> None:
    for name in ("good", "marked"):
        await router.use(Plan(program=f"{programs}:{name}"))
    async with joined(router, metrics) as late:
        routing = late.service.routing
        assert routing.previous is not None
        assert routing.previous.number == 2
        routing.failed(late.service.routing.choose({}, "", 0.0), "")
        assert [version.number for version in routing._before] == [2]


@pytest.mark.parametrize("content", [None, "def broken(", "raise RuntimeError('no')"])
@pytest.mark.parametrize("is_before_there", [True, False])
async def test_a_router_starts_without_the_file_of_its_stored_program(
    router: LiveRouter,
    metrics: Metrics,
    programs: str,
    caplog: pytest.LogCaptureFixture,
    content: str | None,
    is_before_there: bool,
) -> None:
    lost = Path(programs).with_name("lost.py")
    shutil.copy(programs, lost)
    before = f"{programs if is_before_there else lost}:marked"
    await router.use(Plan(program=before))
    await router.use(Plan(program=f"{lost}:good"))
    lost.unlink() if content is None else lost.write_text(content)
    async with joined(router, metrics) as late:
        assert late.program == ((2, before) if is_before_there else (1, "disaggregated"))
        assert late.shared.state.program.plan.program == f"{lost}:good", "the state keeps what was asked for"
        assert "serves instead" in caplog.text
        assert str(lost) in caplog.text
        assert (f"{before}" if is_before_there else "the program of this command (disaggregated)") in caplog.text
        await router.use(Plan(program=f"{programs}:good"))
        await until(lambda: late.program == (4, f"{programs}:good"))


async def test_a_router_starts_without_its_stored_scheduling_file(
    router: LiveRouter, metrics: Metrics, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "scheduling.py"
    file.write_text("")
    await router.shared.change(lambda state: state.with_scheduling(str(file), None))
    file.unlink()
    async with joined(router, metrics):
        assert "that of this command is used" in caplog.text


# ---- paths that hang -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("odd", ["pipe", "device", "directory"])
async def test_a_path_that_is_no_file_stops_nobody(
    router: LiveRouter, other: Other, programs: str, odd: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = router.directory / "state.json"
    before, content = other.shared.state, path.read_bytes()
    path.unlink()
    if odd == "pipe":
        os.mkfifo(path)
    elif odd == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(BadRequest, match="state"):
        await router.use(Plan(program=f"{programs}:good"))
    await until(lambda: other.shared.reports.failure)
    assert "cannot be read" in other.shared.reports.failure
    assert other.shared.state is before
    path.rmdir() if odd == "directory" else path.unlink()
    path.write_bytes(content)
    assert await router.use(Plan(program=f"{programs}:good")) is None
    assert other.program == (2, f"{programs}:good")


@pytest.mark.slow
@pytest.mark.parametrize("call", ["stamp_of", "read", "write"])
async def test_a_file_system_that_hangs_stops_no_process(
    router: LiveRouter, other: Other, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def hangs(*_: object) -> None:
        go.wait(60)

    other.shared._files = FileThread(0.1, 0.05)
    with monkeypatch.context() as patched:
        if call == "stamp_of":
            patched.setattr("tercet.router.state.state_store.stamp_of", hangs)
        elif call == "read":
            patched.setattr(other.shared._file, "read", hangs)
            (router.directory / "state.json").touch()
        else:
            patched.setattr(other.shared._followers, "write", hangs)
        await until(lambda: other.shared._files.is_stuck)
        await until(lambda: call == "write" or "hangs" in other.shared.reports.failure)
        assert other.shared.reports.engines().keys() == {"p", "d"}
        other.shared._followers.announce([])
        assert other.shared._followers.announced() == []
    go.set()
    await until(lambda: not (other.shared._files.is_stuck or other.shared.reports.failure))
