"""`tercet program` and `tercet engines` against the routes of a router in this process."""

from __future__ import annotations

import asyncio
import http.server
import json
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvicorn
from fastapi import FastAPI

from tercet.cli import app
from tercet.cli.engines import contexts_in_words, roles_in_words
from tercet.cli.router_calls import ask_router
from tercet.decisions.migration import Stage
from tercet.decisions.objectives import Attainments
from tercet.router.admin.admin_routes import version_shown
from tercet.router.observe.metrics import Metrics
from tercet.router.serve.context_copies import ContextsPassedOn, Passed
from tercet.router.serve.moves import MoveRecord
from tercet.settings.fleet_settings import ObjectiveClass, Objectives
from tests.servers import served_in_thread
from tests.unit.router.conftest import PROGRAMS, Engine, LiveRouter, metrics

__all__ = ["metrics"]


class Running:
    """A router on a port of its own, in a thread; ``live_router`` is to be looked at between calls only."""

    def __init__(self, metrics: Metrics, *keys: str, admin_keys: tuple[str, ...] = ()) -> None:
        self.live_router = LiveRouter(metrics, "disaggregated", return_after=3)
        self.live_router.engines["http://new"] = Engine("new")
        self.app = self.live_router.application(*keys, admin_keys=admin_keys, lifespan=self._lifespan)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(self.app, log_level="error"))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncGenerator[None]:
        async with self.live_router.membership:
            await self.live_router.start()
            yield
        self.live_router.close()

    def __enter__(self) -> Running:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.socket.close()


@pytest.fixture
def router(metrics: Metrics) -> Iterator[Running]:
    with Running(metrics) as running:
        yield running


@pytest.fixture
def tercet(router: Running, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*line: str, code: int = 0) -> str:
        assert app._run([*line, "--url", router.url]) == code
        said = capsys.readouterr()
        if code:
            assert said.out == ""
            assert said.err.startswith("tercet: ")
            assert said.err.count("\n") == 1
        return said.err if code else said.out

    return run


def plan_of(router: Running) -> dict[str, Any]:
    return json.loads(json.dumps(version_shown(router.live_router.service.routing.current)))


def test_show_and_set(router: Running, tercet: Any) -> None:
    assert tercet("program") == "version 1: disaggregated\nscheduling file: none\n"
    said = tercet("program", "balanced", "--program-arg", "balance_ratio=0.3")
    assert said == "version 2: balanced(balance_ratio=0.3)\n  before: version 1: disaggregated\n"
    assert json.loads(tercet("program", "--json"))["program"]["args"] == {"balance_ratio": "0.3"}
    assert router.live_router.service.routing.current.number == 2


