"""Starting and stopping processes, with small scripts in the place of vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from tercet.cluster import child_process, engine_command, local, ports, running_fleet
from tercet.cluster.child_process import Process, StartFailed, StartRefused, describe_exit
from tercet.cluster.engine_command import GIB
from tercet.cluster.local import local_fleet
from tercet.cluster.ports import free_ports, require_free, url_of
from tercet.cluster.running_fleet import RunningFleet, read_events
from tercet.cluster.up_config import UpConfig
from tercet.protocol import BadRequest
from tercet.settings import EngineAddress
from tercet.settings.fleet_settings import BatchSettings
from tests.longest_wait import LONGEST_WAIT_S, until

pytestmark = pytest.mark.processes

SERVER = """
import http.server, signal, subprocess, sys, time
port, mode = int(sys.argv[1]), sys.argv[2]
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # before it says that it is there
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
if mode == "dies":
    print("the model is not there"); sys.exit(3)
if mode == "refuses":
    print("there is no such flag"); sys.exit(2)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_DELETE(self):
        print("deleted", self.path, flush=True)
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
    def log_message(self, *args): pass
if mode == "slow":
    time.sleep(600)
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def argv_of(port: int, mode: str = "serves") -> list[str]:
    return [sys.executable, "-c", SERVER, str(port), mode]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Engines and router become scripts; the dict says which mode each name has."""
    modes: dict[str, str] = {}
    monkeypatch.setattr(engine_command, "available_memory", lambda: 64 * GIB)  # scripts need none of this machine's
    monkeypatch.setattr(local, "engine_argv", lambda spec: argv_of(spec.port, modes.get(spec.name, "serves")))
    monkeypatch.setattr(local, "router_argv", lambda config, _: argv_of(config.port, modes.get("router", "serves")))
    return modes


def config_of(tmp_path: Path, **fields: object) -> UpConfig:
    return UpConfig(**{"port": 0, "log_dir": str(tmp_path / "logs"), **fields})  # type: ignore[arg-type]


def children_of(logs: Path) -> list[int]:
    """Grandchildren that the scripts wrote into their logs."""
    return [pid for log in logs.glob("*.log") for pid in children_of_log(log)]


def children_of_log(log: Path) -> list[int]:
    first, _, _ = log.read_text().partition("\n")
    return [int(first.split()[1])] if first.startswith("child") else []


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def gone(pids: list[int], seconds: float = LONGEST_WAIT_S) -> bool:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


def running_children() -> dict[int, list[str]]:
    """Command lines of this process's children and theirs."""
    found: dict[int, list[str]] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = process.cmdline()
    return found


async def test_a_fleet_starts_and_leaves_nothing(tmp_path: Path, scripts: dict[str, str]) -> None:
    events: list[tuple[str, str]] = []
    async with local_fleet(config_of(tmp_path), "m", lambda name, state: events.append((name, state))) as fleet:
        assert [engine.role for engine in fleet.engines] == ["prefill", "decode"]
        started = children_of(fleet.log_dir)
        assert len(started) == 3
    assert gone(started)
    assert {name for name, state in events if state.startswith("ready")} == {"prefill-0", "decode-0", "router"}


async def test_flags_that_vllm_refuses_end_the_start_before_any_engine_begins(
    tmp_path: Path, scripts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, str]] = []
    before = running_children()  # other tests of this process may have left some that serve all of them
    refused = "import sys; print('Traceback'); print('tercet: --max-model-len: is -5'); sys.exit(2)"
    monkeypatch.setattr(local, "flags_argv", lambda _: [sys.executable, "-c", refused])
    with pytest.raises(StartRefused, match=r"engines: --max-model-len: is -5 \(log: ") as raised:
        async with local_fleet(config_of(tmp_path), "m", lambda name, state: said.append((name, state))):
            pytest.fail("a fleet with refused flags has started")
    assert raised.value.exit_code == 2
    assert said == [("engines", "loading: vLLM checks the flags")]
    assert not [*(tmp_path / "logs").glob("*-0.log")]
    assert gone([*(running_children().keys() - before.keys())])


