"""The routes by which a planner reports its plans and others read them."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from tercet.decisions.planning.observed import PlannerReport
from tercet.protocol.wire import decode_call
from tercet.router.admin.admin_route import AdminRoute, json_answer, shared_of

routes = APIRouter(route_class=AdminRoute)


@routes.get("/planner")
async def planner(request: Request) -> Response:
    """Show the planner's last plans, each with its forecast and the load that followed; null without a report."""
    return json_answer(await shared_of(request).planner.newest())


@routes.put("/planner")
async def report(request: Request) -> Response:
    """Store a planner's report of its last plans; the body is a `PlannerReport`."""
    await shared_of(request).planner.tell(decode_call(await request.body(), PlannerReport))
    return json_answer({})
