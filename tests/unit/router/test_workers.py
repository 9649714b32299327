"""Two real workers behind one port, over a simulated engine: changes reach both, a lost one is replaced."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import pytest

from tercet.cluster.model import resolve_model
from tercet.cluster.ports import free_ports
from tercet.settings.process_settings import COLD, WARM_PARENT_VARIABLE
from tercet_lab.sim import load_profile
from tercet_lab.sim.sim_server import ServerConfig, serving
from tests.longest_wait import LONGEST_WAIT_S, wait_until
from tests.warm import start_guarded, warm_parent

pytestmark = pytest.mark.processes

WAIT_SECONDS = 400
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


def ask(port: int, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """One request on a connection of its own, so that any worker may get it."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json", **headers}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
            return answer.status, json.loads(text) if text.startswith(("{", "[")) else text
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")


def metric(port: int, name: str) -> float:
    found = re.search(rf"^{name}\S* (\S+)$", ask(port, "GET", "/metrics")[1], re.MULTILINE)
    return float(found[1]) if found else 0.0


def lines(port: int, name: str) -> list[str]:
    return [line for line in ask(port, "GET", "/metrics")[1].splitlines() if line.startswith(f"{name}{{")]


def traces_of_ttft(port: int) -> set[str]:
    """Trace ids of the exemplars that whichever worker is scraped has."""
    said: str = ask(port, "GET", "/metrics", accept="application/openmetrics-text")[1]
    return {*re.findall(r"^tercet_ttft_seconds_bucket.* # \{.*trace_id=\"(\w+)\"", said, re.MULTILINE)}


def serves(router: LiveRouter, workers: int) -> bool:
    port, process = router
    assert process.poll() is None, "the router has ended"
    try:
        return metric(port, "tercet_workers") == workers
    except OSError:
        return False


until = partial(wait_until, seconds=WAIT_SECONDS, every=0.2)


def children(pid: int) -> set[int]:
    try:
        return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    except FileNotFoundError:
        return set()


def workers_of(supervisor: int) -> set[int]:
    """The warm parent, the supervisor's only child, has forked them; without one they are the supervisor's children."""
    below = children(supervisor)
    return set[int]().union(*map(children, below)) if len(below) == 1 else below


class LiveRouter(NamedTuple):
    """A router; `process` ends when the supervisor does, with its code."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def supervisor(self) -> int:
        """Forked by the tests' warm parent, in the group of `process`; or a child of it."""
        group = {each.pid: each.ppid() for each in psutil.process_iter() if _group(each.pid) == self.process.pid}
        guards = _command(self.process.pid)  # a second process watches the guard
        group = {pid: parent for pid, parent in group.items() if _command(pid) not in ([], guards)}
        return next(pid for pid, parent in group.items() if parent not in group)

    def interrupt(self) -> None:
        """As from a terminal: the supervisor and its workers."""
        for pid in (self.supervisor, *workers_of(self.supervisor)):
            os.kill(pid, signal.SIGINT)


def _command(pid: int) -> list[str]:
    """Its command line; empty once it has ended, also before it is waited for."""
    try:
        return psutil.Process(pid).cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    loop, stop, ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
    port = free_ports("127.0.0.1", 1)[0]
    url = f"http://127.0.0.1:{port}"

    async def run() -> None:
        profile = msgspec.structs.replace(load_profile("llama-3.1-8b-h100-tp1"), max_model_len=2048)
        async with serving(ServerConfig(name="e", profile=profile, port=port, url=url, model="m")):
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), daemon=True)
    thread.start()
    assert ready.wait(200)
    yield url
    loop.call_soon_threadsafe(stop.set)
    thread.join(LONGEST_WAIT_S)


