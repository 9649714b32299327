"""What a request passes before vLLM's layer sees it: its key, its size, and whether the fleet has room for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import msgspec

from tercet.protocol import Saturated, TercetError
from tercet.router.body import App, Receive, Scope, Send, read_body
from tercet.router.gate import ClientLeft, Gate
from tercet.router.keys import require_key

ASKED = "tercet.asked"
BODY = "tercet.body"
ERROR = "tercet.error"
# Of vLLM's routes those that generate; the others cost engines nothing.
GENERATING = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages",
     "/v1/systemone", "/inference/v1/generate", "/cohere/v2/chat", "/generative_scoring", "/invocations"}
)  # fmt: skip


class Entrance:
    """ASGI middleware, the outermost one; refuses with OpenAI's error JSON.

    ``around_refusals`` adds what refusals need to reach a browser.
    """

    def __init__(
        self, app: App, gate: Gate, keys: Sequence[str], max_bytes: int,
        around_refusals: Callable[[App], App] = lambda app: app,
    ) -> None:  # fmt: skip
        self._app = app
        self._refusals = around_refusals(_refused)
        self._gate = gate
        self._keys = keys
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        async with AsyncExitStack() as held:
            try:
                receive = await self._enter(scope, receive, held)
            except TercetError as error:
                await self._refusals({**scope, ERROR: error}, receive, send)
                return
            except ClientLeft:
                return
            await self._app(scope, receive, send)

    async def _enter(self, scope: Scope, receive: Receive, held: AsyncExitStack) -> Receive:
        """What the application receives from; what the request takes is in ``held``."""
        path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        require_key(self._keys, path, _header(scope, b"authorization"))
        if scope["method"] != "POST":
            return receive
        body = await read_body(scope, receive, self._max_bytes)
        if body is None:
            raise ClientLeft
        held.callback(body.close)
        scope[ASKED], scope[BODY] = body.asked, body
        if path in GENERATING:
            await held.enter_async_context(self._gate.place(body.asked.priority, body.left))
        return body.receive


async def _refused(scope: Scope, receive: Receive, send: Send) -> None:
    await refuse(scope[ERROR], send)


async def refuse(error: TercetError, send: Send) -> None:
    """Answer with an error."""
    body = msgspec.json.encode(error.to_wire())
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if isinstance(error, Saturated):
        headers.append((b"retry-after", str(error.retry_after).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _header(scope: Scope, wanted: bytes) -> str:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name.lower() == wanted), "")
