"""What the router found in the body reaches vLLM's handlers."""

from __future__ import annotations

from typing import Any

import pytest

from tercet.fleet.admission import Gate
from tercet.router.observe.metrics import Metrics
from tercet.router.router_app import RouterApp
from tercet.settings import Limits
from tercet.wire.serving.server_access import current

from .conftest import LiveRouter


class App:
    """Reads the whole body, as vLLM's handlers do, and notes which model the context says."""

    def __init__(self) -> None:
        self.model = ""
        self.body = b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            self.body += message["body"]
            more = message["more_body"]
        self.model = current().asked.model


async def post(app: App, router: LiveRouter, metrics: Metrics, *chunks: bytes) -> None:
    messages = [
        {"type": "http.request", "body": chunk, "more_body": index < len(chunks) - 1}
        for index, chunk in enumerate(chunks)
    ]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(_: Any) -> None:
        raise AssertionError("nothing is answered here")

    front = RouterApp(app, None, Gate(Limits(), router.fleet, metrics), (), router.service.program_called, 1000)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "app": app}
    await front(scope, receive, send)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chunks", "model"),
    [
        ((b'{"model": "big", "messages": []}',), "big"),
        ((b'{"messages": [{"model": "no"}], "mod', b'el": "bi', b'g"}'), "big"),
        ((b'{"messages": []}',), ""),
        ((b'{"model": 7}',), ""),
        ((b'"no object"',), ""),
        ((b"",), ""),
    ],
)
async def test_the_model_that_the_client_asked_for(
    router: LiveRouter, metrics: Metrics, chunks: tuple[bytes, ...], model: str
) -> None:
    app = App()
    await post(app, router, metrics, *chunks)
    assert app.model == model
    assert app.body == b"".join(chunks)
