"""A router whose named engines do not all answer at its start: processes that are dead, silent, or come later."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
from contextlib import ExitStack
from pathlib import Path

import pytest

from tercet.cluster.ports import free_ports
from tests.longest_wait import LONGEST_WAIT_S, wait_until
from tests.simulated_processes import MODEL, PROFILE, ask, running

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600), pytest.mark.usefixtures("forked")]
ASKS = {"model": MODEL, "prompt": "One two", "max_tokens": 3}


def asked(url: str) -> tuple[int, str]:
    """Status and text of an answer; 0 while the port is closed."""
    try:
        return 200, json.dumps(ask(f"{url}/v1/completions", ASKS))
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def until_asked(url: str, wanted: int) -> str:
    deadline = time.monotonic() + LONGEST_WAIT_S
    while True:
        status, text = asked(url)
        if status == wanted:
            return text
        assert status in (0, 503), text
        assert time.monotonic() < deadline, text
        time.sleep(0.05)


def engine(stack: ExitStack, folder: Path, name: str, port: int) -> None:
    command = ("engine", "--simulate", PROFILE, "--name", name, "--port", str(port), "--model", MODEL)
    stack.enter_context(running(folder / f"{name}.log", *command))


def router(stack: ExitStack, folder: Path, *ports: int) -> str:
    (port,) = free_ports("127.0.0.1", 1)
    named = [part for each in ports for part in ("--engine", f"http://127.0.0.1:{each},name=e{ports.index(each)}")]
    command = ("router", *named, "--port", str(port), "--openai-layer", "small", "--model", MODEL)
    stack.enter_context(running(folder / "router.log", *command, "--program", "data_parallel"))
    return f"http://127.0.0.1:{port}"


def test_it_serves_by_the_others_and_takes_the_dead_one_when_it_is_there(tmp_path: Path) -> None:
    alive, dead = free_ports("127.0.0.1", 2)
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        engine(stack, tmp_path, "e0", alive)
        url = router(stack, tmp_path, alive, dead, silent.getsockname()[1])
        until_asked(url, 200)
        assert {each["name"]: each["reachable"] for each in ask(f"{url}/tercet/v1/engines")} == {
            "e0": True, "e1": False, "e2": False,
        }  # fmt: skip
        engine(stack, tmp_path, "e1", dead)
        wait_until(lambda: ask(f"{url}/tercet/v1/engines")[1]["reachable"], every=0.05)


def test_while_none_answers_the_port_says_so(tmp_path: Path) -> None:
    (late,) = free_ports("127.0.0.1", 1)
    with ExitStack() as stack:
        url = router(stack, tmp_path, late)
        assert "no engine yet that answers" in until_asked(url, 503)
        engine(stack, tmp_path, "e0", late)
        until_asked(url, 200)
