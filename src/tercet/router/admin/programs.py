"""Routes for the programs that serve requests."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from tercet.protocol.wire import decode_call
from tercet.router.admin.admin_route import AdminRoute, asked_by, files_of, json_answer, shared_of
from tercet.router.observe.metrics import Metrics
from tercet.router.serve.routing import Plan, Version
from tercet.router.serve.service import Service

routes = APIRouter(route_class=AdminRoute)


@routes.get("/program")
async def program(request: Request) -> Response:
    """Show the programs that serve requests; a request may name another one."""
    return json_answer(programs_shown(shared_of(request).service))


@routes.put("/program")
async def set_program(request: Request) -> Response:
    """Set the programs that serve requests from now on; the body is a :class:`~tercet.router.serve.routing.Plan`."""
    shared = shared_of(request)
    plan = decode_call(await request.body(), Plan)
    behind = await shared.use_program(plan, asked_by(request), load_arm=files_of(request).load_arm)
    return json_answer(programs_shown(shared.service), behind=behind)


def programs_shown(service: Service[Metrics]) -> dict[str, Any]:
    """Return the programs in use, their failures, and the previous programs."""
    routing = service.routing
    return {
        **version_shown(routing.current),
        "failures_in_a_row": dict(routing.failures),
        "previous": None if routing.previous is None else version_shown(routing.previous),
        "returned": routing.returned,
    }


def version_shown(version: Version) -> dict[str, Any]:
    """Return one version of the programs, as JSON values."""
    plan = version.plan
    one = {} if plan.program is None else {"program": plan.program, "args": plan.args}
    return {"version": version.number, **one, **msgspec.to_builtins(plan)}
