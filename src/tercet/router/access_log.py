"""A line for each request of a client, when its answer is over."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from starlette.types import Message, Scope, Send

from tercet.settings.log_lines import FIELDS, access_logger


@contextmanager
def access_logged(scope: Scope, send: Send) -> Generator[Send]:
    """Gives what an answer is to be sent by; at the end of the block the request is logged.

    ``status`` is 0 if no answer began, as when the client has left before; ``seconds`` are from the request's head to
    the answer's end. Query strings, headers and bodies are not logged.
    """
    began = time.monotonic()
    found: dict[str, Any] = {"method": scope["method"], "path": scope["path"], "status": 0, "seconds": 0.0}
    found["client"] = (scope.get("client") or ("",))[0]

    async def noted(message: Message) -> None:
        if message["type"] == "http.response.start":
            found["status"] = message["status"]
        await send(message)

    try:
        yield noted
    finally:
        found["seconds"] = round(time.monotonic() - began, 4)
        access_logger.info(
            "%(method)s %(path)s %(status)d in %(seconds).3f s from %(client)s", found, extra={FIELDS: found}
        )
