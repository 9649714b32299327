"""How long vLLM's server keeps a connection that nobody uses, against how long Tercet's clients do."""

from __future__ import annotations

from vllm import envs

from tercet.wire.client import http_engine


def test_connections_are_given_up_before_vllm_closes_them() -> None:
    assert http_engine.KEEPALIVE_SECONDS < envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE
