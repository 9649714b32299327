"""The route that shows the pressure of each role, and why engines' roles change or stay."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from tercet.router.admin.admin_route import AdminRoute, json_answer, shared_of
from tercet.router.state.shared_state import SharedState
from tercet.settings.role_settings import DEFAULT_CLASS, ObjectiveClass, Objectives

routes = APIRouter(route_class=AdminRoute)


@routes.get("/roles")
async def roles(request: Request) -> Response:
    """Show objectives and how many requests met them; if roles follow the load, also the last decision and changes."""
    shared = shared_of(request)
    keeper = shared.role_keeper
    decision = None if keeper is None else await keeper.decision()
    return json_answer(
        {
            "roles": "fixed" if keeper is None else "auto",
            "objectives": objectives_shown(shared),
            "engines": {member.name: member.role for member in shared.service.fleet.members},
            "decision": None if decision is None else msgspec.to_builtins(decision),
        }
    )


def objectives_shown(shared: SharedState) -> dict[str, Any]:
    """Return the objectives (seconds) and the requests of all processes; ``attainment`` is None before a request ended.

    Each of ``classes`` counts the requests whose ``header`` names it; the top level counts all other requests.
    """
    wanted, counts = shared.service.attainments.objectives, shared.reports.attainment()
    classes = [{"name": each.name, **_shown(each, counts[each.name])} for each in wanted.classes]
    return {**_shown(wanted, counts[DEFAULT_CLASS]), "header": wanted.header, "classes": classes}


def _shown(wanted: Objectives | ObjectiveClass, counts: tuple[int, int]) -> dict[str, Any]:
    ended, met = counts
    return {
        "ttft": wanted.ttft,
        "tpot": wanted.tpot,
        "share": wanted.share,
        "requests": ended,
        "met": met,
        "attainment": met / ended if ended else None,
    }