@pytest.fixture(scope="module")
def one_import(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with warm_parent(tmp_path_factory.mktemp("warm") / "imports.log"):
        yield


@pytest.fixture
def router(engine: str, one_import: None, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LiveRouter]:
    port = free_ports("127.0.0.1", 1)[0]
    command = [
        sys.executable, "-m", "tercet.cli", "router", "--engine", f"{engine},name=e", "--port", str(port), "--model",
        resolve_model("smollm2", lambda _: None), "--served-model-name", "m", "--program", "data_parallel",
        # The engine is a thread of a process that does other work, too.
        "--workers", "2", "--log-level", "warning", "--stuck-after", "60",
    ]  # fmt: skip
    env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if getattr(request, "param", None) is not None:
        env[WARM_PARENT_VARIABLE] = request.param
    with (tmp_path / "router.log").open("wb") as log:
        process = start_guarded(command, env, log)
    try:
        yield LiveRouter(port, process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def said_by_all(port: int) -> set[tuple[int, str, bool]]:
    """What is in use and whether the engine is drained, asked often enough that both workers were."""
    found = set[tuple[int, str, bool]]()
    for _ in range(12):
        program, engines = ask(port, "GET", "/tercet/v1/program")[1], ask(port, "GET", "/tercet/v1/engines")[1]
        found.add((program["version"], program["program"], engines[0]["draining"]))
    return found


@pytest.mark.timeout(590)
def test_workers_are_of_one_mind_and_replaced(router: LiveRouter) -> None:
    port, process = router
    until(lambda: serves(router, 2))
    workers = workers_of(router.supervisor)
    assert len(workers) == 2
    assert ask(port, "POST", "/v1/chat/completions", CHAT)[0] == 200
    until(lambda: len(lines(port, "tercet_engine_waiting")) > 0)
    assert lines(port, "tercet_engine_waiting") == ['tercet_engine_waiting{engine="e"} 0.0'], "once, not by worker"
    for number in range(1, 9):
        traced = f"00-{number:032x}-{number:016x}-01"
        assert ask(port, "POST", "/v1/chat/completions", CHAT, traceparent=traced)[0] == 200
    until(lambda: f"{8:032x}" in traces_of_ttft(port))
    assert len({frozenset(traces_of_ttft(port)) for _ in range(10)}) == 1, "both say what either has"
    assert metric(port, "tercet_ttft_by_engine_seconds_count") == metric(port, "tercet_ttft_seconds_count") >= 8

    status, found = ask(port, "PUT", "/tercet/v1/program", {"program": "disaggregated"})
    assert (status, found["version"]) == (200, 2)
    assert ask(port, "PUT", "/tercet/v1/program", {"program": "nonsense"})[0] == 400
    assert (
        ask(port, "PUT", "/tercet/v1/program", {"program": "data_parallel", "args": {"pick": "least_loaded"}})[0] == 200
    )
    assert ask(port, "POST", "/tercet/v1/engines/e/drain")[0] == 200
    assert said_by_all(port) == {(3, "data_parallel", True)}

    lost = min(workers)
    os.kill(lost, signal.SIGKILL)
    until(lambda: lost not in workers_of(router.supervisor) and serves(router, 2))
    assert said_by_all(port) == {(3, "data_parallel", True)}
    assert ask(port, "DELETE", "/tercet/v1/engines/e/drain")[0] == 200
    assert all(ask(port, "POST", "/v1/chat/completions", CHAT)[0] == 200 for _ in range(6))
    until(lambda: metric(port, "tercet_sequences_total") >= 6)

    workers = workers_of(router.supervisor)
    process.terminate()
    assert process.wait(60) == 0
    until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


@pytest.mark.timeout(590)
@pytest.mark.parametrize("router", [COLD], indirect=True)
def test_workers_that_import_by_themselves_end_with_their_supervisor(router: LiveRouter) -> None:
    until(lambda: serves(router, 2))
    workers = workers_of(router.supervisor)
    assert len(workers) == 2
    os.kill(router.supervisor, signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


class Answer:
    """A stream that a client reads, from the moment it begins."""

    def __init__(self, port: int, tokens: int) -> None:
        body = json.dumps({**CHAT, "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions", body, {"content-type": "application/json"}
        )
        self._answer = urllib.request.urlopen(request, timeout=60)
        self._answer.readline()  # it is under way

    def events(self) -> list[Any]:
        """What is left of it, without its end mark, which must be there."""
        lines = [line.removeprefix("data: ") for line in self._answer.read().decode().splitlines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


def refuses(port: int) -> bool:
    """Whether the router takes nothing new; it must go on listening."""
    try:
        status, found = ask(port, "POST", "/v1/chat/completions", CHAT)
    except (ConnectionResetError, urllib.error.URLError):
        return False  # a worker that had nothing left has ended, and took the connection just before
    return status == 503 and found["error"]["code"] == "shutting_down"


@pytest.mark.timeout(590)
def test_told_to_stop_under_load_they_finish_what_runs(router: LiveRouter) -> None:
    port, process = router
    until(lambda: serves(router, 2))
    answers = [Answer(port, 600) for _ in range(2)]
    router.interrupt()
    until(lambda: refuses(port))
    for answer in answers:
        events = answer.events()
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert len(events) >= 600
    assert process.wait(60) == 0


@pytest.mark.timeout(590)
def test_told_twice_they_end_at_once_and_say_so_in_each_stream(router: LiveRouter) -> None:
    port, process = router
    until(lambda: serves(router, 2))
    answers = [Answer(port, 1900) for _ in range(2)]
    router.interrupt()
    # Each connection is any worker's; two signals are one to a worker that has not taken the first.
    until(lambda: all(refuses(port) for _ in range(20)))
    router.interrupt()
    for answer in answers:
        error = answer.events()[-1]["error"]
        assert error["code"] == "shutting_down"
        assert ("shutting down" in error["message"], "http" in error["message"]) == (True, False)
    assert process.wait(60) == 0
