"""The access log: one line for each client request, written when its answer has ended."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from starlette.types import Message, Scope, Send

from tercet.protocol.names import kept_name
from tercet.settings.log_lines import FIELDS, REQUEST_ID, access_logger, request_id
from tercet.wire.serving.request_context import CONTEXT, RequestContext

LONGEST_PATH = 512
"""Maximum characters of a path that are logged; a longer one is logged as its beginning and a digest."""
WORDS = "%(method)s %(path)s %(status)d in %(seconds).3f s from %(client)s"
WITH_MODEL = ", model %(model)s"
WITH_TOKENS = ", %(prompt_tokens)d + %(output_tokens)d tokens"


@contextmanager
def access_logged(scope: Scope, send: Send) -> Generator[Send]:
    """Yield the function to send the answer with; at the end of the context, log the request.

    ``status`` is 0 if no answer began, for example because the client left; ``seconds`` is the time from the request's
    head to the answer's end. ``request_id`` is the header ``x-request-id``, or the answer's id without that header.
    ``model`` is the model that the body names. Tokens are those of all sequences that the request has started, as far
    as the client has them. Query strings, other headers and the rest of bodies are not logged.
    """
    began = time.monotonic()
    path = kept_name(scope["path"], LONGEST_PATH)
    found: dict[str, Any] = {"method": scope["method"], "path": path, "status": 0, "seconds": 0.0}
    found["client"] = (scope.get("client") or ("",))[0]

    async def noted(message: Message) -> None:
        if message["type"] == "http.response.start":
            found["status"] = message["status"]
        await send(message)

    try:
        yield noted
    finally:
        found["seconds"] = round(time.monotonic() - began, 4)
        found |= _asked_and_generated(scope.get(CONTEXT))
        words = WORDS + (WITH_MODEL if "model" in found else "") + (WITH_TOKENS if "output_tokens" in found else "")
        access_logger.info(words, found, extra={FIELDS: found})


def _asked_and_generated(context: RequestContext | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if context is None:
        return found
    if context.asked.model:
        found["model"] = kept_name(context.asked.model)
    if sequences := context.sequences:
        found["prompt_tokens"] = sum(each.request.num_tokens for each in sequences)
        found["output_tokens"] = sum(len(each.tokens) for each in sequences)
        found[REQUEST_ID] = request_id() or kept_name(sequences[0].request.seq_id)
    return found
