"""Plain vLLM servers of pooling models behind a router: it answers what they answer themselves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.engines.conftest import START_SECONDS, answers, free_port, router_over

from .checkpoints import checkpoint
from .pooling import classifier_checkpoint

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

TEXTS = ["A router stands before engines.", "Rain falls on the hills.", "Words and numbers: 1, 2, 3."]
# Another one in each answer.
OWN = ("id", "created")
EMBEDDER: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": TEXTS}),
    ("/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"}),
    ("/v1/embeddings", {"messages": [{"role": "user", "content": TEXTS[0]}]}),
    ("/v2/embed", {"texts": TEXTS, "embedding_types": ["float"]}),
    ("/pooling", {"input": TEXTS[1], "task": "embed"}),
    ("/score", {"text_1": TEXTS[0], "text_2": TEXTS}),
    ("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS}),
    ("/rerank", {"query": TEXTS[1], "documents": TEXTS}),
    ("/v1/rerank", {"query": TEXTS[1], "documents": TEXTS, "top_n": 2}),
    ("/v2/rerank", {"query": TEXTS[1], "documents": TEXTS}),
]
CLASSIFIER: list[tuple[str, dict[str, Any]]] = [
    ("/classify", {"input": TEXTS}),
    ("/pooling", {"input": TEXTS[2], "task": "classify"}),
]


@contextmanager
def process(command: Sequence[str], port: int, log: Path) -> Generator[str]:
    """A server at a port of this machine, which may still be loading."""
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    with log.open("wb") as output, subprocess.Popen([sys.executable, "-m", *command], env=env, stdout=output,
                                                    stderr=output) as running:  # fmt: skip
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            running.terminate()
            try:
                running.wait(timeout=60)
            except subprocess.TimeoutExpired:
                running.kill()
                raise


def plain_vllm(name: str, model: Path, convert: str, port: int) -> list[str]:
    return [
        "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", name, "--port", str(port),
        "--host", "127.0.0.1", "--runner", "pooling", "--convert", convert, "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "512",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Generator[dict[str, str]]:
    """The router's and the servers'; the engine beside them is a simulated one."""
    tmp, (engine, embedder, classifier) = tmp_path_factory.mktemp("pooling"), (free_port() for _ in range(3))
    simulated = ["tercet.cli", "engine", "--simulate", "smollm2-135m-cpu", "--port", str(engine)]
    commands = {
        "both-0": (simulated, engine),
        "embedder": (plain_vllm("embedder", checkpoint("qwen3"), "embed", embedder), embedder),
        "classifier": (plain_vllm("classifier", classifier_checkpoint(), "classify", classifier), classifier),
    }
    with ExitStack() as stack:
        found = {
            name: stack.enter_context(process(command, port, tmp / f"{name}.log"))
            for name, (command, port) in commands.items()
        }
        servers = [part for name in ("embedder", "classifier") for part in ("--pooling-server", found[name])]
        found["router"] = stack.enter_context(router_over({"both-0": found["both-0"]}, tmp, *servers))
        deadline = time.monotonic() + START_SECONDS
        while late := [name for name in ("embedder", "classifier") if not answers(f"{found[name]}/health")]:
            if time.monotonic() > deadline:
                pytest.fail((tmp / f"{late[0]}.log").read_text()[-4000:])
            time.sleep(0.5)
        yield found


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as found:
        yield found


async def answer(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with session.post(url, json=body) as response:
        said = await response.json()
    return response.status, {key: value for key, value in said.items() if key not in OWN}


@pytest.mark.parametrize(
    ("model", "path", "body"),
    [("embedder", *each) for each in EMBEDDER] + [("classifier", *each) for each in CLASSIFIER],
)
async def test_the_router_answers_what_the_server_answers(
    model: str, path: str, body: dict[str, Any], urls: dict[str, str], session: aiohttp.ClientSession
) -> None:
    body = {"model": model, **body}
    own = await answer(session, f"{urls[model]}{path}", body)
    assert own[0] == 200, own[1]
    assert await answer(session, f"{urls['router']}{path}", body) == own


async def test_vectors_as_bytes_come_as_they_are(urls: dict[str, str], session: aiohttp.ClientSession) -> None:
    body = {"model": "embedder", "input": TEXTS, "encoding_format": "bytes"}
    found: list[tuple[bytes, str | None]] = []
    for url in (urls["embedder"], urls["router"]):
        async with session.post(f"{url}/v1/embeddings", json=body) as response:
            assert response.status == 200
            found.append((await response.read(), response.headers["content-type"]))
            assert "metadata" in response.headers
    assert found[0] == found[1]
    assert len(found[0][0]) > 3 * 64


async def test_what_a_server_refuses_is_said_in_its_words(urls: dict[str, str], session: aiohttp.ClientSession) -> None:
    for body in ({"input": "x " * 2000}, {"input": {"no": "text"}}):
        body = {"model": "embedder", **body}
        own = await answer(session, f"{urls['embedder']}/v1/embeddings", body)
        assert own[0] == 400
        assert await answer(session, f"{urls['router']}/v1/embeddings", body) == own


async def test_a_model_that_no_server_has(urls: dict[str, str], session: aiohttp.ClientSession) -> None:
    status, said = await answer(session, f"{urls['router']}/v1/embeddings", {"model": "other", "input": "x"})
    assert (status, said["error"]["code"]) == (404, "unknown_model")