async def test_flags_that_vllm_accepts_are_announced(
    tmp_path: Path, scripts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(local, "flags_argv", lambda _: [sys.executable, "-c", ""])
    async with local_fleet(config_of(tmp_path), "m", lambda name, state: said.append((name, state))):
        assert said[1] == ("engines", "vLLM accepts the flags")


@pytest.mark.parametrize("who", ["prefill-0", "decode-0", "router"])
async def test_one_that_dies_at_start_is_said_with_its_log(tmp_path: Path, scripts: dict[str, str], who: str) -> None:
    scripts[who] = "dies"
    with pytest.raises(StartFailed, match="the model is not there") as raised:
        async with local_fleet(config_of(tmp_path), "m", lambda *_: None):
            pytest.fail("it should not have started")
    assert raised.value.message.startswith(f"{who} ended with exit code 3")
    assert gone(children_of(tmp_path / "logs"))


async def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    process = Process("stubborn", argv_of(free_ports("127.0.0.1", 1)[0], "stubborn"), {}, tmp_path / "s.log", 0.5)
    await process.start()
    await until(lambda: children_of(tmp_path))
    await process.stop()
    assert process.returncode == -signal.SIGKILL
    assert gone(children_of(tmp_path))


@pytest.mark.parametrize("after", [0.0, 0.05, 0.3, 1.0])
async def test_cancelled_at_any_moment_it_leaves_nothing(tmp_path: Path, scripts: dict[str, str], after: float) -> None:
    scripts["decode-0"] = "slow"

    async def start() -> None:
        async with local_fleet(config_of(tmp_path), "m", lambda *_: None):
            await asyncio.sleep(60)

    task = asyncio.create_task(start())
    await asyncio.sleep(after)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gone(children_of(tmp_path / "logs"))


async def test_an_engine_that_ends_later_and_stays_dead_is_reported_and_a_router_ends_the_fleet(
    tmp_path: Path, scripts: dict[str, str]
) -> None:
    said: list[str] = []
    async with local_fleet(config_of(tmp_path, engine_restarts=0), "m", lambda *_: None) as fleet:
        watching = asyncio.create_task(fleet.until_broken(lambda name, state: said.append(f"{name} {state}")))
        _kill(fleet, "prefill-0")
        await until(lambda: said)
        assert "prefill-0 was killed by SIGKILL" in said[0]
        assert not watching.done()
        os.killpg(fleet.router.pid or 0, signal.SIGKILL)
        with pytest.raises(StartFailed, match="router was killed by SIGKILL"):
            await watching


def _kill(fleet: RunningFleet, name: str) -> None:
    process = next(engine.process for engine in fleet.engines if engine.name == name)
    assert process.pid
    os.kill(process.pid, signal.SIGKILL)


async def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path, scripts: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadRequest, match=f"--port.*{port}"):
            async with local_fleet(config_of(tmp_path, port=port), "m", lambda *_: None):
                pytest.fail("it should not have started")
        with pytest.raises(BadRequest):
            require_free("127.0.0.1", port)
    assert not list(tmp_path.glob("logs/*.log"))


async def test_the_last_engines_end_is_the_fleets(tmp_path: Path, scripts: dict[str, str]) -> None:
    async with local_fleet(config_of(tmp_path, engine_restarts=0), "m", lambda *_: None) as fleet:
        watching = asyncio.create_task(fleet.until_broken(lambda *_: None))
        _kill(fleet, "prefill-0")
        _kill(fleet, "decode-0")
        with pytest.raises(StartFailed, match="no engine is left"):
            await watching


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_fleet, "FIRST_PAUSE", 0.01)


async def test_one_that_refuses_what_it_was_given_is_a_refusal(tmp_path: Path, scripts: dict[str, str]) -> None:
    scripts["decode-0"] = "refuses"
    with pytest.raises(StartRefused, match=r"decode-0 ended with exit code 2.*\n.*\n?there is no such flag") as raised:
        async with local_fleet(config_of(tmp_path), "m", lambda *_: None):
            pytest.fail("it should not have started")
    assert raised.value.exit_code == 2
    assert gone(children_of(tmp_path / "logs"))


async def test_a_refusal_in_a_sentence_is_all_that_is_said(tmp_path: Path) -> None:
    script = "import sys; print('a traceback'); print('tercet: --max-model-len: is -5'); sys.exit(2)"
    process = Process("decode-0", [sys.executable, "-c", script], {}, tmp_path / "d.log")
    await process.start()
    assert await process.ended() == 2
    failure = process.failure("ended")
    assert isinstance(failure, StartRefused)
    assert failure.message == f"decode-0: --max-model-len: is -5 (log: {tmp_path}/d.log)"
    await process.stop()


async def test_an_engine_that_dies_is_started_anew_where_it_was(
    tmp_path: Path, scripts: dict[str, str], soon: None
) -> None:
    said: list[str] = []
    async with local_fleet(config_of(tmp_path), "m", lambda *_: None) as fleet:
        watching = asyncio.create_task(fleet.until_broken(lambda name, state: said.append(f"{name} {state}")))
        engine = fleet.engines[0]
        first, url = engine.process, engine.url
        _kill(fleet, "prefill-0")
        await until(lambda: any("prefill-0 ready" in line for line in said))
        assert engine.url == url
        assert said[0].startswith("prefill-0 was killed by SIGKILL; restart 1 of 5 in 0.01 s; log: ")
        assert [process.log.name for process in (first, engine.process)] == ["prefill-0.log", "prefill-0-2.log"]
        assert children_of_log(first.log) != children_of_log(engine.process.log)
        assert not watching.done()
        watching.cancel()
    assert gone(children_of(tmp_path / "logs"))


async def test_one_that_dies_again_and_again_is_left_alone_and_all_of_them_end_the_fleet(
    tmp_path: Path, scripts: dict[str, str], soon: None
) -> None:
    said: list[str] = []
    async with local_fleet(config_of(tmp_path, engine_restarts=2), "m", lambda *_: None) as fleet:
        for engine in fleet.engines:
            engine.process._argv = argv_of(1, "dies")
        watching = asyncio.create_task(fleet.until_broken(lambda name, state: said.append(f"{name} {state}")))
        _kill(fleet, "decode-0")
        await until(lambda: any("no further restart" in line for line in said))
        assert not watching.done()
        log = fleet.router.log
        await until(lambda: "deleted /tercet/v1/engines/decode-0" in log.read_text())  # the router lists it no more
        _kill(fleet, "prefill-0")
        with pytest.raises(StartFailed, match="prefill-0 ended with exit code 3; no engine is left"):
            await asyncio.wait_for(watching, LONGEST_WAIT_S)
    assert [line.split("; log")[0] for line in said if line.startswith("decode-0") and "loading" not in line] == [
        "decode-0 was killed by SIGKILL; restart 1 of 2 in 0.01 s",
        "decode-0 ended with exit code 3; restart 2 of 2 in 0.02 s",
        "decode-0 ended with exit code 3; no further restart",
    ]
    assert gone(children_of(tmp_path / "logs"))


