"""The route for planners: the requests of the last minutes, without their text, and the state of the engines."""

from __future__ import annotations

import os
from typing import Any

from fastapi import APIRouter, Request, Response

from tercet.fleet.policy_views import PrefillLine, SeenRequests, observed_engines
from tercet.protocol import BadRequest
from tercet.router.admin.admin_route import AdminRoute, fleet_of, json_answer, shared_of
from tercet.router.admin.roles import objectives_shown

routes = APIRouter(route_class=AdminRoute)
WINDOW_S, LONGEST_WINDOW_S = 60.0, 600.0


@routes.get("/traffic")
async def traffic(request: Request) -> Response:
    """Show requests of the last ``?window=SECONDS``, since the first such call: times, lengths and hashes of blocks.

    Only requests of this process are listed. Times are seconds of its clock, whose present time is ``now``. A block's
    number is a hash of the tokens up to its end. ``processes`` is the number of processes that share the fleet; the
    engines' waiting prefills are those of all these processes.
    """
    window, shared, fleet = _window(request), shared_of(request), fleet_of(request)
    service, now = shared.service, fleet.costs.clock()
    seen = service.seen
    if seen is None:
        seen = service.remember(SeenRequests(LONGEST_WINDOW_S, service.attainments.objectives, fleet.costs.clock))
        fleet.costs.watch()
        fleet.knowledge.needed()
    lines = {name: PrefillLine(each.waiting_s, each.busy_s) for name, each in shared.reports.engines().items()}
    return json_answer(
        {
            "pid": os.getpid(),
            "processes": shared.reports.processes(),
            "now": now,
            "since": seen.since,
            "objectives": objectives_shown(shared),
            "program": service.routing.current.plan.program,
            "args": dict(service.routing.current.plan.args),
            "arrivals": [_shown(each) for each in seen.arrivals(now, window)],
            "engines": [_engine(each, fleet.member(each.name).draining) for each in observed_engines(fleet, lines)],
        }
    )


def _window(request: Request) -> float:
    given = request.query_params.get("window", str(WINDOW_S))
    try:
        window = float(given)
    except ValueError:
        window = 0.0
    if not 0 < window <= LONGEST_WINDOW_S:
        raise BadRequest(
            f"window: {given!r} is not a number of seconds above 0 and up to {LONGEST_WINDOW_S:g}", "window"
        )
    return window


def _shown(arrival: Any) -> list[Any]:
    """Return an arrival's values in the order of the fields of ``tercet.decisions.planning.ObservedRequest``."""
    return [arrival.at, arrival.prompt_tokens, arrival.output_tokens, arrival.ended, arrival.blocks,
            arrival.block_size, arrival.met]  # fmt: skip


def _engine(engine: Any, draining: bool) -> dict[str, Any]:
    return {name: getattr(engine, name) for name in engine.__dataclass_fields__} | {"draining": draining}
