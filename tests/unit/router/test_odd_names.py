"""Odd names at every entrance of a fleet, and files that admin routes name: refused where they enter, with answers that
tell nothing of what stands in them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from copy import copy
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.cli.engine import EngineFlags
from tercet.cli.engine_process import _spec_of
from tercet.cluster.up_config import UpConfig
from tercet.fleet.discovery import RosterEntry, engines_of
from tercet.fleet.kubernetes_api import Metadata, Pod, PodStatus
from tercet.fleet.members import MemberState
from tercet.fleet.membership import Membership
from tercet.protocol import BadRequest, TercetError
from tercet.protocol.wire import JoinCall
from tercet.router.observe.metrics import Metrics
from tercet.router.serve.plans import NamedFiles, Plan, Rule, Share
from tercet.router.serve.service import Service
from tercet.router.server import named_files
from tercet.router.state import fleet_state
from tercet.router.state.fleet_state import AdapterState, FleetState, StateFile
from tercet.router.state.shared_state import SharedState, because
from tercet.settings import EngineAddress, RouterConfig
from tercet.settings.engine_addresses import engine_address

from .conftest import Engine, LiveRouter
from .test_fleet_state import FIRST

EVERYWHERE_ODD = (
    "", " ", "a b", " a", "a ", "a\n", "a\nb", "a\tb", "a\0b", "\x1b[31mred", "a\x7f", "a\u2028b", "\ud800", "x" * 300,
    "x" * 1_000_000,
)  # fmt: skip
OF_ENGINES = (
    *EVERYWHERE_ODD, ".", "..", "-x", "--name", "a/b", "%2F", "a%20b", "a,b", "a=b", 'a"b', "a'b", "a;b", "größe",
    "a?b",
)  # fmt: skip
OF_ADAPTERS = (*EVERYWHERE_ODD, ".", "..", "a/../b", "/a", "a//b", "a/", "-x", "a,b", "a=b", 'a"b')
GOOD = ("a", "A_1", "10.0.0.7:8001", "[::1]:8001", "::1:8001", "pod-0-rank-1", "x" * 256, "e.f")
URLS = (
    "", "e", "e:8001", "ftp://e", "file:///etc/passwd", "http://", "http:///x", "http://user:pw@e", "http://e/?a=b",
    "http://e/#a", "http://e e", "http://e\n", "http://e\\x", "http://e:0", "http://e:99999", "http://e:x", "http://[::1",
    "http://[e]", "http://a..b", "http://%41", "http://" + "x" * 3000, "http://e/" + "x" * 1_000_000, "http://\0",
    "http://" + "a" * 64,
)  # fmt: skip
Make = Callable[[str], object]


def pod(name: str) -> object:
    return engines_of(Pod(Metadata(name=name, uid="1"), PodStatus(pod_ip="10.0.0.1")), [8000])


ENGINES_ENTER: dict[str, Make] = {
    "settings": lambda name: RouterConfig(engines=(EngineAddress(name, "http://e"),)),
    "flag": lambda name: engine_address(f"http://e,name={name}", 0) if "," not in name else EngineAddress(name, ""),
    "roster": lambda name: RosterEntry(name, "http://e", "1").found(),
    "pod": pod,
    "command": lambda name: _spec_of(EngineFlags(name=name, simulate="p")),
    "stored": lambda name: msgspec.convert({"address": {"name": name, "url": "http://e"}}, MemberState),
}


@pytest.mark.parametrize("entrance", ENGINES_ENTER)
def test_names_of_engines_are_checked_by_one_rule_at_each_entrance(entrance: str) -> None:
    for name in OF_ENGINES:
        with pytest.raises(BadRequest) as refused:
            ENGINES_ENTER[entrance](name)
        assert len(refused.value.message) < 1000, "what is huge is not repeated"
    for name in GOOD:
        ENGINES_ENTER[entrance](name)


@pytest.mark.parametrize("url", URLS)
def test_urls_of_engines_are_checked(url: str) -> None:
    with pytest.raises(BadRequest) as refused:
        EngineAddress("a", url)
    assert len(refused.value.message) < 1000


def test_what_else_has_a_name() -> None:
    for name in OF_ADAPTERS:
        with pytest.raises(BadRequest, match="name"):
            AdapterState(name, "/a")
        with pytest.raises(BadRequest, match="lora-modules"):
            RouterConfig(engines=(EngineAddress("a", "http://e"),), lora_modules={name: "/a"})
    AdapterState("größe/sql:v2@main", "/a")
    for name in EVERYWHERE_ODD:
        with pytest.raises(BadRequest):
            JoinCall(url="http://e", uid=name)
        with pytest.raises(BadRequest):
            UpConfig(on="ray", fleet_name=name)
    for name in (*EVERYWHERE_ODD[3:-2], "x" * 2000):
        for make in (
            lambda name: Plan(program="auto", name=name),
            lambda name: Plan(split=(Share(program="auto", name=name),)),
            lambda name: Plan(program="auto", rules=(Rule(program="auto", header=name),)),
            lambda name: AdapterState("a", name * 3),
        ):
            with pytest.raises(BadRequest):
                make(name)
    for labels in ({"": "x"}, {"a\n": "x"}, {"a": "x\0"}, {f"k{number}": "x" * 4000 for number in range(5)}):
        with pytest.raises(BadRequest, match="labels"):
            EngineAddress("a", "http://e", labels=labels)
    with pytest.raises(BadRequest, match="must not begin with joined:"):
        RosterEntry("a", "http://e", "joined:1")


# ---- over HTTP, and a start afterwards -------------------------------------------------------------------------


@asynccontextmanager
async def started_again(router: LiveRouter, metrics: Metrics) -> AsyncGenerator[SharedState]:
    fleet = type(router.fleet)(())
    membership = Membership(fleet, router._connect)
    service = Service(fleet, "disaggregated", {}, metrics, return_after=3)
    shared = SharedState(router.directory / "state.json", membership, service)
    async with membership:
        try:
            await shared.start(FIRST)
            yield shared
        finally:
            shared.close()


async def test_routes_refuse_them_and_a_router_starts_afterwards(router: LiveRouter, metrics: Metrics) -> None:
    router.engines["http://e"] = Engine("e")
    file = router.directory / "state.json"
    before = file.read_bytes()
    async with router.client() as client:
        for name in OF_ENGINES:
            if name in ("", ".", "..") or len(name) > 1000 or name == "\ud800":
                continue  # they are other paths, or no path at all
            put = await client.put(f"/members/{quote(name, safe='')}", json={"url": "http://e", "uid": "1"})
            assert 400 <= put.status_code < 500, (name, put.text)
        for name in OF_ENGINES:
            body = (
                msgspec.json.encode({"name": name, "url": "http://e"}) if name != "\ud800" else rb'{"name": "\ud800"}'
            )
            post = await client.post("/engines", content=body)
            assert post.status_code in (400, 413), (name, post.text)
        for url in URLS:
            put = await client.put("/members/e", json={"url": url, "uid": "1"})
            assert put.status_code in (400, 413), (url, put.text)
            post = await client.post("/engines", json={"name": "e", "url": url})
            assert post.status_code in (400, 413), (url, post.text)
        for uid in (*EVERYWHERE_ODD[:-3], "x" * 65, "a/b"):
            put = await client.put("/members/e", json={"url": "http://e", "uid": uid})
            assert put.status_code == 400, (uid, put.text)
        for name in (*EVERYWHERE_ODD[3:-3], "x" * 2000):
            put = await client.put("/program", json={"program": "auto", "name": name})
            assert put.status_code == 400, (name, put.text)
            put = await client.put("/program", json={"program": name})
            assert put.status_code == 400, (name, put.text)
            put = await client.put("/scheduling", json={"file": name * 4, "content": "{}"})
            assert put.status_code == 400, (name, put.text)
        for name in OF_ADAPTERS:
            if name != "\ud800":
                post = await client.post("/adapters", json={"name": name, "path": "/a"})
                assert post.status_code in (400, 413), (name, post.text)
            if len(name) < 1000 and name not in ("", ".", "..", "a/../b", "a\n", "\ud800"):
                put = await client.put(f"/adapters/{quote(name, safe='')}", json={"path": "/a"})
                assert 400 <= put.status_code < 500, (name, put.text)
        assert file.read_bytes() == before, "not one of them is in the state"
        assert (await client.put("/members/e", json={"url": "http://e", "uid": "1"})).status_code == 200
        assert (await client.put("/engines/p/role", json={"role": "both"})).status_code == 200
    async with started_again(router, metrics) as shared:
        assert {each.address.name for each in shared.state.members} == {"p", "d", "e"}


# ---- states with a bad record ----------------------------------------------------------------------------------

BAD_MEMBERS: tuple[Any, ...] = (
    {"address": {"name": "a b", "url": "http://x"}},
    {"address": {"name": "x", "url": "file:///x"}},
    {"address": {"name": "x", "url": "http://x", "role": "encode"}},
    {"address": {"name": "p", "url": "http://other"}},
    {"address": {"name": "other", "url": "http://p/"}},
    {"address": {"name": ["p"], "url": "http://x"}},
    {"address": None},
    {},
    None,
    17,
    "x",
    [],
)


def stored(path: Path, **fields: Any) -> StateFile:
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(FIRST), **fields}))
    return StateFile(path)


@pytest.mark.parametrize("bad", BAD_MEMBERS)
@pytest.mark.parametrize("field", ["members", "adapters", "changes"])
def test_one_bad_record_leaves_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, field: str, bad: Any
) -> None:
    good = msgspec.to_builtins(FIRST)[field]
    file = stored(tmp_path / "state.json", **{field: [*good[:1], *good[1:], bad]})
    with caplog.at_level(logging.ERROR):
        assert file.read() == file.read() == FIRST
        changed = file.update(lambda state: state.with_draining("p", True), FIRST)
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"{field}[{len(good)}] is left out" in said
    assert changed == file.read() == StateFile(file.path).read()
    kept = msgspec.json.decode(file.path.read_bytes())[field]
    assert (bad in kept) is (field != "changes"), "what another version may understand stays; history does not"


@pytest.mark.parametrize("field", ["program", "before", "scheduling", "promise", "role_keeper"])
def test_one_bad_setting_leaves_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture, field: str) -> None:
    bad = {"number": "one", "plan": {"program": "a\nb"}}
    file = stored(tmp_path / "state.json", **{field: bad})
    changed = file.update(lambda state: state.with_draining("p", True), FIRST)
    assert changed.members[0].draining
    assert changed.program == FIRST.program
    assert f"{field} is left out" in caplog.text
    assert msgspec.json.decode(file.path.read_bytes())[field] == bad
    file.update(lambda state: state.with_program(Plan(program="auto")), FIRST)
    file.update(lambda state: state.with_scheduling("s.yaml"), FIRST)
    assert StateFile(file.path).read(FIRST) is not None


def test_a_record_with_the_same_name_replaces_one_that_was_left_out(tmp_path: Path) -> None:
    bad = {"address": {"name": "x", "url": "junk"}}
    file = stored(tmp_path / "state.json", members=[*msgspec.to_builtins(FIRST)["members"], bad])
    file.update(lambda state: state.with_member(EngineAddress("x", "http://x")), FIRST)
    assert len(msgspec.json.decode(file.path.read_bytes())["members"]) == 3


async def test_a_router_starts_and_changes_with_a_bad_record(router: LiveRouter, metrics: Metrics) -> None:
    file = router.directory / "state.json"
    content = msgspec.json.decode(file.read_bytes())
    content["members"].append(BAD_MEMBERS[0])
    file.write_bytes(msgspec.json.encode(content))
    async with started_again(router, metrics) as shared:
        assert await shared.change(lambda state: state.with_draining("d", True)) == []
        assert [each.address.name for each in shared.state.members] == ["p", "d"]
    async with started_again(router, metrics) as shared:
        assert shared.state.members[1].draining


# ---- what was written can be read ------------------------------------------------------------------------------

texts = st.text(max_size=20) | st.sampled_from(EVERYWHERE_ODD[:-1]) | st.text(st.characters(), max_size=5)
args = st.dictionaries(texts, texts | st.integers() | st.floats() | st.booleans(), max_size=3)


def unchecked(field: str, value: str) -> EngineAddress:
    """As a fault of this program could make one."""
    made = copy(EngineAddress("n", "http://n"))
    msgspec.structs.force_setattr(made, field, value)
    return made


anything = st.one_of(
    st.tuples(texts, texts).map(lambda it: lambda state: state.with_member(EngineAddress(*it))),
    texts.map(lambda name: lambda state: state.with_member(unchecked("name", name))),
    texts.map(lambda url: lambda state: state.with_member(unchecked("url", url))),
    st.tuples(texts, texts).map(
        lambda it: lambda state: state.with_member(EngineAddress("n", "http://n", labels={it[0]: it[1]}))
    ),
    st.tuples(texts, texts).map(
        lambda it: lambda state: state.with_joined(EngineAddress(it[0], "http://j"), it[1], "")
    ),
    st.tuples(texts, texts).map(lambda it: lambda state: state.with_adapter(AdapterState(*it))),
    st.tuples(texts, texts).map(lambda it: lambda state: state.with_scheduling(*it)),
    st.tuples(texts, args).map(lambda it: lambda state: state.with_program(Plan(program=it[0], args=it[1]))),
    st.floats().map(lambda it: lambda state: state.with_program(Plan(split=(Share(program="a", weight=it),)))),
    texts.map(lambda name: lambda state: state.with_role_keeper(name)),
    texts.map(lambda why: lambda state: because(why, state, state.with_role("p", "both"))),
    st.text(max_size=5).map(lambda role: lambda state: state.with_role("p", role)),
)


@given(st.lists(anything, min_size=1, max_size=4))
def test_what_was_written_can_be_read_and_what_cannot_is_refused_before(wanted: list[Any]) -> None:
    store: Any = Memory()
    file = StateFile(Path("state"), store)
    file.update(lambda state: state, FIRST)
    for change in wanted:
        before = store.content
        try:
            after = file.update(change, FIRST)
        except TercetError:
            assert store.content is before, "a refused change writes nothing"
            continue
        again = StateFile(Path("state"), store)
        assert again.read() == after
        assert not again._left_out
        again.update(lambda state: state.with_draining("d", not state.members[1].draining), FIRST)


class Memory:
    name = "memory"

    def __init__(self) -> None:
        self.content: bytes | None = None

    def load(self) -> Any:
        return fleet_state.Stored(self.content, self.content)

    def store(self, content: bytes, since: object) -> bool:
        self.content = content
        return True

    def stamp(self) -> object:
        return self.content

    def turn(self, what: str) -> Any:
        raise NotImplementedError


def test_a_state_that_grows_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_state, "MOST_BYTES", 3000)
    file = StateFile(tmp_path / "state.json")
    file.update(lambda state: state, FIRST)
    whole: FleetState | None = file.read()
    with pytest.raises(BadRequest, match="and may have 3000"):
        file.update(lambda state: state.with_scheduling("s", "x" * 4000), FIRST)
    assert file.read() == whole


SECRET = "SK_LIVE_51H8"
PROGRAM = """
async def main(request, fleet, *, times: int = 1):
    with fleet.pick() as engine:
        yield engine.start_generate(request)
