"""Plain vLLM engines, without a plugin of Tercet's, that give each other KV by vLLM's own NixlConnector."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tercet.cluster.model import resolve_model
from tercet_gateway.scraped_engine import VllmMetrics, parsed

from .commands import counted, page
from .conftest import MODEL, free_port, until_answering
from .processes import EnginePlace
from .prompts import complete, prompt_of

BLOCK = 32
TOKEN_BYTES = 30 * 2 * 3 * 64 * 4
"""KV of one token: keys and values of each layer's heads, in float32."""
STEP_TOKENS = 128
"""Of a prompt, what one step computes."""
AT_ONCE = 4
LEASE_SECONDS = 6
"""After so long an engine gives up KV that nobody has fetched."""
CONNECTOR = {
    "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"kv_lease_duration": LEASE_SECONDS, "num_threads": 1},
}  # fmt: skip


def plain_engine(name: str, core: int, tmp: Path) -> EnginePlace:
    """The place of one; the caller starts it."""
    port = free_port()
    argv = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", resolve_model(MODEL),
        "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
        "--enforce-eager", "--max-model-len", "2048", "--block-size", str(BLOCK), "--max-num-seqs", str(AT_ONCE),
        "--max-num-batched-tokens", str(STEP_TOKENS), "--kv-transfer-config", msgspec.json.encode(CONNECTOR).decode(),
    ]  # fmt: skip
    environment = {
        **os.environ, "VLLM_PLUGINS": "", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core % (os.cpu_count() or 1)),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_port_for_later()),
    }  # fmt: skip
    return EnginePlace(name, f"http://127.0.0.1:{port}", argv, environment, tmp / f"{name}.log")


def _port_for_later() -> int:
    """A port that stays free until it is bound, when the engine has loaded: below those that connections are given."""
    while True:
        with socket.socket() as probe:
            port = random.randrange(20_000, 30_000)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def mend(places: Mapping[str, EnginePlace]) -> None:
    """Start those anew that are dead, and wait until all answer."""
    for place in places.values():
        if place.is_dead:
            place.start()
    until_answering(list(places.values()))


def load(url: str) -> VllmMetrics:
    """How busy it is."""
    return parsed(page(url))


def computed(url: str) -> float:
    """Tokens of prompts that it has computed itself."""
    return counted(url, "vllm:prompt_tokens_by_source_total", source="local_compute")


def fetched(url: str) -> float:
    """Tokens of prompts whose KV came from another engine."""
    return counted(url, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


def fetched_bytes(url: str) -> float:
    return counted(url, "vllm:nixl_bytes_transferred_sum")


async def unpinned(url: str, seconds: float = 120.0) -> None:
    """Wait until it holds KV for nobody. Its gauge moves with its steps alone, so it is given some to do."""
    async with asyncio.timeout(seconds):
        while True:
            await complete(url, prompt_of(4), max_tokens=1)
            said = load(url)
            if not (said.kv_usage or said.running or said.waiting):
                return
            await asyncio.sleep(0.5)
