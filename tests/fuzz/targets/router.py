"""A router: its own routes and the bodies of requests, what engines answer it, and the files that it reads."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from operator import methodcaller
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
from aiohttp import web

from tercet.decisions.scheduling import load_scheduling
from tercet.decisions.scheduling.assembly import user_file
from tercet.fleet.members import MemberState
from tercet.programs.loading import load_program
from tercet.protocol import KVAddrInfo, Output, RankAddress, Request, Sent, TercetError, Usage
from tercet.protocol.wire import PrepRecvAnswer
from tercet.router.observe.metrics import Metrics
from tercet.router.serve.plans import Plan
from tercet.router.state.fleet_state import FleetState, ProgramInUse, StateFile
from tercet.router.state.followers import EngineReport, FollowerReport, read_record
from tercet.settings import EngineAddress, RouterConfig
from tercet.settings.declaration import decode_settings, read_yaml
from tercet.wire.client import HttpEngine
from tercet.wire.client.bounded_answers import ask_router
from tests.abort import abort
from tests.fuzz.fuzzing import Outcome, Target
from tests.fuzz.mutation import Case, Named
from tests.fuzz.targets.kv_transfer import kind_of
from tests.own_metrics import own_metrics
from tests.servers import served
from tests.unit.fakes import LAYOUT
from tests.unit.router.conftest import JSON, Engine, LiveRouter

PROGRAMS = "THE-PROGRAMS"
PROGRAM = """
async def good(request, fleet, *, by: str = "least_loaded", limit: int = 3):
    with fleet.pick(by=by) as engine:
        async for output in engine.start_generate(request):
            yield output
"""
SCHEDULING = """
plugins:
- type: queue-scorer
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: queue-scorer
    weight: 2
  - pluginRef: max-score-picker
