"""A fleet is scaled and then replaced by one of another model with another tokenizer, by commands, under requests."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tercet.cluster.ports import free_ports
from tests.long_runs import in_full
from tests.simulated_processes import PROFILE, ask, running, tercet, wait_for
from tests.unit.gateway.model_router.two_models import STRIDES, Answers, checkpoint

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600), pytest.mark.usefixtures("forked")]
CLIENTS = 6
UP = (
    f"simulate: {PROFILE}\nprefill: 0\ndecode: 0\nboth: 1\nprogram: data_parallel\nserved-model-name: chat\n"
    "model: {model}\nport: {port}\nlog-dir: {logs}\n"
)  # fmt: skip


class Clients:
    """Ask for ``chat`` without a pause; each answer must be right by the tokenizer of one of the two models."""

    def __init__(self, url: str, answers: Answers) -> None:
        self._url = url
        self._answers = answers
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.answered = Counter[str]()

    def end(self) -> None:
        self._over.set()

    def ask(self, client: int) -> None:
        number = 0
        while not self._over.is_set():
            number += 1
            prompt, tokens = f"w{client} w{number % 50} w7", 10 + 40 * (number % 3)
            body = {"model": "chat", "prompt": prompt, "max_tokens": tokens}
            text = ask(f"{self._url}/v1/completions", body)["choices"][0]["text"]
            by = [model for model in STRIDES if text == self._answers.right(model, prompt, tokens)]
            assert len(by) == 1, f"no model answers {prompt!r} with {text!r}"
            with self._lock:
                self.answered[by[0]] += 1

    def until(self, model: str, more: int, working: list[Future[None]]) -> None:
        """Return once there are ``more`` answers of the model."""
        wanted = self.answered[model] + more
        while self.answered[model] < wanted:
            for each in working:
                if each.done():
                    each.result()
            self._over.wait(0.05)


@contextmanager
def asking(url: str, answers: Answers) -> Generator[tuple[Clients, list[Future[None]]]]:
    clients = Clients(url, answers)
    with ThreadPoolExecutor(CLIENTS) as threads:
        working = [threads.submit(clients.ask, number) for number in range(CLIENTS)]
        try:
            yield clients, working
        finally:
            clients.end()
        for each in working:
            each.result()


@pytest.mark.parametrize("scales", [False, pytest.param(True, marks=in_full("an upgrade without scaling"))])
def test_no_request_fails_and_no_token_is_of_the_wrong_tokenizer(tmp_path: Path, scales: bool) -> None:
    ports, cache = free_ports("127.0.0.1", 3), tmp_path / "cache"
    checkpoints = {model: checkpoint(tmp_path, model) for model in STRIDES}
    for model, port in zip(STRIDES, ports, strict=False):
        settings = UP.format(model=checkpoints[model], port=port, logs=tmp_path / model)
        (tmp_path / f"{model}.yaml").write_text(settings)
    old, new, url = (f"http://127.0.0.1:{port}" for port in ports)
    tercet(cache, "up", "--config", str(tmp_path / "a.yaml"), "--detach")
    try:
        with running(tmp_path / "models.log", "model-router", "--router", old, "--port", str(ports[2])):
            wait_for(f"{url}/health")
            with asking(url, Answers(checkpoints)) as (clients, working):
                clients.until("a", CLIENTS, working)
                for count in (4, 1) if scales else ():
                    tercet(cache, "scale", f"both={count}", "--port", str(ports[0]))
                    clients.until("a", CLIENTS, working)
                said = tercet(
                    cache, "upgrade", "--from", old, "--config", str(tmp_path / "b.yaml"), "--model-router", url,
                    "--steps", "20,100", "--hold", "2",
                )  # fmt: skip
                assert f"{new} has replaced {old}" in said
                last = clients.answered["a"]
                clients.until("b", 2 * CLIENTS, working)
                assert clients.answered["a"] == last
            assert [each["url"] for each in ask(f"{url}/tercet/v1/backends")] == [new]
        assert f":{ports[0]}" not in tercet(cache, "down", "--all")  # the old one has ended already
    finally:
        subprocess.run(
            [sys.executable, "-m", "tercet.cli", "down", "--all"], env={**os.environ, "TERCET_CACHE": str(cache)},
            check=False, timeout=120,
        )  # fmt: skip
