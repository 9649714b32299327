"""Two models behind one address, by commands: the engines of one become four and one again while both are asked.

Each answer is the one that the lone engine of its model gave.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tercet.cluster.model import resolve_model
from tercet.cluster.ports import free_ports
from tests.long_runs import in_full
from tests.simulated_processes import ask, running, tercet, wait_for
from tests.small_llama import small_llama

pytestmark = [in_full("test_upgrade_under_load and test_two_models, on simulated engines"), pytest.mark.timeout(1800)]
HOST = "127.0.0.1"
LARGEST = 4
CLIENTS = 4
COMMAND_SECONDS = 900
PROMPTS = ["One two three", "The capital of France is", "Water boils at", "def sum_of(numbers):", "x " * 300]
UP = (
    "prefill: 0\ndecode: 0\nboth: 1\nprogram: data_parallel\ndtype: float32\nopenai-layer: vllm\n"
    "served-model-name: {name}\nmodel: {model}\nport: {port}\nlog-dir: {logs}\nengine-args: [--max-num-seqs, '8']\n"
)


def told(url: str, model: str, prompt: str) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return ask(f"{url}/v1/completions", body)["choices"][0]["text"]


class Asking:
    """Clients that ask both models without a pause, and fail at an answer that is another one than at first."""

    def __init__(self, url: str, models: list[str]) -> None:
        self._url = url
        self._lone = {(model, prompt): told(url, model, prompt) for model in models for prompt in PROMPTS}
        self._over = threading.Event()
        self.answered = Counter(dict.fromkeys(models, 0))
        assert len({self._lone[model, PROMPTS[0]] for model in models}) == len(models), "the models tell apart"

    def run(self, client: int) -> None:
        asked = list(self._lone)[client:] + list(self._lone)[:client]
        while not self._over.is_set():
            for model, prompt in asked:
                assert told(self._url, model, prompt) == self._lone[model, prompt]
                self.answered[model] += 1

    def until_more(self, working: list[Future[None]]) -> None:
        """Return once each model has answered each client twice more."""
        wanted = {model: count + 2 * CLIENTS for model, count in self.answered.items()}
        while any(self.answered[model] < count for model, count in wanted.items()):
            for each in working:
                if each.done():
                    each.result()
            self._over.wait(0.05)

    def end(self) -> None:
        self._over.set()


@pytest.fixture
def fleets(tmp_path: Path) -> Iterator[dict[str, int]]:
    """The ports of a fleet of one engine for each model."""
    models = {"smollm2": resolve_model("smollm2"), "llama": str(small_llama())}
    ports = dict(zip(models, free_ports(HOST, len(models)), strict=True))
    try:
        for name, model in models.items():
            file = tmp_path / f"{name}.yaml"
            file.write_text(UP.format(name=name, model=model, port=ports[name], logs=tmp_path / name))
            tercet(tmp_path / "cache", "up", "--config", str(file), "--detach", seconds=COMMAND_SECONDS)
        yield ports
    finally:
        subprocess.run(
            [sys.executable, "-m", "tercet.cli", "down", "--all"],
            env={**os.environ, "TERCET_CACHE": str(tmp_path / "cache")}, check=False, timeout=300,
        )  # fmt: skip


def test_answers_are_those_of_lone_engines(tmp_path: Path, fleets: dict[str, int]) -> None:
    port = free_ports(HOST, 1)[0]
    routers = [part for each in fleets.values() for part in ("--router", f"http://127.0.0.1:{each}")]
    with running(tmp_path / "models.log", "model-router", *routers, "--port", str(port)):
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/health")
        asking = Asking(url, list(fleets))
        with ThreadPoolExecutor(CLIENTS) as threads:
            working = [threads.submit(asking.run, number) for number in range(CLIENTS)]
            try:
                asking.until_more(working)
                for count in (LARGEST, 1):
                    tercet(
                        tmp_path / "cache",
                        "scale",
                        f"both={count}",
                        "--port",
                        str(fleets["llama"]),
                        seconds=COMMAND_SECONDS,
                    )
                    assert len(ask(f"http://127.0.0.1:{fleets['llama']}/tercet/v1/engines")) == count
                    asking.until_more(working)
            finally:
                asking.end()
            for each in working:
                each.result()
