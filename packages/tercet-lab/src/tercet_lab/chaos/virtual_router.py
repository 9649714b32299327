"""The router's HTTP port in virtual time: uvicorn's protocol with the router's limits, and the application behind it.

The application is the small OpenAI API; the layers that every request passes before it are the router's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from zlib import crc32

import uvicorn
from uvicorn.server import ServerState

from tercet.fleet.admission import Gate
from tercet.router.observe.metrics import Metrics
from tercet.router.observe.request_traces import RequestTraces
from tercet.router.prompt_texts import ChatMessage, PromptTexts
from tercet.router.router_app import RouterApp
from tercet.router.serve.service import Service
from tercet.router.serve.service_programs import ServicePrograms
from tercet.settings import RouterSettings
from tercet.wire.serving.client_connection import BoundedProtocol
from tercet_lab.chaos.client_load import VOCABULARY
from tercet_lab.chaos.virtual_network import NetworkedLoop
from tercet_lab.small_openai import small_app

MAX_MODEL_LEN = 4096


class WordTexts(PromptTexts):
    """A tokenizer with one token for each word, which needs no file."""

    def __init__(self) -> None:
        """Do nothing: there is no file to read."""

    def encode(self, text: str) -> list[int]:
        return [crc32(word.encode()) % VOCABULARY for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(f"{token} " for token in tokens)

    def chat(self, messages: Sequence[ChatMessage]) -> str:
        return " ".join(str(each.to_template()["content"]) for each in messages)


@asynccontextmanager
async def http_port(
    loop: NetworkedLoop, service: Service[Metrics], host: str, port: int, model: str, most_bytes: int,
    traces: RequestTraces,
) -> AsyncGenerator[RouterApp]:  # fmt: skip
    """Serve HTTP in the current virtual process while the context is open. Bodies have at most ``most_bytes`` bytes."""
    limits = RouterSettings().limits
    gate = Gate(limits, service.fleet, service.metrics, clock=loop.time)
    app = small_app(ServicePrograms(service), WordTexts(), [model], MAX_MODEL_LEN)
    router = RouterApp(app.build_middleware_stack(), None, gate, (), service.program_called, most_bytes, traces=traces)
    app.middleware_stack = router
    config = uvicorn.Config(app, http=BoundedProtocol, log_config=None, access_log=False, lifespan="off")
    config.load()
    made = partial(BoundedProtocol, config=config, server_state=ServerState(), app_state={})
    server = await loop.create_server(made, host, port)
    try:
        yield router
    finally:
        server.close()