"""


# ---- its own routes --------------------------------------------------------------------------------------------------


class AdminRoom:
    """The routes of one router over engines in memory; programs and engines are put back behind each case."""

    def __init__(self, router: LiveRouter, client: httpx.AsyncClient, folder: Path) -> None:
        self._door, self._client, self._folder = router, client, folder

    async def run(self, case: Case) -> Outcome:
        answers = [await self._call(item) for item in case]
        shown = (await self._client.get("/program")).json()
        assert shown["version"] >= 1
        StateFile(self._door.directory / "state.json").read()
        await self._put_back()
        return Outcome(len(case), " ".join(answers[:4]))

    async def _call(self, item: bytes) -> str:
        head, _, body = item.partition(b" ")
        method, _, path = head.decode("latin-1").partition(":")
        if method not in ("GET", "PUT", "POST", "DELETE", "PATCH"):
            method = "POST"
        path = "".join(char for char in path if char.isascii() and char.isprintable() and char != " ")[:200]
        body = body.replace(PROGRAMS.encode(), str(self._folder / "programs.py").encode())
        answer = await self._client.request(method, f"/{path.lstrip('/')}", content=body)
        assert answer.status_code != 500, f"{method} {path}: {answer.text[:200]}"
        if answer.status_code < 400:
            return f"{method} {path[:12]} {answer.status_code}"
        said = answer.json()
        assert said.get("error") or said.get("detail"), said
        return f"{method} {path[:12]} {answer.status_code} {(said.get('error') or {}).get('param')}"

    async def _put_back(self) -> None:
        router = self._door
        for member in list(router.fleet.members):
            if member.name not in "pd":
                await router.shared.change(methodcaller("without_member", member.name))
        for name, role in (("p", "prefill"), ("d", "decode")):
            if name not in {member.name for member in router.fleet.members}:
                await router.shared.add(EngineAddress(name, f"http://{name}", role))  # type: ignore[arg-type]
            await router.shared.change(methodcaller("with_draining", name, False))
            await router.shared.change(methodcaller("with_role", name, role))
        await router.use(Plan(program="disaggregated"))
        assert await router.has_everything_back()


class UnknownUrls(dict[str, Engine]):
    """Every URL has an engine behind it."""

    def __missing__(self, url: str) -> Engine:
        if len(self) > 8:
            for each in [each for each in self if each not in ("http://p", "http://d")]:
                del self[each]
        return self.setdefault(url, Engine("late"))


@asynccontextmanager
async def _admin() -> AsyncGenerator[AdminRoom]:
    with own_metrics():
        router = LiveRouter(Metrics(), "disaggregated", return_after=3)
        router.engines = UnknownUrls(router.engines)
        try:
            with tempfile.TemporaryDirectory() as directory:
                (Path(directory) / "programs.py").write_text(PROGRAM)
                async with router.membership:
                    await router.start()
                    transport = httpx.ASGITransport(router.application(), raise_app_exceptions=False)
                    async with httpx.AsyncClient(
                        transport=transport, base_url="http://localhost/tercet/v1", headers=JSON
                    ) as client:
                        yield AdminRoom(router, client, Path(directory))
        finally:
            router.close()


def _admin_cases() -> list[Case]:
    def call(head: str, **fields: Any) -> bytes:
        return head.encode() + b" " + msgspec.json.encode(fields)

    split = [{"program": "balanced", "weight": 3}, {"program": f"{PROGRAMS}:good", "weight": 1, "args": {"limit": 5}}]
    return [
        [call("PUT:program", program="balanced", args={"balance_ratio": 0.5, "min_send": 1}), call("GET:program")],
        [call("PUT:program", split=split), call("PUT:program", program=f"{PROGRAMS}:good", args={"by": "x"})],
        [
            call("POST:engines", name="late", url="http://late:1", role="decode", labels={"zone": "a"}),
            call("GET:engines"),
        ],
        [call("POST:engines/p/drain"), call("DELETE:engines/p/drain"), call("PUT:engines/d/role", role="both")],
        [call("DELETE:engines/p"), call("GET:sequences?engine=p")],
        [call("PUT:scheduling", file="/nowhere.yaml"), call("GET:scheduling")],
        [call("POST:migrate_context", prompt=list(range(100)), source="p", destination="d", cache_salt="a")],
    ]


# ---- what engines answer ---------------------------------------------------------------------------------------------


class ClientRoom:
    """A client of an engine that answers each call with the next item: a status and a body."""

    def __init__(self, url: str, engine: HttpEngine, answers: list[bytes]) -> None:
        self._url, self._engine, self._answers = url, engine, answers

    async def run(self, case: Case) -> Outcome:
        happened: list[str] = []
        for index, item in enumerate(case):
            self._answers[:] = [item]
            try:
                happened.append(await self._ask(index % 5))
            except TercetError as error:
                happened.append(kind_of(error)[:40])
        assert not self._engine._held, "a sequence that is over holds a lease"
        return Outcome(len(case), " | ".join(happened[:3]))

    async def _ask(self, verb: int) -> str:
        request = Request(seq_id="s", prompt=(1, 2, 3))
        match verb:
            case 0:
                async with self._engine.prep_recv(request) as reservation:
                    return f"reserved {reservation.matched_len >= 0}"
            case 1:
                outputs = [output async for output in self._engine.start_generate(request)]
                return f"{len(outputs)} outputs"
            case 2:
                return f"{(await self._engine.status()).block_size > 0}"
            case 3:
                await ask_router(self._url, "GET", "/program")
                return "a router"
            case _:
                await abort(self._engine, "s")
                return "aborted"


@asynccontextmanager
async def _client() -> AsyncGenerator[ClientRoom]:
    random = Random(1)
    answers: list[bytes] = []
    good = msgspec.json.encode(await Engine("e").status())

    async def answer(request: web.Request) -> web.Response:
        if request.path.endswith("/status") and random.random() < 0.7:  # it is asked for before other things
            return web.Response(body=good)
        status, _, body = (answers.pop() if answers else b"200 {}").partition(b" ")
        code = int(status) if status.isdigit() and status[:1] in b"245" and len(status) == 3 else 200
        return web.Response(body=body, status=code if code >= 200 and code != 204 else 200)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with served(app) as url, HttpEngine("e", url) as engine:
        yield ClientRoom(url, engine, answers)


def _answer_cases() -> list[Case]:
    info = KVAddrInfo("f" * 32, "e", 0, 48, "tcp", (RankAddress(0, ("tcp://127.0.0.1:2",)),), LAYOUT)
    reserved = b"200 " + msgspec.json.encode(PrepRecvAnswer(kv_addr_info=info, matched_len=0, ttl=5.0))
    last = msgspec.json.encode(Output((5, 6), "length", usage=Usage(computed=3)))
    events = b"200 data: " + msgspec.json.encode(Output((4,))) + b"\n\ndata: " + last + b"\n\n"
    refused = b"503 " + msgspec.json.encode({"error": {"message": "full", "type": "NoSpace", "code": "no_space"}})
    sent = b"200 " + msgspec.json.encode(Sent(0, 1, 2, 3, 0.5, Usage()))
    return [[reserved, events, b"200 {}"], [refused, refused, refused], [events, reserved, sent], [b"200 <html>"] * 5]


# ---- files -----------------------------------------------------------------------------------------------------------


class FilesRoom:
    """Whoever reads a file of some kind; each item is one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0

    async def run(self, case: Case) -> Outcome:
        return Outcome(len(case), " | ".join([self.read_record(item) for item in case][:3]))

    def read_record(self, item: bytes) -> str:
        word, _, content = item.partition(b" ")
        readers: dict[bytes, Callable[[Path], object]] = {
            b"state": lambda file: StateFile(file).read(),
            b"report": lambda file: read_record(file, FollowerReport),
            b"config": lambda file: decode_settings(RouterConfig, read_yaml(file)),
            b"scheduling": lambda file: load_scheduling(user_file(str(file), "scheduling")),
            b"program": lambda file: load_program(f"{file}:good", {"limit": "5"}),
        }
        kind = word if word in readers else list(readers)[len(item) % len(readers)]
        file = self._folder / "file"
        file.write_bytes(content)
        try:
            readers[kind](file)
            return f"{kind.decode()} read"
        except TercetError as error:
            return f"{kind.decode()} {kind_of(error)[:50]}"


@asynccontextmanager
async def _files() -> AsyncGenerator[FilesRoom]:
    with tempfile.TemporaryDirectory() as directory:
        yield FilesRoom(Path(directory))


def _file_cases() -> list[Case]:
    member = MemberState(EngineAddress("p", "http://p", "prefill", {"zone": "a"}))
    plan = Plan(program="balanced", args={"balance_ratio": 0.5})
    state = FleetState(members=(member,), program=ProgramInUse(2, plan), before=ProgramInUse(1, Plan(program="auto")))
    report = FollowerReport(1, True, 3, "", {"p": EngineReport(2, True)})
    config = {
        "engines": ["http://e:1,role=prefill"],
        "program": "balanced",
        "program-args": {"min_send": 1},
        "port": 8000,
    }
    return [
        [b"state " + msgspec.json.encode(state)],
        [b"report " + msgspec.json.encode(report)],
        [b"config " + msgspec.json.encode(config)],
        [b"config engines: [http://e:1]\nlimits: {max-queued: 3}\n"],
        [b"scheduling " + SCHEDULING.encode()],
        [b"program " + PROGRAM.encode()],
    ]


TARGETS = (
    Target("admin", _admin_cases, Named(), _admin, "calls"),
    Target("engine_answers", _answer_cases, Named(), _client, "calls"),
    Target("files", _file_cases, Named(), _files, "calls"),
)
