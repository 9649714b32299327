"""Two fleets of simulated engines with two tokenizers behind one model router, as processes."""

from __future__ import annotations

import urllib.error
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tercet.cluster.ports import free_ports
from tests.longest_wait import wait_until
from tests.simulated_processes import PROFILE, ask, running, wait_for
from tests.unit.gateway.model_router.two_models import STRIDES, Answers, checkpoint

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.usefixtures("forked")]


def up(folder: Path, model: str, path: Path, port: int) -> list[str]:
    """The command of a fleet of one simulated engine."""
    return [
        "up", "--simulate", PROFILE, "--prefill", "0", "--decode", "0", "--both", "1", "--program", "data_parallel",
        "--model", str(path), "--served-model-name", model, "--port", str(port), "--log-dir", str(folder / model),
    ]  # fmt: skip


@contextmanager
def two_models(folder: Path) -> Generator[tuple[str, dict[str, str], Answers]]:
    ports = free_ports("127.0.0.1", 3)
    checkpoints = {model: checkpoint(folder, model) for model in STRIDES}
    urls = {model: f"http://127.0.0.1:{port}" for model, port in zip(STRIDES, ports, strict=False)}
    with ExitStack() as stack:
        for model, port in zip(STRIDES, ports, strict=False):
            stack.enter_context(running(folder / f"{model}.log", *up(folder, model, checkpoints[model], port)))
        routers = [part for url in urls.values() for part in ("--router", url)]
        stack.enter_context(running(folder / "models.log", "model-router", *routers, "--port", str(ports[2])))
        for url in urls.values():
            wait_for(f"{url}/health")
        wait_for(f"http://127.0.0.1:{ports[2]}/health")
        yield f"http://127.0.0.1:{ports[2]}", urls, Answers(checkpoints)


def test_each_request_is_tokenized_and_served_by_its_own_model(tmp_path: Path) -> None:
    with two_models(tmp_path) as (url, urls, answers):
        wait_until(lambda: [each["id"] for each in ask(f"{url}/v1/models")["data"]] == ["a", "b"], every=0.1)

        def completed(number: int) -> None:
            model, prompt = "ab"[number % 2], f"w{number} w7 w8"
            said = ask(f"{url}/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 20})
            assert said["model"] == model
            assert said["choices"][0]["text"] == answers.right(model, prompt, 20)
            assert said["choices"][0]["text"] != answers.right("ba"[number % 2], prompt, 20)

        with ThreadPoolExecutor(6) as clients:
            list(clients.map(completed, range(60)))
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(f"{url}/v1/completions", {"model": "c", "prompt": "w1"})
        assert refused.value.code == 404
        # Fleets, programs and counters are each model's.
        for own in urls.values():
            (engine,) = ask(f"{own}/tercet/v1/engines")
            assert engine["reachable"]
