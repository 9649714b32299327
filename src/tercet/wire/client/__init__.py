"""The engine protocol over HTTP: :class:`HttpEngine` calls a vLLM server that runs Tercet's plugin."""

from tercet.wire.client.engine_calls import Admit, engine_tls
from tercet.wire.client.http_engine import HttpEngine

__all__ = ["Admit", "HttpEngine", "engine_tls"]