async def test_an_engine_that_the_system_does_not_start_again_is_left_and_the_fleet_runs_on(
    tmp_path: Path, scripts: dict[str, str], soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    said: list[str] = []
    async with local_fleet(config_of(tmp_path, engine_restarts=2), "m", lambda *_: None) as fleet:
        watching = asyncio.create_task(fleet.until_broken(lambda name, state: said.append(f"{name} {state}")))
        monkeypatch.setattr(child_process.tempfile, "mkdtemp", full)
        _kill(fleet, "decode-0")
        await until(lambda: any("no further restart" in line for line in said))
        assert not watching.done()
        watching.cancel()
    assert [line.split("; log")[0] for line in said] == [
        "decode-0 was killed by SIGKILL; restart 1 of 2 in 0.01 s",
        "decode-0 cannot be started: [Errno 28] No space left on device; restart 2 of 2 in 0.02 s",
        "decode-0 cannot be started: [Errno 28] No space left on device; no further restart",
    ]
    assert gone(children_of(tmp_path / "logs"))


async def test_a_start_that_the_system_refuses_is_an_error_of_one_line(
    tmp_path: Path, scripts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left() -> tuple[int, int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(child_process.os, "pipe", none_left)
    with pytest.raises(StartFailed, match=r"cannot be started: \[Errno 24\] Too many open files"):
        async with local_fleet(config_of(tmp_path), "m", lambda *_: None):
            pytest.fail("it should not have started")


@pytest.mark.parametrize("after", [0.0, 0.02, 0.1, 0.3])
async def test_cancelled_while_an_engine_is_started_anew_it_leaves_nothing(
    tmp_path: Path, scripts: dict[str, str], soon: None, after: float
) -> None:
    said: list[str] = []
    before = running_children()  # the worker of the tests may have some, as multiprocessing's resource tracker
    async with local_fleet(config_of(tmp_path), "m", lambda *_: None) as fleet:
        watching = asyncio.create_task(fleet.until_broken(lambda name, state: said.append(f"{name} {state}")))
        _kill(fleet, "prefill-0")
        await until(lambda: bool(said))
        await asyncio.sleep(after)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    assert gone(children_of(tmp_path / "logs"))
    assert running_children().items() <= before.items()


async def test_what_a_dead_engine_leaves_behind_is_ended_at_once(tmp_path: Path, scripts: dict[str, str]) -> None:
    async with local_fleet(config_of(tmp_path), "m", lambda *_: None) as fleet:
        watching = asyncio.create_task(fleet.until_broken(lambda *_: None))
        _kill(fleet, "prefill-0")
        (child,) = children_of_log(fleet.log_dir / "prefill-0.log")
        assert await asyncio.to_thread(gone, [child])
        watching.cancel()


async def test_the_router_ends_before_the_engines(tmp_path: Path, scripts: dict[str, str]) -> None:
    scripts["router"] = "stubborn"
    hurry, running = asyncio.Event(), list[bool]()
    async with local_fleet(config_of(tmp_path), "m", lambda *_: None, hurry) as fleet:
        leaving = asyncio.create_task(asyncio.sleep(0.5))
        leaving.add_done_callback(
            lambda _: (running.extend(engine.process.returncode is None for engine in fleet.engines), hurry.set())
        )
    assert running == [True, True]
    assert fleet.router.returncode == -signal.SIGKILL
    assert gone(children_of(tmp_path / "logs"))


async def test_in_a_hurry_engines_that_do_not_end_are_killed_before_their_time_is_over(
    tmp_path: Path, scripts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "HURRY_SECONDS", 0.1)
    monkeypatch.setattr(Process.__init__, "__defaults__", (600.0, None, ()))  # what it has to end by itself
    scripts["decode-0"] = "stubborn"
    hurry = asyncio.Event()
    hurry.set()
    async with asyncio.timeout(60):
        async with local_fleet(config_of(tmp_path), "m", lambda *_: None, hurry) as fleet:
            pass
    assert fleet.engines[1].process.returncode == -signal.SIGKILL
    assert gone(children_of(tmp_path / "logs"))


def test_engines_are_not_reachable_from_elsewhere_even_when_the_router_is() -> None:
    specs = local.engine_specs(UpConfig(host="0.0.0.0", both=1), "m")
    assert {spec.host for spec in specs} == {"127.0.0.1"}
    assert len({spec.port for spec in specs}) == 3


@pytest.mark.parametrize("host", ["999.1.1.1", "203.0.113.7", "no such host"])
def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(BadRequest, match="--host"):
        require_free(host, 0)
    with pytest.raises(BadRequest, match="--host"):
        free_ports(host, 1)


@pytest.mark.parametrize(
    ("host", "url"),
    [("10.0.0.1", "http://10.0.0.1:80"), ("0.0.0.0", "http://127.0.0.1:80"), ("::1", "http://[::1]:80")],
)
def test_urls(host: str, url: str) -> None:
    assert url_of(host, 80) == url


@pytest.mark.parametrize("directory", ["/proc/nowhere", "/dev/null/logs"])
async def test_a_log_directory_that_cannot_be_used_is_named(directory: str) -> None:
    with pytest.raises(BadRequest, match="--log-dir"):
        async with local_fleet(UpConfig(port=0, log_dir=directory), "m", lambda *_: None):
            pytest.fail("it should not have started")


@pytest.mark.parametrize("directory", ["/proc/nowhere", "/dev/null/batches"])
async def test_a_directory_of_batches_that_cannot_be_used_is_named_before_an_engine_starts(
    directory: str, tmp_path: Path
) -> None:
    config = UpConfig(port=0, log_dir=str(tmp_path), batches=BatchSettings(directory=directory))
    with pytest.raises(BadRequest, match=f"--batches: {directory} cannot be used"):
        async with local_fleet(config, "m", lambda *_: None):
            pytest.fail("it should not have started")
    assert not list(tmp_path.glob("*.log"))


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "ended with exit code 0"), (3, "ended with exit code 3"), (-9, "was killed by SIGKILL"),
     (137, "was killed by SIGKILL"), (-11, "was killed by SIGSEGV"), (255, "ended with exit code 255")],
)  # fmt: skip
def test_exit_codes_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


