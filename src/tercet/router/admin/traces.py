"""Routes for the traces of requests, which any of the router's processes may have served."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from tercet.protocol import BadRequest, UnknownSequence
from tercet.router.admin.admin_route import AdminRoute, json_answer, shared_of, whole_number
from tercet.router.observe.shared_traces import MOST_LISTED, TraceQuestion

# Number of traces in a list if the request gives none.
USUAL = 20
routes = APIRouter(route_class=AdminRoute)


@routes.get("/traces")
async def traces(request: Request) -> Response:
    """List the newest requests, running ones first: `?newest=NUMBER`, or `?slowest=NUMBER` for the slowest ones."""
    named = set(request.query_params) - {"newest", "slowest"}
    if named or len(request.query_params) > 1:
        raise BadRequest("newest: give either newest=NUMBER or slowest=NUMBER, and no other parameter", "newest")
    given = request.query_params
    newest, slowest = _number("newest", given.get("newest")), _number("slowest", given.get("slowest"))
    question = TraceQuestion(newest=newest if given else USUAL, slowest=slowest)
    found = await shared_of(request).traces.find(question)
    return json_answer([msgspec.to_builtins(trace) for trace in found])


@routes.get("/traces/{name:path}")
async def trace(request: Request, name: str) -> Response:
    """Show the traces of requests with this `x-request-id`, or with this id of an answer, a sequence or a trace."""
    found = await shared_of(request).traces.find(TraceQuestion(id=name))
    if not found:
        raise UnknownSequence(
            f"id: no router keeps a trace of {name!r}: the id is wrong, or the trace is too old (trace-requests)", "id"
        )
    return json_answer([msgspec.to_builtins(each) for each in found])


def _number(name: str, text: str | None) -> int:
    if text is None:
        return 0
    number = whole_number(text)
    if number is None or not 0 < number <= MOST_LISTED:
        raise BadRequest(f"{name}: {text[:40]!r} is not a number from 1 to {MOST_LISTED}", name)
    return number
