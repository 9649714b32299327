"""Routes for the scheduling file that picks use."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response

from tercet.protocol.wire import decode_call
from tercet.router.admin.admin_route import AdminRoute, asked_by, files_of, json_answer, shared_of
from tercet.router.routing import Source
from tercet.router.shared_state import SharedState

routes = APIRouter(route_class=AdminRoute)


class SchedulingCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``PUT /tercet/v1/scheduling``: a path on the router's machine.

    With a ``content`` that is what it says, no file is read, and ``file`` is what it is called.
    """

    file: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    content: Source | None = None


@routes.get("/scheduling")
async def scheduling(request: Request) -> Response:
    """The scheduling file in use, and the profiles in it."""
    return json_answer(_scheduling(shared_of(request)))


@routes.put("/scheduling")
async def set_scheduling(request: Request) -> Response:
    """Another scheduling file for picks from now on, or the same one again."""
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
