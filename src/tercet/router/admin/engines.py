"""Routes for the engines of the fleet: their state, members, roles and drains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from tercet.fleet import Member
from tercet.protocol import Role
from tercet.protocol.wire import decode_call
from tercet.router.admin.admin_route import AdminRoute, asked_by, fleet_of, json_answer, shared_of
from tercet.router.state.fleet_state import FleetState
from tercet.router.state.shared_state import SharedState
from tercet.settings import EngineAddress

routes = APIRouter(route_class=AdminRoute)


class RoleCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``PUT /tercet/v1/engines/{name}/role``."""

    role: Role


@routes.get("/engines")
async def engines(request: Request) -> Response:
    """List every engine: name, URL, role, sequences in flight, and its last report with its age in seconds."""
    return json_answer([engine_shown(member, shared_of(request)) for member in fleet_of(request).members])


@routes.post("/engines")
async def add_engine(request: Request) -> Response:
    """Add an engine after it has answered; the body is an :class:`~tercet.settings.EngineAddress`."""
    address = decode_call(await request.body(), EngineAddress)
    behind = await shared_of(request).add(address, asked_by(request))
    return _one(request, address.name, behind, 201)


@routes.delete("/engines/{name}")
async def remove_engine(request: Request, name: str) -> Response:
    """Remove an engine; running sequences on it finish."""
    shared = shared_of(request)
    gone = engine_shown(fleet_of(request).member(name), shared)
    return json_answer(gone, behind=await shared.change(lambda state: state.without_member(name), asked_by(request)))


@routes.post("/engines/{name}/drain")
async def drain_engine(request: Request, name: str) -> Response:
    """Stop picking an engine; its running sequences move to other engines, or finish."""
    return await _changed(request, name, lambda state: state.with_draining(name, True))


@routes.delete("/engines/{name}/drain")
async def undrain_engine(request: Request, name: str) -> Response:
    """Pick a drained engine again."""
    return await _changed(request, name, lambda state: state.with_draining(name, False))


@routes.put("/engines/{name}/role")
async def set_role(request: Request, name: str) -> Response:
    """Change the role of an engine."""
    role = decode_call(await request.body(), RoleCall).role
    return await _changed(request, name, lambda state: state.with_role(name, role))


async def _changed(request: Request, name: str, change: Callable[[FleetState], FleetState]) -> Response:
    return _one(request, name, await shared_of(request).change(change, asked_by(request)))


def _one(request: Request, name: str, behind: Sequence[str], status: int = 200) -> Response:
    return json_answer(engine_shown(fleet_of(request).member(name), shared_of(request)), status, behind)


def engine_shown(member: Member, shared: SharedState) -> dict[str, Any]:
    """Return the state of an engine in this process; ``in_flight`` counts for all processes that share the fleet.

    The last report of an engine that does not answer is out of date, and not shown.
    """
    everywhere = shared.reports.engines()[member.name]
    last = shared.service.fleet.knowledge.loads.last(member.name) if everywhere.reachable else None
    return {
        "name": member.name,
        "url": member.url,
        "role": member.role,
        "reachable": everywhere.reachable,
        "refused": member.refused,
        "draining": member.draining,
        "stopping": member.stopping,
        "paused": member.paused,
        "in_flight": everywhere.in_flight,
        "report": None if last is None else {"age": last[1], **msgspec.structs.asdict(last[0])},
        "labels": dict(member.labels),
        "adapters": sorted(member.adapters),
    }