async def test_a_secret_reaches_engines_and_router_and_no_command_line(scripts: dict[str, str], tmp_path: Path) -> None:
    config = UpConfig(port=0, log_dir=str(tmp_path), secret="s3cret")
    async with local_fleet(config, "m", lambda *_: None) as fleet:
        for engine in fleet.engines:
            assert engine.process.pid is not None
            found = psutil.Process(engine.process.pid)
            assert found.environ()["TERCET_SECRET"] == "s3cret"
            assert "s3cret" not in " ".join(found.cmdline())
    router = local.router_config(config, "m", 8000, [EngineAddress("e", "http://e")])
    assert router.secret == "s3cret"


async def test_what_the_router_logs_from_warnings_on_is_heard(tmp_path: Path) -> None:
    log, heard = tmp_path / "router.log", list[str]()
    line = "{} 11-23 12:00:00 [tercet.{}] {}\n"
    log.write_text(line.format("WARNING", "events", "engine_back: before anybody listened"))
    reading = asyncio.create_task(read_events(log, heard.append))
    await asyncio.sleep(0)
    with log.open("a") as more:
        for part in (
            line.format("INFO", "events", "retry: s: p again"), line.format("WARNING", "router", "another logger"),
            "Traceback (most recent call last):\n", "WARNING 11-23 12:00:00 [tercet.events] reload_ref",
        ):  # fmt: skip
            more.write(part)
        more.flush()
        await asyncio.sleep(0)
        more.write("used: mine.py: no\nWARNING 11-23")
    try:
        await until(lambda: heard)
    finally:
        reading.cancel()
    assert heard == ["reload_refused: mine.py: no"]


def test_free_ports_are_not_those_of_outgoing_connections_and_come_once() -> None:
    found = [port for _ in range(50) for port in free_ports("127.0.0.1", 3)]
    assert len(set(found)) == 150
    assert all(12_000 <= port < 30_000 for port in found)


def test_a_port_that_is_taken_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        monkeypatch.setattr(ports, "_FREE", range(port, port + 1))
        monkeypatch.setattr(ports, "_returned", set[int]())
        with pytest.raises(BadRequest, match="--host"):
            free_ports("127.0.0.1", 1)
    assert free_ports("127.0.0.1", 1) == [port]
