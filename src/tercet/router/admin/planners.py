"""The routes by which a planner reports its plans, and by which others see them."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from tercet.decisions.planning.planner_report import PlannerReport
from tercet.protocol.wire import decode_call
from tercet.router.admin.admin_route import AdminRoute, json_answer, shared_of

routes = APIRouter(route_class=AdminRoute)


@routes.get("/planner")
async def planner(request: Request) -> Response:
    """The last plans of the planner, with what each expected and what came; null if none has reported."""
    return json_answer(await shared_of(request).planner.newest())


@routes.put("/planner")
async def report(request: Request) -> Response:
    """A planner reports its last plans; the body is a `PlannerReport`."""
    await shared_of(request).planner.tell(decode_call(await request.body(), PlannerReport))
    return json_answer({})
