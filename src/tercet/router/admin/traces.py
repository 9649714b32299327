"""Routes for what happened to requests, whichever process served them."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from tercet.protocol import BadRequest, UnknownSequence
from tercet.router.admin.admin_route import AdminRoute, json_answer, shared_of
from tercet.router.shared_traces import MOST_LISTED, TraceQuestion

# Of a list without a number.
USUAL = 20
routes = APIRouter(route_class=AdminRoute)


@routes.get("/traces")
async def traces(request: Request) -> Response:
    """The newest requests, those that run first; `?newest=NUMBER`, or `?slowest=NUMBER` for those that took longest."""
    named = set(request.query_params) - {"newest", "slowest"}
    if named or len(request.query_params) > 1:
        raise BadRequest("newest: give newest=NUMBER or slowest=NUMBER, one of them", "newest")
    given = request.query_params
    newest, slowest = _number("newest", given.get("newest")), _number("slowest", given.get("slowest"))
    question = TraceQuestion(newest=newest if given else USUAL, slowest=slowest)
    found = await shared_of(request).traces.find(question)
    return json_answer([msgspec.to_builtins(trace) for trace in found])


@routes.get("/traces/{name:path}")
async def trace(request: Request, name: str) -> Response:
    """What happened to the requests with this `x-request-id`, the id of an answer or sequence, or a trace's id."""
    found = await shared_of(request).traces.find(TraceQuestion(id=name))
    if not found:
        raise UnknownSequence(
            f"id: the routers keep no trace of {name!r}: it is another id, or too long ago (trace-requests)", "id"
        )
    return json_answer([msgspec.to_builtins(each) for each in found])


def _number(name: str, text: str | None) -> int:
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= MOST_LISTED):
        raise BadRequest(f"{name}: {text[:40]!r} is not a number from 1 to {MOST_LISTED}", name)
    return int(text)
