"""Mistyped variables are named when a server starts."""

from __future__ import annotations

import pytest

from tercet.cli import app
from tercet.cli.setting_flags import unknown_variables


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
