"""The file of a fleet's state: whole or not there, one writer at a time, versions go up, and what it refuses."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.aio.files import stamp_of
from tercet.fleet.members import MemberState
from tercet.fleet.membership import ServedModel
from tercet.protocol import BadRequest, Conflict, EngineError, TercetError, UnknownEngine
from tercet.router.serve.plans import Plan, Share
from tercet.router.state import state_store
from tercet.router.state.fleet_state import FleetState, ProgramInUse, StateFile
from tercet.router.state.followers import EngineReport, FollowerReport, Followers
from tercet.router.state.shared_state import REMEMBERED, because, changes_with_reasons
from tercet.settings import EngineAddress, RouterConfig

FIRST = FleetState(
    members=(MemberState(EngineAddress("p", "http://p", "prefill")), MemberState(EngineAddress("d", "http://d"))),
    program=ProgramInUse(1, Plan(program="disaggregated")),
)
WRITER = """
import sys
from pathlib import Path
from tercet.router.serve.plans import Plan
from tests.unit.router.test_fleet_state import FIRST, StateFile
for number in range(int(sys.argv[2])):
    StateFile(Path(sys.argv[1])).update(lambda state: state.with_program(Plan(program=f"p{number}" * 200)), FIRST)
"""


# ---- the state -----------------------------------------------------------------------------------------------


def test_the_first_one_is_as_the_command_says() -> None:
    config = RouterConfig(engines=(EngineAddress("a", "http://a"),), program="auto", scheduling="s.yaml")
    state = FleetState.of(config)
    assert [member.address.name for member in state.members] == ["a"]
    assert (state.version, state.program.number, state.program.plan.program) == (1, 1, "auto")
    assert state.scheduling is not None
    assert (state.scheduling.file, state.before, state.served_model) == ("s.yaml", None, None)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda state: state.with_member(EngineAddress("p", "http://x")), Conflict, "name: .*'p'"),
        (lambda state: state.with_member(EngineAddress("x", "http://p/")), Conflict, "url: .* as p"),
        (lambda state: state.without_member("x"), UnknownEngine, "'x'; it has p, d"),
        (lambda state: state.with_role("x", "both"), UnknownEngine, "x"),
        (lambda state: state.with_draining("x", True), UnknownEngine, "x"),
    ],
)
def test_what_cannot_be_changes_nothing(tmp_path: Path, change: Any, error: type[Exception], says: str) -> None:
    file = StateFile(tmp_path / "state.json")
    file.update(lambda state: state, FIRST)
    with pytest.raises(error, match=says):
        file.update(change, FIRST)
    assert file.read() == FIRST


def test_programs_are_numbered_and_the_ones_before_are_known() -> None:
    state = FIRST.with_program(Plan(program="auto")).with_program(Plan(program="auto"))
    assert (state.program.number, state.before) == (3, ProgramInUse(2, Plan(program="auto")))


def test_a_state_that_was_put_back_is_not_for_the_reason_of_the_last_change() -> None:
    changed = because("somebody asked", FIRST, FIRST.with_draining("p", True))
    known = msgspec.structs.replace(changed, version=FIRST.version + 1)
    back = msgspec.structs.replace(FIRST.following(known), version=known.version + 1)
    assert back.members == FIRST.members
    assert [(each.event.name, reason) for each, reason in changes_with_reasons(FIRST, known, "it says so")] == [
        ("engine_drained", "somebody asked")
    ]
    assert [(each.event.name, reason) for each, reason in changes_with_reasons(known, back, "it says so")] == [
        ("engine_undrained", "it says so"),
        ("program_changed", "it says so"),
    ]


def test_the_reasons_of_the_last_changes_are_kept() -> None:
    state = FIRST
    for number in range(100):
        after = because(str(number), state, state.with_draining("p", not number % 2))
        state = msgspec.structs.replace(after, version=state.version + 1)
    assert [each.reason for each in state.changes] == [str(number) for number in range(100 - REMEMBERED, 100)]
    assert because("nothing", state, state) is state


def test_the_first_served_model_stands() -> None:
    first = FIRST.with_served_model(ServedModel(("m",), 100))
    assert first.with_served_model(ServedModel(("other",), 1)) is first


names = st.sampled_from(["p", "d", "e", "f"])
changes = st.one_of(
    names.map(lambda name: lambda state: state.with_member(EngineAddress(name, f"http://{name}"))),
    names.map(lambda name: lambda state: state.without_member(name)),
    st.tuples(names, st.booleans()).map(lambda it: lambda state: state.with_draining(*it)),
    st.tuples(names, st.sampled_from(["prefill", "decode", "both"])).map(lambda it: lambda state: state.with_role(*it)),
    names.map(lambda name: lambda state: state.with_program(Plan(split=(Share(program=name, args={"n": 1}),)))),
    names.map(lambda name: lambda state: state.with_scheduling(name)),
)


@given(st.lists(changes, max_size=20))
def test_any_changes_are_one_record_that_is_read_as_it_was_written(wanted: list[Any]) -> None:
    state = FIRST
    for change in wanted:
        try:
            state = change(state)
        except TercetError:
            continue
    assert msgspec.json.decode(msgspec.json.encode(state), type=FleetState) == state
    assert len({member.address.name for member in state.members}) == len(state.members)
    assert len(msgspec.json.encode(state)) < 2000, "it does not grow with the number of changes"


# ---- the file ------------------------------------------------------------------------------------------------


def test_versions_go_up_with_each_change_and_only_then(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "there" / "state.json")
    assert (file.read(), stamp_of(file.path)) == (None, None)
    assert file.update(lambda state: state, FIRST).version == 1
    before = stamp_of(file.path)
    assert file.update(lambda state: state, FIRST).version == 1
    assert stamp_of(file.path) == before
    assert file.update(lambda state: state.with_draining("p", True), FIRST).version == 2
    assert stamp_of(file.path) != before
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_lost_is_written_again_with_what_is_known(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state.json")
    known = file.update(lambda state: state.with_draining("p", True), FIRST)
    file.path.unlink()
    assert file.update(lambda state: state.with_draining("d", True), known).version == known.version + 1


def test_a_field_that_no_version_has_is_refused_or_its_record_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state.json"
    first = FIRST.with_member(EngineAddress("new", "http://new"))
    content = msgspec.json.decode(msgspec.json.encode(first))
    path.write_bytes(msgspec.json.encode({**content, "zones": {"a": [1, 2]}}))
    with pytest.raises(BadRequest, match=r"is not the state of a fleet: .*`zones`"):
        StateFile(path).read()
    content["members"][-1]["weight"] = 7
    path.write_bytes(msgspec.json.encode(content))
    file = StateFile(path)
    state = file.read()
    assert state is not None
    assert state.members == first.members[:-1]
    (logged,) = [record.getMessage() for record in caplog.records]
    assert "members[2] is left out" in logged
    assert "weight" in logged
    file.update(lambda state: state.without_member(first.members[0].address.name), FIRST)
    assert [each.get("weight") for each in msgspec.json.decode(path.read_bytes())["members"]][-1] == 7


@pytest.mark.parametrize("said", [2, 0, "1.5", None, [1]])
def test_another_format_is_refused_with_the_way_out(tmp_path: Path, said: Any) -> None:
    path = tmp_path / "state.json"
    content = msgspec.json.encode({**msgspec.to_builtins(FIRST), "format": said})
    path.write_bytes(content)
    for act in (StateFile(path).read, lambda: StateFile(path).update(lambda state: state, FIRST)):
        with pytest.raises(BadRequest, match=r"its format is .* Run the version that wrote it.*--state"):
            act()
    assert path.read_bytes() == content


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"version": 1}', '{"nonsense": 1}', "\xff"])
def test_garbage_is_refused_and_not_overwritten(tmp_path: Path, text: str) -> None:
    file = StateFile(tmp_path / "state.json")
    file.path.write_text(text, encoding="latin-1")
    for use in (file.read, lambda: file.update(lambda state: state.with_draining("p", True), FIRST)):
        with pytest.raises(BadRequest, match=r"state: \S*state.json is not the state of a fleet"):
            use()
    assert file.path.read_text(encoding="latin-1") == text


@pytest.mark.slow
def test_writers_take_turns_and_readers_never_see_half_of_a_state(tmp_path: Path) -> None:
    file, times, wrong = StateFile(tmp_path / "state.json"), 40, list[Exception]()
    file.update(lambda state: state, FIRST)
    done = threading.Event()

    def read() -> None:
        last = 0
        while not done.is_set():
            try:
                found = file.read()
                assert found is not None
                assert found.version >= last
                last = found.version
            except Exception as error:
                wrong.append(error)

    reading = threading.Thread(target=read)
    reading.start()
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(file.path), str(times)]) for _ in range(3)]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    done.set()
    reading.join()
    assert not wrong
    found = file.read()
    assert found is not None
    assert (found.version, found.program.number) == (1 + 3 * times, 1 + 3 * times)
    assert sorted(os.listdir(tmp_path)) == ["state.json", "state.json.lock"]


def test_a_writer_that_hangs_is_not_waited_for_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_store, "LOCK_SECONDS", 0.05)
    with (tmp_path / "state.json.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(EngineError, match="has held the lock"):
            StateFile(tmp_path / "state.json").update(lambda state: state, FIRST)


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(state_store.fcntl, "flock", refuse)
    with pytest.raises(EngineError, match=r"state\.json\.lock cannot be locked: No locks available"):
        StateFile(tmp_path / "state.json").update(lambda state: state, FIRST)


def test_a_place_that_cannot_be_written_is_said() -> None:
    with pytest.raises(BadRequest, match=r"state: /proc/nowhere/state\.json cannot be written"):
        StateFile(Path("/proc/nowhere/state.json")).update(lambda state: state, FIRST)


# ---- who follows it ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_followers_see_each_other_and_not_the_dead(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    a, b = Followers(path), Followers(path)
    assert a.others() == []
    report = FollowerReport(7, True, 3, "", {"p": EngineReport(2, True)})
    b.write(report)
    assert (a.others(), b.others()) == ([report], [])
    code = (
        "import os, sys; from pathlib import Path; from tercet.router.state.followers import *;"
        "f = Followers(Path(sys.argv[1])); f.write(FollowerReport(os.getpid())); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == -9
    assert a.others() == [report]
    b.close()
    assert a.others() == []
    a.close()
    assert os.listdir(f"{path}.followers") == []