def test_a_file_is_found_from_where_the_user_is(
    router: Running, tercet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(PROGRAMS)
    monkeypatch.chdir(tmp_path)
    tercet("program", "mine.py:good")
    assert plan_of(router)["program"] == f"{tmp_path}/mine.py:good"
    assert "version 2: mine.py:good\n" in tercet("program")
    assert "raises" in tercet("program", "mine.py:raises")


def test_a_program_is_called_what_was_written(
    router: Running, tercet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(PROGRAMS)
    monkeypatch.chdir(tmp_path)
    service = router.live_router.service
    tercet("program", "mine.py:good")
    assert service.program_called("mine.py:good").name == "mine.py:good"
    tercet("program", "mine.py:good=1", "./mine.py:raises=1", "--by-header", "x-any,mine.py:good")
    assert service.program_called("./mine.py:raises").name == "./mine.py:raises"
    assert set(service.routing.current.programs) == {"mine.py:good", "./mine.py:raises"}


def test_show_tells_of_failures_and_returns(router: Running, tercet: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PROGRAMS)
    tercet("program", f"{tmp_path}/mine.py:raises")
    asyncio.run(router.live_router.ask())
    assert "failed on its last 1 requests" in tercet("program")
    for _ in range(2):
        asyncio.run(router.live_router.ask())
    said = tercet("program")
    assert said.startswith("version 1: disaggregated\n  returned from version 2:")
    assert "3 times in a row, the last time with ValueError: oh no" in said


def test_split(router: Running, tercet: Any) -> None:
    said = tercet(
        "program", "disaggregated=90", "balanced=10", "--program-arg", "balanced:balance_ratio=0.3",
        "--by-header", "x-team=search,data_parallel", "--by-header", "x-any,data_parallel",
        "--by-model", "big,balanced", "--sticky", "x-user",
    )  # fmt: skip
    assert "disaggregated 90.0%, balanced(balance_ratio=0.3) 10.0%, data_parallel where x-team=search" in said
    assert "balanced(balance_ratio=0.3) where model=big" in said
    assert plan_of(router) == {
        "version": 2,
        "split": [
            {"program": "disaggregated", "weight": 90.0},
            {"program": "balanced", "args": {"balance_ratio": "0.3"}, "weight": 10.0},
        ],
        "rules": [
            {"program": "data_parallel", "header": "x-team", "value": "search"},
            {"program": "data_parallel", "header": "x-any"},
            {"program": "balanced", "args": {"balance_ratio": "0.3"}, "model": "big"},
        ],
        "sticky": "x-user",
    }


@pytest.mark.parametrize(
    "text", ['{"split": [{"program": "balanced", "weight": 2}]}', "split:\n- {program: balanced, weight: 2}\n"]
)
def test_a_plan_from_a_file(router: Running, tercet: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "plan").write_text(text)
    assert "balanced 100.0%" in tercet("program", "--plan", str(tmp_path / "plan"))
    assert plan_of(router)["split"] == [{"program": "balanced", "weight": 2.0}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("program nowhere", "nowhere"),
        ("program --sticky x-user", "PROGRAM"),
        ("program balanced --sticky x-user", "PROGRAM=WEIGHT"),
        ("program balanced --plan x", "PROGRAM"),
        ("program balanced --program-arg min_send", "--program-arg"),
        ("program balanced --program-arg min_send=many", "min_send"),
        ("program --plan /not/here", "--plan"),
        ("program no.py:main", "no.py"),
        ("program balanced=1 balanced", "PROGRAM=WEIGHT"),
        ("program balanced=x", "PROGRAM=WEIGHT"),
        ("program balanced=-1", "weight"),
        ("program balanced=1 --program-arg min_send=1", "PROGRAM:KEY=VALUE"),
        ("program balanced=1 --program-arg data_parallel:pick=x", "data_parallel"),
        ("program balanced=1 --by-header x-team", "--by-header"),
        ("program balanced=1 --by-model m,nowhere", "nowhere"),
        ("engines add new nowhere", "ENGINE_URL"),
        ("engines add new http://new --role cook", "--role"),
        ("engines role p cook", "cook"),
    ],
)
def test_bad_input(router: Running, tercet: Any, line: str, names: str) -> None:
    assert names in tercet(*line.split(), code=2)
    assert router.live_router.service.routing.current.number == 1


def test_engines(router: Running, tercet: Any) -> None:
    assert [line.strip() for line in tercet("status").splitlines() if "http://" in line][1:] == [
        "p  prefill  serving         0  http://p  no report",
        "d  decode   serving         0  http://d  no report",
    ]
    assert tercet("engines", "add", "new", "http://new/", "--role", "decode").startswith("new  decode ")
    assert "draining" in tercet("engines", "drain", "d")
    assert "serving" in tercet("engines", "drain", "d", "--undo")
    assert "both" in tercet("engines", "role", "p", "both")
    assert tercet("engines", "remove", "new") == "new removed; 0 sequences still run on it\n"
    assert [engine["name"] for engine in json.loads(tercet("status", "--json"))["engines"]] == ["p", "d"]
    assert "it has p, d" in tercet("engines", "remove", "new", code=2)
    assert "already" in tercet("engines", "add", "p", "http://new", code=2)


def test_moves(router: Running, tercet: Any) -> None:
    assert tercet("status", "--moves") == tercet("status", "--sequences") == ""
    assert "no sequence 'x' runs" in tercet("engines", "move", "x", "p", code=2)
    move = MoveRecord(1, "s", "d", "p", "drain", 0.0, 120, "moved", (Stage(0, 119, 2_500_000, 0.1, "host"),), 2, 0.05)
    router.live_router.service.moves._record += [
        move,
        MoveRecord(2, "t", "d", "p", "drain", 0.0, 9, "failed", error="oh no"),
    ]
    assert tercet("status", "--moves").splitlines() == [
        "    1  s  d -> p  drain  moved  120 tokens, 1 stage, 2.5 MB, 2 tokens recomputed, pause 50 ms",
        "    2  t  d -> p  drain  failed: oh no",
    ]
    assert [json.loads(line)["number"] for line in tercet("status", "--moves", "--json").splitlines()] == [1, 2]


def test_draining_waits_if_asked_to(router: Running, tercet: Any) -> None:
    assert "draining" in tercet("engines", "drain", "d", "--wait")
    assert "--wait" in tercet("engines", "drain", "d", "--undo", "--wait", code=2)


def test_the_end_of_a_drain_says_what_moved_where(
    router: Running, tercet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = router.live_router.service.moves
    moves._record.append(MoveRecord(7, "of before", "d", "p", "drain", 0.0, 9, "moved"))
    asked = ask_router

    def ask(url: str, method: str, path: str, *more: Any) -> Any:
        if path.endswith("/drain"):
            moves._record += [
                MoveRecord(8, "s", "d", "p", "drain", 0.0, 9, "moved"),
                MoveRecord(9, "t", "d", "p", "drain", 0.0, 9, "moved"),
                MoveRecord(10, "u", "d", "p", "drain", 0.0, 9, "failed"),
                MoveRecord(11, "v", "p", "d", "policy", 0.0, 9, "moved"),
            ]
        return asked(url, method, path, *more)

    monkeypatch.setattr("tercet.cli.router_calls.ask_router", ask)
    assert tercet("engines", "drain", "d", "--wait").splitlines()[-1] == "d is empty: 2 moved to p, 0 left"
    assert tercet("engines", "drain", "p", "--wait").splitlines()[-1] == "p is empty: none moved, 0 left"


def test_the_end_of_a_drain_says_what_became_of_contexts(
    router: Running, tercet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, asked = [ContextsPassedOn(1, "d", 0.0, {"p": Passed(9, 9)}, is_over=True)], list[int]()

    class Hot:
        def since(self, number: int) -> list[ContextsPassedOn]:
            asked.append(number)
            if len(asked) == 2:  # the drain has begun
                records.append(ContextsPassedOn(2, "d", 0.0))
                records.append(ContextsPassedOn(3, "p", 0.0))
            if len(asked) == 4:
                to = {"store-0": Passed(2, 1024), "b": Passed(3, 4096)}
                records[1] = ContextsPassedOn(2, "d", 0.0, to, {"c: no_space": 1}, "5 s were over", is_over=True)
            return [each for each in records if each.number > number]

    monkeypatch.setattr("tercet.cli.engines.POLL_SECONDS", 0.0)
    router.live_router.service.hot_contexts = Hot()  # type: ignore[assignment]
    assert tercet("engines", "drain", "d", "--wait").splitlines()[-1] == (
        "d is empty: none moved, 0 left; 3 contexts (4,096 tokens) went to b, 2 (1,024) to store-0, "
        "1 was dropped (c: no_space), further ones were not tried (5 s were over)"
    )
    assert asked == [0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([], ""),
        ([ContextsPassedOn(1, "a", 0.0)], ""),
        ([ContextsPassedOn(1, "a", 0.0, {"b": Passed(1, 64)})], "1 context (64 tokens) went to b"),
        (
            [ContextsPassedOn(1, "a", 0.0, {"b": Passed(1, 64)}), ContextsPassedOn(2, "a", 0.0, {"b": Passed(2, 640)})],
            "3 contexts (704 tokens) went to b",
        ),
        (
            [ContextsPassedOn(1, "a", 0.0, {}, {"b: timeout": 2})],
            "no context went to another, 2 were dropped (b: timeout)",
        ),
    ],
)
def test_contexts_in_words(records: list[ContextsPassedOn], said: str) -> None:
    assert contexts_in_words(msgspec.to_builtins(records)) == said


def test_the_key(
    metrics: Metrics, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with Running(metrics, "client", admin_keys=("secret",)) as running:
        line = ["program", "--url", running.url]
        assert app._run(line) == 2
        assert "admin key" in capsys.readouterr().err
        assert app._run([*line, "--admin-key", "client"]) == 2
        assert app._run([*line, "--admin-key", "secret"]) == 0
        (tmp_path / "keys").write_text("# of this fleet\nsecret\n")
        monkeypatch.setenv("TERCET_ADMIN_KEY_FILE", str(tmp_path / "keys"))
        assert app._run(line) == 0
        monkeypatch.setenv("TERCET_ADMIN_KEY", "other")
        assert app._run(line) == 2
        monkeypatch.setenv("TERCET_ADMIN_KEY", "secret")
        assert app._run(line) == 0
        capsys.readouterr()
        for wrong in ("\n", "a\nb"):
            assert app._run([*line, "--admin-key", wrong]) == 2
            assert capsys.readouterr().err.startswith("tercet: --admin-key: ")
        assert app._run([*line, "--api-key", "secret"]) == 2
        assert "did you mean --admin-key?" in capsys.readouterr().err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    assert app._run(["program", "--url", url]) == 1
    assert capsys.readouterr().err.startswith(f"tercet: no router answers at {url}: ")
    assert app._run(["status", "--url", "nowhere"]) == 2
    assert "--url" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("status", "body"), [(200, b"<html>"), (404, b'{"detail": "Not Found"}'), (500, b"")])
def test_somebody_else_there(capsys: pytest.CaptureFixture[str], status: int, body: bytes) -> None:
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with served_in_thread(http.server.HTTPServer(("127.0.0.1", 0), Other)) as url:
        assert app._run(["program", "--url", url]) == 1
    assert capsys.readouterr().err == f"tercet: the server at {url} is not a router: HTTP {status}\n"


@pytest.mark.parametrize("line", ["program --help", "engines --help"])
def test_help(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app._run(line.split()) == 0
    assert len(capsys.readouterr().out) > 200


# ---- scheduling ----------------------------------------------------------------------------------------------


def test_a_scheduling_file_is_set_and_shown(
    router: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text(
        "plugins: [{type: queue-scorer}]\n"
        "schedulingProfiles: [{name: short, plugins: [{pluginRef: queue-scorer, weight: 2}]}]\n"
    )
    monkeypatch.chdir(tmp_path)
    assert app._run(["program", "--url", router.url]) == 0
    assert capsys.readouterr().out.endswith("scheduling file: none\n")
    assert app._run(["program", "--scheduling", "mine.yaml", "--url", router.url]) == 0
    said = capsys.readouterr().out
    assert str(tmp_path / "mine.yaml") in said
    assert "short (prefill, decode, both): QueueScorer x 2, MaxScorePicker" in said
    assert app._run(["program", "--scheduling", "nowhere.yaml", "--url", router.url]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err


# ---- status --------------------------------------------------------------------------------------------------


def test_the_status_is_one_screen(router: Running, tercet: Any) -> None:
    tercet("status")  # it has begun
    router.live_router.fleet.member("d").in_flight = 2
    said = tercet("status").splitlines()
    router.live_router.fleet.member("d").in_flight = 0
    assert said[0] == f"{router.url}: serves m"
    assert said[1] == "version 1: disaggregated"
    assert said[2] == "no objectives; roles: fixed"
    assert said[3] == "2 engines, 2 sequences on them"
    assert said[4].split()[:3] == ["p", "prefill", "serving"]
    assert said[-1] == "0 running moves"
    found = json.loads(tercet("status", "--json"))
    assert (found["serving"], found["models"], [engine["name"] for engine in found["engines"]]) == (
        True, ["m"], ["p", "d"],
    )  # fmt: skip


def test_roles_are_explained(router: Running, tercet: Any) -> None:
    service = router.live_router.service
    assert tercet("engines", "roles").splitlines() == ["no objectives", "roles: fixed; prefill: p; decode: d"]
    batch = ObjectiveClass("batch", ttft=30.0, share=0.9)
    service.attainments = Attainments(Objectives(ttft=1.0, tpot=0.025, classes=(batch,)))
    assert tercet("engines", "roles").splitlines()[0].endswith("for 99.0% of the requests; no request has ended yet")
    service.attainments.default.ended_with(0.5, 0.02)
    service.attainments.default.failed()
    assert tercet("status").splitlines()[2:4] == [
        "objectives: TTFT 1 s, TPOT 0.025 s for 99.0% of the requests; met by 50.0% of 2; roles: fixed",
        "  x-objective-class: batch: TTFT 30 s for 90.0% of the requests; no request has ended yet",
    ]


def test_what_roles_are_decided_by_is_said() -> None:
    flip = {"at": 0.0, "engines": ["d"], "role": "prefill", "reason": "pressed"}
    decision = {
        "at": 0.0,
        "why": "no role is pressed",
        "prefill_pressure": 0.5,
        "decode_pressure": None,
        "flips": [flip],
    }
    objectives = {"ttft": 1.0, "tpot": None, "share": 0.9, "attainment": None}
    found = {"roles": "auto", "objectives": objectives, "engines": {"p": "prefill"}, "decision": decision}
    said = list(roles_in_words(found))
    assert said[2] == "pressure: prefill 50%, decode unknown"
    assert said[3].endswith("s ago: no role is pressed")
    assert said[4].endswith("d -> prefill: pressed")


def test_the_status_of_one_that_cannot_serve(router: Running, tercet: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "pd":
        tercet("engines", "drain", name)
    assert app._run(["status", "--url", router.url]) == 1
    said = capsys.readouterr().out
    assert "does not serve m\n  every engine of this fleet is drained or stops" in said
    assert app._run(["status", "--url", router.url, "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["serving"]


@pytest.mark.parametrize(("url", "code"), [("http://127.0.0.1:9", 1), ("nonsense", 2)])
def test_the_status_of_what_is_not_there(url: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert app._run(["status", "--url", url]) == code
    assert capsys.readouterr().err.count("\n") == 1
