"""What the command line refuses, and how: exit code 2 and one line that names the flag. Nothing is started."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tercet import __version__
from tercet.cli import app
from tercet.cli.app import _command, require_values
from tercet.cli.setting_flags import unknown_variables
from tercet.cli.terminal import NobodyReads, announce, say
from tercet.cluster.ports import free_ports
from tercet.protocol import BadRequest, EngineError
from tercet.settings import key_values
from tercet.settings.engine_addresses import engine_address

from .closed_output import with_nobody_reading


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("up --prefill x", "--prefill"),
        ("up --prefill -1", "--prefill"),
        ("up --port 70000", "--port"),
        ("up --kv-cache-gib 0", "--kv-cache-gib"),
        ("up --nonsense", "--nonsense"),
        ("up stray", "stray"),
        ("up --prefill 0 --decode 0", "--prefill"),
        ("up --prefill 2000", "prefill"),
        ("up --program nothing --port 0", "program"),
        ("up --program no.py:f --port 0", "program"),
        ("up --program-arg novalue --port 0", "--program-arg"),
        ("up --program-arg min_send=many --port 0", "min_send"),
        ("up --program-arg nonsense=1 --port 0", "nonsense"),
        ("up --model ./not/here --port 0", "model"),
        ("up --config /not/here.yaml", "--config"),
        ("up --host 999.1.1.1", "--host"),
        ("up --host 203.0.113.7", "--host"),
        ("up -- --port 1", "--port"),
        ("up -- --served_model_name=x", "--served-model-name"),
        ("engine --port 0", "--port"),
        ("engine --port", "--port"),
        ("engine --model /not/here", "model"),
        ("engine --model /tmp --print -- --model x", "--model"),
        ("engine --model /tmp --print -- -tp none", "--tensor-parallel-size"),
        ("engine --model /tmp --print -- --kv-transfer-config no", "--kv-transfer-config"),
        ("router", "--engine"),
        ("router --engine nowhere", "--engine"),
        ("router --engine http://h:1,role=cook", "--engine"),
        ("router --engine http://h:1,name=a --engine http://h:2,name=a --model /tmp", "engine"),
        ("router --engine http://h:1 --log-level loud", "--log-level"),
        ("router --engine http://h:1 --model /tmp -- --host x", "--host"),
        ("demo --max-tokens 0", "--max-tokens"),
        ("nothing", "nothing"),
        ("--nonsense", "--nonsense"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(line: str, names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app._run(line.split()) == 2
    said = capsys.readouterr()
    assert said.err.startswith("tercet: ")
    assert said.err.count("\n") == 1, said.err
    assert names in said.err
    assert said.out == ""


@pytest.mark.parametrize("command", ["up", "engine", "router"])
def test_a_port_in_use_is_named(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        engines = ["--engine", "http://127.0.0.1:1"] if command == "router" else []
        assert app._run([command, "--model", str(tmp_path), "--port", port, *engines]) == 2
    said = capsys.readouterr().err
    assert "--port" in said
    assert port in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("line", ["--help", "up --help", "engine --help", "router --help", "demo --help"])
def test_help(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app._run(line.split()) == 0
    text = capsys.readouterr().out
    assert len(text) > 200
    if line.split()[0] in ("up", "engine", "router"):
        assert "Examples" in text


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert app._run(["--version"]) == 0
    assert capsys.readouterr().out == f"tercet {__version__}\n"


@pytest.mark.processes
def test_as_a_process_too() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tercet.cli", "up", "--port", "x"], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert re.fullmatch(r"tercet: .*--port.*\n", ended.stderr)


@pytest.mark.processes
@pytest.mark.parametrize("line", ["--version", "bench profile", "bench profile llama-3.1-8b-h100-tp1"])
def test_a_reader_that_has_left_is_nothing_to_complain_of(line: str) -> None:
    ended = with_nobody_reading(line.split())
    assert (ended.returncode, ended.stderr) == (app.NOBODY_READS, "")


def test_nobody_who_reads_is_no_reason_to_stop_a_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        with pytest.raises(NobodyReads):
            say("to somebody")
        announce("ready")
        say("to nobody, from now on")


def test_what_fails_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> None:
        raise EngineError("the engine said no")

    monkeypatch.setattr("tercet.cli.demo.run_fleet", fail)
    assert app._run(["demo"]) == 1
    assert capsys.readouterr().err == "tercet: the engine said no\n"


def test_ctrl_c_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tercet.cli.demo.run_fleet", interrupt)
    assert app._run(["demo"]) == 130


def test_engine_print_is_the_plain_vllm_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app._run(["engine", "--model", str(tmp_path), "--print", "--", "--max-num-seqs", "4"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("VLLM_PLUGINS=tercet TERCET_ENGINE_NAME=127.0.0.1:8001 ")
    assert "python -m vllm.entrypoints.openai.api_server" in said
    assert said.endswith(" --max-num-seqs 4\n")


def test_engine_addresses() -> None:
    found = engine_address("http://h:1/,role=decode,name=d", 0)
    assert (found.url, found.role, found.name) == ("http://h:1", "decode", "d")
    assert engine_address("http://h:1", 4).name == "engine-4"


@pytest.mark.parametrize("given", ["h:1", "http://h:1,role=cook", "http://h:1,rolle=decode", "http://h:1,decode"])
def test_bad_engine_addresses(given: str) -> None:
    with pytest.raises(BadRequest, match="--engine"):
        engine_address(given, 0)


def test_key_values_keep_what_follows_the_first_equals_sign() -> None:
    assert key_values(["a=b=c", "d="], "--x") == {"a": "b=c", "d": ""}


@pytest.mark.processes
@pytest.mark.parametrize(("typed", "expected"), [("tercet sta", "status"), ("tercet engines dr", "drain")])
def test_the_shell_completes_commands(typed: str, expected: str) -> None:
    env = {
        **os.environ, "_TERCET_COMPLETE": "complete_bash", "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }  # fmt: skip
    ended = subprocess.run([sys.executable, "-m", "tercet.cli"], capture_output=True, text=True, timeout=60, env=env)
    assert (ended.returncode, ended.stdout.split()) == (0, [expected])


# Runs each line of its input in a child of its own, and prints how many modules that loaded.
COUNTED = """
import atexit, os, sys
from tercet.cli import main
for line in sys.stdin.read().splitlines():
    child = os.fork()
    if child == 0:
        sys.argv[1:] = line.split()
        counts = os.dup(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        atexit.register(lambda: os.write(counts, f"{len(sys.modules)} {line}\\n".encode()))
        main()
        sys.exit()
    os.waitpid(child, 0)
"""
LITTLE = (
    "--version", "nothing", "stauts", "status", "status --port x", "up --port x", "engine --port 0", "down",
    "engines add", "sim --record -1", "bench serve --request-rate x", "engines drain x", "scale 3", "chat hi",
    "upgrade", "up --config /nope", "bench report", "bench profile --repeats x", "sim --arrival bogus",
    "advise --trace /nope --slo ttft:1",
)  # fmt: skip


@pytest.mark.processes
def test_a_command_that_does_little_imports_little(tmp_path: Path) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    env = {**os.environ, "TERCET_URL": f"http://127.0.0.1:{port}", "TERCET_CACHE": str(tmp_path)}
    paths = [" ".join(path) for path, _ in commands(_command())]
    lines = [*LITTLE, *(f"{path} {flag}".strip() for path in paths for flag in ("--help", "--bogus"))]
    done = subprocess.run(
        [sys.executable, "-c", COUNTED], capture_output=True, text=True, check=False, env=env, input="\n".join(lines)
    )
    counts = {line: int(count) for count, line in (each.split(" ", 1) for each in done.stdout.splitlines())}
    assert counts.keys() == {*lines}, done.stderr
    assert not {line: count for line, count in counts.items() if count > 350}


@pytest.mark.processes
def test_a_simulation_imports_neither_clients_nor_transports() -> None:
    shown = "sorted({'aiohttp', 'zmq', 'tercet.transport', 'tercet.wire.client'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", COUNTED.replace("len(sys.modules)", shown)], capture_output=True, text=True, check=True,
        input="sim --num-prompts 2 --fleet both=1",
    )  # fmt: skip
    assert done.stdout == "[] sim --num-prompts 2 --fleet both=1\n"


# A flag that needs a value does not take the next flag as its value, for each flag of each command.


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name in getattr(command, "commands", ()):
        yield from commands(command.commands[name], (*path, name))


def flags(command: Any) -> list[tuple[str, bool]]:
    """Each long flag, and whether it needs a value."""
    return [(name, not each.is_flag) for each in command.params for name in each.opts if name.startswith("--")]


def test_no_flag_takes_a_flag_as_its_value() -> None:
    for path, command in commands(_command()):
        for (flag, needs_value), (after, _) in pairwise([*flags(command), ("--help", False)]):
            if needs_value:
                with pytest.raises(BadRequest, match=f"^{flag}: needs a value, and {after} follows it$"):
                    require_values(_command(), [*path, flag, after, "x"])
            else:
                require_values(_command(), [*path, flag, after])


@pytest.mark.parametrize(
    "line",
    [
        "up --simulate smollm2 --port 1", "up --model=--port 1", "engine m -- --max-num-seqs --port", "nothing --port",
        "program p --program-arg a=--port", "bench nothing --fleet --program", "", "up --nope --port",
    ],
)  # fmt: skip
def test_other_lines_are_left_to_the_command(line: str) -> None:
    require_values(_command(), line.split())


# Mistyped variables are named when a server starts.


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("TERCET_PORT", "TERCET_HTTP_PORT"),
        ("TERCET_PREFIL", "TERCET_PREFILL"),
        ("TERCET_SECRETS", "TERCET_SECRET"),
        ("TERCET_ADMINKEY", "TERCET_ADMIN_KEY"),
        ("TERCET_MAX_QUEUE", "TERCET_MAX_QUEUED"),
        ("TERCET_", ""),
        ("TERCET_retries", ""),
        ("TERCET_SERVICE_PORTS", ""),
    ],
)
def test_a_wrong_name_is_named(name: str, hint: str) -> None:
    (line,) = unknown_variables("router", {name: "1", "PATH": "/bin"})
    assert line.startswith(f"{name} in the environment is ignored")
    assert hint in line


@pytest.mark.parametrize(
    "name",
    ["TERCET_HTTP_PORT", "TERCET_PREFILL", "TERCET_SECRET", "TERCET_URL", "TERCET_API_KEY", "TERCET_ADMIN_KEY_FILE",
     "TERCET_WARM_PARENT", "TERCET_LONG_TESTS", "TERCET_CACHE", "TERCET_ENGINE_NAME", "TERCET_SPIN_SECONDS",
     "TERCET_GRPC_PORT", "TERCET_TEST_ROUTER", "TERCET_CLOCK_OFFSET", "TERCET_PREFILL_HOSTS", "TERCET_ENGINES"],
)  # fmt: skip
def test_a_name_that_means_something_is_not(name: str) -> None:
    assert list(unknown_variables("router", {name: "1"})) == []


def test_what_kubernetes_sets_is_not() -> None:
    links = {
        "TERCET_PORT": "tcp://10.96.0.7:8000", "TERCET_SERVICE_HOST": "10.96.0.7", "TERCET_SERVICE_PORT": "8000",
        "TERCET_SERVICE_PORT_HTTP": "8000", "TERCET_PORT_8000_TCP": "tcp://10.96.0.7:8000",
        "TERCET_PORT_8000_TCP_PROTO": "tcp", "TERCET_PORT_8000_TCP_PORT": "8000",
        "TERCET_PORT_8000_TCP_ADDR": "10.96.0.7", "TERCET_ROUTER_SERVICE_HOST": "fd00::7",
        "TERCET_ROUTER_PORT": "tcp://[fd00::7]:80",
    }  # fmt: skip
    assert list(unknown_variables("router", links)) == []


def test_a_server_names_them_and_a_look_at_it_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERCET_PREFIL", "2")
    assert app._run(["router"]) == 2
    assert "TERCET_PREFIL in the environment is ignored" in capsys.readouterr().err
    assert app._run(["program", "--sticky", "x"]) == 2
    assert "TERCET_PREFIL" not in capsys.readouterr().err
