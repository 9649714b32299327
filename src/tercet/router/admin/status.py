"""The route that shows the whole state of a router."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from tercet.router.admin.admin_route import AdminRoute, fleet_of, json_answer, shared_of
from tercet.router.admin.engines import engine_shown
from tercet.router.admin.programs import programs_shown
from tercet.router.admin.roles import objectives_shown
from tercet.router.admin.sequences import move_shown

routes = APIRouter(route_class=AdminRoute)


@routes.get("/status")
async def status(request: Request) -> Response:
    """Show whether this router serves, its models, programs, objectives and engines, and this process's moves."""
    shared = shared_of(request)
    refusal = shared.reports.refusal()
    return json_answer(
        {
            "serving": refusal is None,
            "why": "" if refusal is None else refusal.message,
            "models": request.app.state.tercet_models,
            "program": programs_shown(shared.service),
            "objectives": objectives_shown(shared),
            "roles": "fixed" if shared.role_keeper is None else "auto",
            "engines": [engine_shown(member, shared) for member in fleet_of(request).members],
            "moves": [move_shown(move) for move in shared.service.moves.since(0) if move.outcome == "under_way"],
        }
    )
