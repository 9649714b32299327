"""One request from its head to its answer's end: its id, its place in a distributed trace, and its recorded trace."""

from __future__ import annotations

import secrets
from collections.abc import Generator
from contextlib import contextmanager

from starlette.types import Scope

from tercet.protocol.headers import GENERATING, REQUEST_ID_HEADER
from tercet.protocol.names import kept_name
from tercet.protocol.spans import entered, span_context_of, working_in
from tercet.router.observe.request_spans import request_attributes
from tercet.router.observe.request_traces import FollowedRequest, RequestTraces
from tercet.settings.log_lines import lines_of_request, request_id, request_renamed
from tercet.wire.serving.request_context import RequestContext

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
