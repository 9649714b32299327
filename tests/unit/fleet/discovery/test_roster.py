"""Rosters: what is one, what a fleet makes of changes, and files that are broken, missing or in the way."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.aio.files import write_whole
from tercet.fleet import EngineFleet
from tercet.fleet.discovery import (
    MOST_BYTES,
    FoundEngine,
    RosterEntry,
    RosterFile,
    discovery_of,
    follow_found,
    read_roster,
    with_found,
    write_roster,
)
from tercet.fleet.members import MemberState
from tercet.fleet.membership import Membership
from tercet.protocol import BadRequest
from tercet.settings import DiscoverySettings, EngineAddress
from tests.longest_wait import until

from .test_discovery import connect


def entry(name: str, port: int = 8001, uid: str = "1", **rest: object) -> RosterEntry:
    given: dict[str, object] = {"name": name, "url": f"http://10.0.0.1:{port}", "uid": uid, **rest}
    return msgspec.convert(given, RosterEntry)


def found(*entries: RosterEntry) -> Sequence[FoundEngine]:
    return read_roster(write_roster(entries))


def test_a_roster_is_read_as_it_was_written() -> None:
    (a, b) = found(entry("b", 8002, role="decode", draining=True), entry("a", labels={"zone": "x"}))
    assert a == FoundEngine(EngineAddress("a", "http://10.0.0.1:8001", "both", {"zone": "x"}), "1", True)
    assert (b.address.role, b.serves, b.withheld) == ("decode", True, "the roster says that it is draining")
    (c,) = found(entry("c", withheld="it is starting", draining=True))
    assert (c.serves, c.withheld) == (False, "it is starting")
    assert found() == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a list of engines"),
        (b"\xff\xfe[]", "not a list of engines"),
        (b"[" * 200_000, "not a list of engines"),
        (b'{"engines": []}', "Expected `array`"),
        (b'[{"name": "a", "url": "http://h:1"}]', "missing required field `uid`"),
        (b'[{"name": "a", "url": "http://h:1", "uid": ""}]', r"uid"),
        (b'[{"name": "a/b", "url": "http://h:1", "uid": "1"}]', "name"),
        (b'[{"name": "a", "url": "h:1", "uid": "1"}]', "url"),
        (b'[{"name": "a", "url": "http://h:1", "uid": "1", "role": "encode"}]', "encode"),
        (b'[{"name": "a", "url": "http://h:1", "uid": "1", "drain": true}]', "unknown field `drain`"),
        (write_roster([entry("a"), entry("a", 8002)]), "two engines have the name a"),
        (write_roster([entry("a"), entry("b")]), "two engines have the URL http://10.0.0.1:8001"),
    ],
)
def test_what_is_not_a_roster_is_refused(content: bytes, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        read_roster(content)


@given(st.binary(max_size=200))
def test_garbage_is_a_roster_or_refused(content: bytes) -> None:
    try:
        read_roster(content)
    except BadRequest:
        return


def test_another_start_is_another_engine_and_is_not_one_before_it_serves() -> None:
    drained = MemberState(EngineAddress("a", "http://10.0.0.1:8001"), draining=True, uid="1")
    assert with_found([drained], found(entry("a"))) == (drained,), "an operator drained this start"
    assert with_found([drained], found(entry("a", uid="2", withheld="it is starting"))) == ()
    assert with_found([drained], found(entry("a", 8005, uid="2"))) == (
        MemberState(EngineAddress("a", "http://10.0.0.1:8005"), uid="2"),
    )


# ---- the file --------------------------------------------------------------------------------------------------


class World:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.fleet = EngineFleet(())

    def write(self, *entries: RosterEntry) -> None:
        write_whole(self.path, write_roster(entries))

    def state(self) -> dict[str, tuple[str, bool]]:
        return {each.name: (each.role, each.draining) for each in self.fleet.members}

    @asynccontextmanager
    async def following(self) -> AsyncGenerator[None]:
        async with Membership(self.fleet, connect) as membership:
            task = asyncio.create_task(follow_found(RosterFile(self.path, 0.005), membership, (), asyncio.Event()))
            try:
                yield
            finally:
                task.cancel()
                await asyncio.wait({task})


async def test_engines_follow_the_file_and_stay_while_it_is_broken_or_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path / "roster.json")
    with caplog.at_level(logging.WARNING):
        async with world.following():
            await until(lambda: "No such file or directory" in caplog.text)
            world.write(entry("a", role="prefill"), entry("b", 8002, withheld="it is starting"))
            await until(lambda: world.state() == {"a": ("prefill", False)})
            both = {"a": ("prefill", True), "b": ("both", False)}
            world.write(entry("a", role="prefill", draining=True), entry("b", 8002))
            await until(lambda: world.state() == both)

            world.path.write_bytes(b'[{"name": "a", "ur')
            await until(lambda: "not a list of engines" in caplog.text)
            world.path.unlink()
            await until(lambda: caplog.text.count("No such file or directory") == 2)
            os.mkfifo(world.path)
            await until(lambda: "not a regular file" in caplog.text)
            world.path.unlink()
            world.path.write_bytes(b" " * (MOST_BYTES + 1))
            await until(lambda: "more than 4194304 bytes" in caplog.text)
            await asyncio.sleep(0.05)
            assert world.state() == both
            said = caplog.text.count("discovery_lost")
            assert said <= 6, "each failure is said once, and the file's absence between two of them perhaps"

            world.write()
            await until(lambda: not world.state())
    assert "discovery_back" in caplog.text
    assert "engine_drained: a is drained and not picked: the roster says that it is draining" in caplog.text


async def test_a_file_system_that_hangs_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path / "roster.json")
    world.write(entry("a"))
    roster = RosterFile(world.path, 0.001)
    answers = [[each.address.name for each in found(entry("a"))]]

    async def hangs(*_: object) -> None:
        raise TimeoutError

    changes = roster.changes()
    assert [each.address.name for each in await anext(changes)] == answers[0]
    with monkeypatch.context() as patched:
        patched.setattr("tercet.aio.files.FileThread.run", hangs)
        following = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0.02)
        assert not following.done()
    world.write(entry("b"))
    assert [each.address.name for each in await following] == ["b"]
    await changes.aclose()


def test_a_roster_excludes_pods() -> None:
    assert isinstance(discovery_of(DiscoverySettings(roster="here.json")), RosterFile)
    with pytest.raises(BadRequest, match="roster: cannot be combined with pool-name"):
        DiscoverySettings(roster="here.json", pool_name="pool")
