"""Simulated engines and routers as processes, for tests that look at them from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tercet.cluster.ports import free_ports
from tests.warm import start_guarded

MODEL = "smollm2"
PROFILE = "llama-3.1-8b-h100-tp1"


@contextmanager
def running(log: Path, *command: str, **variables: str) -> Generator[None]:
    """Run a command of Tercet, forked from the process of the fixture ``forked`` where a test has that."""
    environment = {**os.environ, "TERCET_ACCESS_LOG": "1", "TERCET_LOG_FORMAT": "json", **variables}
    argv = [sys.executable, "-m", "tercet.cli", *command]
    with log.open("wb") as written, start_guarded(argv, environment, written) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def tercet(cache: Path, *command: str, seconds: float = 240) -> str:
    """What a command says, whose files are in ``cache``; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "tercet.cli", *command], env={**os.environ, "TERCET_CACHE": str(cache)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def ask(url: str, body: Any = None, **headers: str) -> Any:
    data = None if body is None else json.dumps(body).encode()
    named = {"content-type": "application/json", **{key.replace("_", "-"): value for key, value in headers.items()}}
    with urllib.request.urlopen(urllib.request.Request(url, data, named), timeout=60) as answer:
        return json.load(answer)


def wait_for(url: str) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < deadline, f"{url} does not answer"
            time.sleep(0.2)


@contextmanager
def fleet(folder: Path, *more: str, **variables: str) -> Generator[tuple[str, list[int]]]:
    """A prefill engine ``p``, decode engines ``d`` and ``e``, and a router, whose URL is given, with all ports."""
    ports = free_ports("127.0.0.1", 4)
    with ExitStack() as stack:
        for name, port in zip(("p", "d", "e"), ports, strict=False):
            command = ("engine", "--simulate", PROFILE, "--name", name, "--port", str(port), "--model", MODEL)
            stack.enter_context(running(folder / f"{name}.log", *command, **variables))
        engines = [
            part
            for name, role, port in zip(("p", "d", "e"), ("prefill", "decode", "decode"), ports, strict=False)
            for part in ("--engine", f"http://127.0.0.1:{port},role={role},name={name}")
        ]
        router = ("router", *engines, "--port", str(ports[3]), "--openai-layer", "small", "--model", MODEL, *more)
        stack.enter_context(running(folder / "router.log", *router, **variables))
        url = f"http://127.0.0.1:{ports[3]}"
        wait_for(f"{url}/health")
        yield url, ports
