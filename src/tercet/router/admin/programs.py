"""Routes for the programs that serve requests, and for the scheduling file that picks use."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from tercet.protocol.names import require_text
from tercet.protocol.wire import decode_call
from tercet.router.admin.admin_route import AdminRoute, asked_by, files_of, json_answer, shared_of
from tercet.router.serve.routing import Plan, Source, Version
from tercet.router.serve.service import Service
from tercet.router.state.shared_state import SharedState

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


def programs_shown(service: Service) -> dict[str, Any]:
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


class SchedulingCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``PUT /tercet/v1/scheduling``: the path of a scheduling file on the router's machine, or its content.

    If ``content`` is given, no file is read, and ``file`` is only a name for the content.
    """

    file: str
    content: Source | None = None

    def __post_init__(self) -> None:
        require_text(self.file, "file")


@routes.get("/scheduling")
async def scheduling(request: Request) -> Response:
    """Show the scheduling file in use and its profiles."""
    return json_answer(_scheduling(shared_of(request)))


@routes.put("/scheduling")
async def set_scheduling(request: Request) -> Response:
    """Set the scheduling file for picks from now on, or load the same file again."""
    shared = shared_of(request)
    call = decode_call(await request.body(), SchedulingCall)
    behind = await shared.use_scheduling(
        call.file, asked_by(request), content=call.content, load=files_of(request).load_scheduling
    )
    return json_answer(_scheduling(shared), behind=behind)


def _scheduling(shared: SharedState) -> dict[str, Any]:
    scheduling, in_use = shared.service.fleet.scheduling, shared.state.scheduling
    return {
        "file": None if in_use is None else in_use.file,
        **({} if in_use is None or in_use.content is None else {"content": in_use.content}),
        "profiles": {
            name: {
                "filters": [type(plugin).__name__ for plugin in profile.filters],
                "scorers": {type(scorer).__name__: weight for scorer, weight in profile.scorers},
                "picker": type(profile.picker).__name__,
            }
            for name, profile in scheduling.profiles.items()
        },
        "by_role": dict(scheduling.by_role),
        "deciders": list(scheduling.deciders),
    }
