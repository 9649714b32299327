"""Engines of one model that are started differently, with no front door; and what one of them hands over to another."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tercet.client import HttpEngine
from tercet.cluster.model import resolve_model
from tercet.protocol import Request

from .conftest import START_SECONDS, free_port, get_json


def small_llama(path: Path) -> Path:
    """Four layers and KV heads, SmolLM2's tokenizer, and random weights, large enough that tokens differ."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(resolve_model("smollm2"), path, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    llama = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for weight in llama.parameters():
            weight.mul_(3)
    llama.save_pretrained(path)
    return path


@contextmanager
def engines_with(flags: Mapping[str, Sequence[str]], model: str, logs: Path) -> Generator[dict[str, str]]:
    """An engine for each name: the cores of its workers, then flags of vLLM's. Their URLs, once all answer."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    found: dict[str, str] = {}
    try:
        for name, (cores, *more) in flags.items():
            port = free_port()
            command = [
                sys.executable, "-m", "tercet.cli", "engine", "--model", model, "--served-model-name", "smollm2",
                "--name", name, "--port", str(port), "--dtype", "float32", "--", "--max-model-len", "2048", *more,
            ]  # fmt: skip
            environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": cores}
            with (logs / f"{name}.log").open("wb") as log:
                running[name] = subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                )
            found[name] = f"http://127.0.0.1:{port}"
        for name, process in running.items():
            _wait(process, found[name], logs / f"{name}.log")
        yield found
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            # How vLLM ends is not what is tested here: with several workers on few cores it may hang at its end.
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            _kill_group(process.pid)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            get_json(f"{url}/tercet/v1/status")
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    pytest.fail(f"{url} was not ready:\n{log.read_text()[-4000:]}")


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


async def hand_over(
    source: HttpEngine, target: HttpEngine, prompt: list[int], salt: str, num_tokens: int = 12
) -> tuple[list[int], int]:
    """Prefill on one engine and decode on the other; the tokens, and how many tokens were received."""
    request = Request(
        seq_id=uuid.uuid4().hex,
        prompt=tuple(prompt),
        cache_salt=salt,
        sampling_params={"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True},
    )
    async with target.prep_recv(request) as space:
        sent = await source.remote_send(request, space, space.matched_len, sample=True)
        assert sent.first is not None
        tokens, received = [*sent.first.token_ids], 0
        async for output in target.start_generate(request, sent.end, sent.first.token_ids):
            tokens += output.token_ids
            received += output.usage.received if output.usage is not None else 0
    return tokens, received
