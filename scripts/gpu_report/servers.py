"""The servers that the report measures: plain vLLM, one engine, and fleets. Each is stopped in all cases."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from tercet.cluster.engine_command import BUILT_IN_MAX_LEN
from tercet.cluster.model import BUILT_IN, resolve_model
from tercet.cluster.ports import free_ports

START_SECONDS = 900.0
STOP_SECONDS = 90.0


@contextmanager
def plain_vllm(model: str, flags: Sequence[str]) -> Generator[str]:
    """Run vLLM without Tercet while the context is open. Yield its URL."""
    path = resolve_model(model, lambda line: print(line, file=sys.stderr))
    length = ["--max-model-len", BUILT_IN_MAX_LEN] if model == BUILT_IN and "--max-model-len" not in flags else []
    with _listening("vllm.entrypoints.openai.api_server", ["--model", path, *length, *flags]) as url:
        yield url


@contextmanager
def engine(model: str, flags: Sequence[str]) -> Generator[str]:
    """Run one engine without a router while the context is open. Yield its URL."""
    with _listening("tercet.cli", ["engine", "--model", model], ["--", *flags]) as url:
        yield url


@contextmanager
def fleet(model: str, args: Sequence[str], flags: Sequence[str]) -> Generator[str]:
    """Run engines behind a router while the context is open. Yield the router's URL."""
    with _listening("tercet.cli", ["up", "--model", model, *args], ["--", *flags]) as url:
        yield url


@contextmanager
def _listening(module: str, args: Sequence[str], flags: Sequence[str] = ()) -> Generator[str]:
    (port,) = free_ports("127.0.0.1", 1)
    url = f"http://127.0.0.1:{port}"
    with _running([sys.executable, "-m", module, *args, "--port", str(port), *flags], f"{url}/health"):
        yield url


@contextmanager
def _running(command: list[str], health: str) -> Generator[None]:
    process = subprocess.Popen(command, stdout=sys.stderr)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(health):
            if process.poll() is not None:
                raise RuntimeError(f"a server ended with status {process.returncode}: {' '.join(command)}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"a server did not answer within {START_SECONDS:.0f} s: {' '.join(command)}")
            time.sleep(1)
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def model_of(url: str) -> str:
    """Return the first model that a server lists."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as response:
        return json.load(response)["data"][0]["id"]


def post(url: str, body: dict[str, Any], seconds: float = 300.0) -> Any:
    """Send a request for a completion, and return the open answer."""
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=seconds)
