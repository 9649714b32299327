"""The body of a request is looked into only where a rule goes by the model's name."""

from __future__ import annotations

from typing import Any

import pytest

from tercet.router.context import ContextMiddleware, current
from tercet.router.plan import Plan, Rule

from .conftest import Door


class App:
    """Reads the whole body, as vLLM's handlers do, and notes which model the context says."""

    def __init__(self, door: Door) -> None:
        self.state = type("State", (), {"tercet": door.service})()
        self.model = ""
        self.body = b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            self.body += message["body"]
            more = message["more_body"]
        self.model = current().model


async def post(app: App, *chunks: bytes) -> None:
    messages = [
        {"type": "http.request", "body": chunk, "more_body": index < len(chunks) - 1}
        for index, chunk in enumerate(chunks)
    ]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(_: Any) -> None:
        raise AssertionError("nothing is answered here")

    await ContextMiddleware(app)({"type": "http", "headers": [], "app": app}, receive, send)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chunks", "model"),
    [
        ((b'{"model": "big", "messages": []}',), "big"),
        ((b'{"messages": [{"model": "no"}], "mod', b'el": "bi', b'g"}'), "big"),
        ((b'{"messages": []}',), ""),
        ((b'{"model": 7}',), ""),
        ((b"no json",), ""),
        ((b"",), ""),
    ],
)
async def test_the_model_that_the_client_asked_for(door: Door, chunks: tuple[bytes, ...], model: str) -> None:
    await door.service.use(Plan(program="disaggregated", rules=(Rule(program="balanced", model="big"),)))
    app = App(door)
    await post(app, *chunks)
    assert app.model == model
    assert app.body == b"".join(chunks)


async def test_without_such_a_rule_nobody_looks(door: Door) -> None:
    await door.service.use(Plan(program="disaggregated", rules=(Rule(program="balanced", header="x-team"),)))
    app = App(door)
    await post(app, b'{"model": "big"}')
    assert (app.model, app.body) == ("", b'{"model": "big"}')
