"""What is wrong by itself is reported before a port that is taken: a free port would not mend it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tercet.cli import app

UP = "up --model {model} --port {taken}"
ROUTER = "router --engine http://127.0.0.1:1 --model {model} --port {taken}"
ENGINE = "engine --model {model} --port {taken}"
EPP = "epp --engine http://127.0.0.1:1 --port {taken} --metrics-port 0"
SIDECAR = "sidecar --engine http://127.0.0.1:1 --port {taken}"
PROFILE = "--simulate llama-3.1-8b-h100-tp1"
# A command at a port that is taken, what is wrong with it, and what its complaint names.
WRONG = [
    (UP, "--model ./not/here", "model"),
    (UP, "--model {empty}", "model"),
    (UP, "--program nothing", "program"),
    (UP, "--reschedule nothing", "--reschedule"),
    (UP, "--scheduling ./not/here.yaml", "--scheduling"),
    (UP, "--log-dir {model}/config.json/logs", "--log-dir"),
    (UP, "--detach --model ./not/here", "model"),
    (UP, "--detach --program nothing", "program"),
    (UP, "--detach --reschedule nothing", "--reschedule"),
    (UP, "--detach --log-dir {model}/config.json/logs", "--log-dir"),
    (UP, f"{PROFILE} --model ./not/here", "model"),
    (UP, "--simulate nothing", "--simulate"),
    (UP, f"{PROFILE} --option nothing=1", "--option"),
    (UP, "-- --tensor-parallel-size none", "--tensor-parallel-size"),
    (UP, "-- --gpu-memory-utilization 7", "--gpu-memory-utilization"),
    (UP, "-- --kv-transfer-config no", "--kv-transfer-config"),
    (ROUTER, "--model ./not/here", "model"),
    (ROUTER, "--model {empty}", "model"),
    (ROUTER, "--program nothing", "program"),
    (ROUTER, "--reschedule nothing", "--reschedule"),
    (ROUTER, "--scheduling ./not/here.yaml", "--scheduling"),
    (ROUTER, "--engine-ca ./not/here.pem", "--engine-ca"),
    (ENGINE, "--model ./not/here", "model"),
    (ENGINE, "--model {empty}", "model"),
    (ENGINE, "--prefill-hosts nowhere", "--prefill-hosts"),
    (ENGINE, "-- --tensor-parallel-size none", "--tensor-parallel-size"),
    (ENGINE, "-- --kv-transfer-config no", "--kv-transfer-config"),
    (ENGINE, f"{PROFILE} --model ./not/here", "model"),
    (ENGINE, f"{PROFILE} --option nothing=1", "--option"),
    (ENGINE, "--simulate nothing", "--simulate"),
    (EPP, "--scheduling ./not/here.yaml", "--scheduling"),
    (EPP, "--render-model ./not/here", "model"),
    (EPP, "--render-model {empty}", "--render-model"),
    (EPP, "--engine-ca ./not/here.pem", "--engine-ca"),
    (EPP, "--tls-cert ./not/here.pem --tls-key ./not/here.pem", "--tls-cert"),
    (SIDECAR, "--prefill-hosts nowhere", "--prefill-hosts"),
    (SIDECAR, "--engine-ca ./not/here.pem", "--engine-ca"),
    (SIDECAR, "--tls-cert ./not/here.pem --tls-key ./not/here.pem", "--tls-cert"),
]


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which something else listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """A model as far as commands look at it, and a directory that is none."""
    model, empty = tmp_path / "model", tmp_path / "empty"
    for place in (model, empty):
        place.mkdir()
    (model / "config.json").write_text("{}")
    return {"model": model, "empty": empty}


@pytest.mark.slow
@pytest.mark.parametrize(("command", "wrong", "names"), WRONG, ids=[f"{c.split()[0]} {w}" for c, w, _ in WRONG])
def test_a_wrong_setting_comes_before_a_port_that_is_taken(
    command: str, wrong: str, names: str, taken: int, places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert app._run(f"{command} {wrong}".format(taken=taken, **places).split()) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"tercet: {names}") or said.startswith(f"tercet: --{names}"), said
    assert said.count("\n") == 1, said


@pytest.mark.parametrize("command", [UP, f"{UP} --detach", f"{UP} {PROFILE}", ROUTER, ENGINE, f"{ENGINE} {PROFILE}"])
def test_a_port_that_is_taken_comes_before_memory_that_is_short(
    command: str, taken: int, places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    short = "" if command == ROUTER else " --kv-cache-gib 1000000"
    assert app._run(f"{command}{short}".format(taken=taken, **places).split()) == 2
    assert capsys.readouterr().err.startswith(f"tercet: --port: cannot listen at 127.0.0.1:{taken}: ")


@pytest.mark.parametrize(
    "wrong",
    [
        "--port {taken}",
        "--prefill-hosts nowhere",
        "--host 0.0.0.0",
        "-- --api-server-count 2",
        "-- --tensor-parallel-size no",
        "--join http://127.0.0.1:1 --port {taken}",
        "--join http://127.0.0.1:1 --host 0.0.0.0",
    ],
)
def test_an_engine_that_cannot_start_converts_no_model(
    wrong: str, taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERCET_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TERCET_SECRET", raising=False)
    assert app._run(f"engine {wrong}".format(taken=taken).split()) == 2
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("flag", ["--port", "--metrics-port", "--grpc-health-port"])
def test_each_port_of_an_endpoint_picker_is_named_by_its_own_flag(
    flag: str, taken: int, capsys: pytest.CaptureFixture[str]
) -> None:
    ports = {"--port": 0, "--metrics-port": 0, flag: taken}
    flags = [str(word) for given in ports.items() for word in given]
    assert app._run(["epp", "--engine", "http://127.0.0.1:1", "--host", "127.0.0.1", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"tercet: {flag}: cannot listen at 127.0.0.1:{taken}: ")


def test_a_port_that_a_sidecar_cannot_have_is_named(taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert app._run(["sidecar", "--engine", "http://127.0.0.1:1", "--host", "127.0.0.1", "--port", str(taken)]) == 2
    assert capsys.readouterr().err.startswith(f"tercet: --port: cannot listen at 127.0.0.1:{taken}: ")
