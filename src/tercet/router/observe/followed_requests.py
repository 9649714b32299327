"""One request from its head to its answer's end: its id, span and recorded trace, and its line in the access log."""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from starlette.types import Message, Scope, Send

from tercet.logs import FIELDS, REQUEST_ID, access_logger, lines_of_request, request_id, request_renamed
from tercet.protocol.headers import GENERATING, REQUEST_ID_HEADER
from tercet.protocol.names import kept_name
from tercet.protocol.spans import entered, span_context_of, working_in
from tercet.router.observe.request_traces import FollowedRequest, RequestTraces, request_attributes
from tercet.wire.serving.server_access import CONTEXT, RequestContext

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


LONGEST_IN_ANSWERS = 8192
"""Maximum characters of a client's id in its answer, where each token repeats it."""
_HEADER = REQUEST_ID_HEADER.encode()


@contextmanager
def followed_request(context: RequestContext, scope: Scope, traces: RequestTraces) -> Generator[FollowedRequest | None]:
    """Name the request in log lines while entered, and record it in ``traces`` if engines generate for it.

    Such a request gets an id if its client gave none, and a shorter one if it is too long for answers; vLLM and engines
    then see the id as if the client had sent it.
    """
    given = context.headers.get(REQUEST_ID_HEADER, "")
    if context.path not in GENERATING or scope["method"] != "POST":
        with lines_of_request(given), working_in(span_context_of(context.headers)):
            yield None
        return
    named = _in_answers(given) if given else secrets.token_hex(16)
    if named != given:
        _set_request_id(context, scope, named)
    with lines_of_request(given or named):
        caller = span_context_of(context.headers)
        place = entered(caller, f"POST {context.path}", request_attributes(context.path, "", request_id()))
        with working_in(place), traces.following(context, request_id(), caller, place) as followed:
            followed.is_id_made = not given
            yield followed


def take_id_of_body(followed: FollowedRequest, scope: Scope) -> None:
    """Use the id that a client without the header wrote into the body; the layer behind prefers the header.

    An id that cannot be a header stays in the body only; log lines then keep the id that the router made.
    """
    named = (followed.context.fields or {}).get("request_id")
    if not followed.is_id_made or not isinstance(named, str):
        return
    in_answers = _in_answers(named)
    if in_answers.isascii() and in_answers.isprintable():
        _set_request_id(followed.context, scope, in_answers)
        followed.request_id = request_renamed(named)
    else:
        _remove_request_id(followed.context, scope)


def _in_answers(named: str) -> str:
    return named if len(named) <= LONGEST_IN_ANSWERS else kept_name(named, LONGEST_IN_ANSWERS)


def _set_request_id(context: RequestContext, scope: Scope, named: str) -> None:
    context.headers = {**context.headers, REQUEST_ID_HEADER: named}
    scope["headers"] = [*(each for each in scope["headers"] if each[0] != _HEADER), (_HEADER, named.encode())]


def _remove_request_id(context: RequestContext, scope: Scope) -> None:
    context.headers = {name: value for name, value in context.headers.items() if name != REQUEST_ID_HEADER}
    scope["headers"] = [each for each in scope["headers"] if each[0] != _HEADER]