"""
SCHEDULING = "plugins: []\nschedulingProfiles: [{name: mine}]\n"
NOT_OURS = [
    "/etc/passwd", "/etc/shadow", "/proc/1/fd/0", "/proc/self/environ", "/dev/zero", "/root/x.py", "/", "",
    "~root/.ssh/id_rsa", "~nobody-here/x.yaml", "a\0b", "x" * 5000, "../../../../etc/passwd", "/proc/self/fd/0",
]  # fmt: skip


def program_of(path: str) -> dict[str, Any]:
    return {"program": f"{path}:main"}


@pytest.mark.parametrize("path", NOT_OURS)
async def test_a_path_below_no_folder_is_not_looked_at(router: LiveRouter, tmp_path: Path, path: str) -> None:
    router.folders = [str(tmp_path)]
    calls = [
        ("/program", program_of(path)),
        ("/program", {"split": [{"program": f"{path}:main"}]}),
        ("/program", {"program": "data_parallel", "rules": [{"program": f"{path}:main", "model": "m"}]}),
        ("/program", {"program": "balanced", "args": {"decode_start": f"{path}:main"}}),
        ("/scheduling", {"file": path}),
        (
            "/scheduling",
            {"file": "x", "content": f"plugins: [{{type: {path!r}:main}}]\nschedulingProfiles: [{{name: a}}]"},
        ),
    ]
    async with router.client() as client:
        for where, body in calls:
            answer = await client.put(where, json=body)
            assert answer.status_code in (400, 403), (where, body, answer.text)
            assert "root:" not in answer.text
    assert router.service.routing.current.number == 1


async def test_links_and_dots_lead_out_of_no_folder(router: LiveRouter, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret.py").write_text(PROGRAM)
    (inside / "link.py").symlink_to(tmp_path / "secret.py")
    (inside / "loop.py").symlink_to(inside / "loop.py")
    (tmp_path / "inside-not").mkdir()
    (tmp_path / "inside-not" / "x.py").write_text(PROGRAM)
    os.mkfifo(inside / "pipe.py")
    (inside / "mine.py").write_text(PROGRAM)
    router.folders = [str(inside)]
    async with router.client() as client:
        for path in ("link.py", "../secret.py", "../inside-not/x.py", "loop.py"):
            assert (await client.put("/program", json=program_of(f"{inside}/{path}"))).status_code == 403, path
        for path in ("pipe.py", "none.py", "."):
            assert (await client.put("/program", json=program_of(f"{inside}/{path}"))).status_code == 400, path
        assert (await client.put("/program", json=program_of(f"{inside}/mine.py"))).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [f"{SECRET}", f"{SECRET} = ", f"raise ValueError('{SECRET}')", f"import {SECRET}",
     f"async def main(r, f, *, {SECRET}=1): yield", f"async def main(r, f, *, x: {SECRET} = 1): yield",
     f"def main(): '{SECRET}'", f"raise SystemExit('{SECRET}')",
     f"root:x:0:{SECRET}", f"password: {SECRET}", f"plugins: {SECRET}", f"{SECRET}: [",
     f"plugins: [{{type: {SECRET}}}]\nschedulingProfiles: [{{name: a}}]",
     f"plugins: []\nschedulingProfiles: [{{name: a}}]\n{SECRET}: 1", f"{SECRET}: 1\n{SECRET}: 2"],
)  # fmt: skip
async def test_what_stands_in_a_file_is_for_the_log(
    router: LiveRouter, tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text(text)
    path = str(tmp_path / "file")
    async with router.client() as client:
        for where, body in (
            ("/program", {**program_of(path), "args": {"y": "1"}}),
            ("/program", {"program": "balanced", "args": {"decode_start": f"{path}:main"}}),
            ("/scheduling", {"file": path}),
        ):
            answer = await client.put(where, json=body)
            is_function = body.get("program") == "balanced" and answer.status_code == 200
            assert is_function or answer.status_code == 400
            assert is_function or SECRET not in answer.text
    assert "cannot be used: " in caplog.text


async def test_contents_may_be_sent(router: LiveRouter) -> None:
    async with router.client() as client:
        body = {"program": "mine.py:main", "source": PROGRAM, "args": {"times": 2}}
        shown = await client.put("/program", json=body)
        assert shown.status_code == 200, shown.text
        assert shown.json()["source"] == PROGRAM
        assert (await router.ask())[0] == "mine.py:main"
        split = {
            "split": [{"program": "mine.py:main", "source": PROGRAM}, {"program": "other.py:main", "source": PROGRAM}]
        }
        assert (await client.put("/program", json=split)).status_code == 200
        sent = await client.put("/scheduling", json={"file": "mine.yaml", "content": SCHEDULING})
        assert (sent.status_code, sent.json()["file"], list(sent.json()["profiles"])) == (200, "mine.yaml", ["mine"])


async def test_what_is_wrong_with_sent_contents_is_told(router: LiveRouter) -> None:
    async with router.client() as client:
        answer = await client.put("/program", json={"program": "mine.py:main", "source": "nonsense"})
        assert (answer.status_code, "name 'nonsense' is not defined" in answer.text) == (400, True)
        answer = await client.put("/program", json={"program": "mine.py:other", "source": PROGRAM})
        assert "has no function other" in answer.text
        answer = await client.put("/scheduling", json={"file": "m", "content": "surprise: 1"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "surprise")
        answer = await client.put("/program", json={"program": "mine.py:main", "source": "x" * 1_000_001})
        assert (answer.status_code, answer.json()["error"]["param"]) in ((400, "source"), (413, None))
        for wrong in ({"source": PROGRAM, "split": [{"program": "auto"}]}, {"program": "no_file", "source": PROGRAM}):
            assert (await client.put("/program", json=wrong)).status_code == 400


async def test_one_name_for_two_sources_is_refused(router: LiveRouter) -> None:
    split = [{"program": "mine.py:main", "source": PROGRAM}, {"program": "mine.py:main", "source": PROGRAM + "#"}]
    async with router.client() as client:
        assert (await client.put("/program", json={"split": split})).status_code == 400


def test_what_the_command_names_may_be_named_again(tmp_path: Path) -> None:
    for name in ("mine.py", "other.py", "s.yaml"):
        (tmp_path / name).write_text(PROGRAM if name.endswith("py") else SCHEDULING)
    config = RouterConfig(
        engines=(EngineAddress("e", "http://e"),), program=f"{tmp_path}/mine.py:main", scheduling=f"{tmp_path}/s.yaml"
    )
    files = named_files(config)
    assert files._locate(f"{tmp_path}/mine.py", "program") == tmp_path / "mine.py"
    assert files.load_scheduling(f"{tmp_path}/s.yaml").profiles
    with pytest.raises(Exception, match="admin-folder"):
        files._locate(f"{tmp_path}/other.py", "program")
    assert NamedFiles([str(tmp_path)])._locate(f"{tmp_path}/other.py", "program")
