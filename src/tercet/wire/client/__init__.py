"""The engine protocol over HTTP: :class:`HttpEngine` calls a vLLM server that runs Tercet's plugin."""

from tercet.wire.client.http_engine import Admit, HttpEngine, engine_tls

__all__ = ["Admit", "HttpEngine", "engine_tls"]
