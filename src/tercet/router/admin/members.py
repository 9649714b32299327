"""The routes by which engines join a running router and leave it; they require the fleet's secret."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from tercet.protocol.access import require_digest
from tercet.protocol.wire import MEMBERS, JoinCall, decode_call
from tercet.router.admin.admin_route import AdminRoute, json_answer, shared_of
from tercet.router.state import joined_members
from tercet.wire.serving.server_access import PROVED

routes = APIRouter(route_class=AdminRoute)


@routes.put(MEMBERS + "{name}")
async def join_fleet(request: Request, name: str) -> Response:
    """Make the calling engine a member, or keep it one; the body is a :class:`~tercet.protocol.wire.JoinCall`."""
    body = await request.body()
    require_digest(body, request.scope.get(PROVED))
    return json_answer(await joined_members.join(shared_of(request), name, decode_call(body, JoinCall)))


@routes.delete(MEMBERS + "{name}/{uid}")
async def leave_fleet(request: Request, name: str, uid: str) -> Response:
    """Remove the start ``uid`` of an engine, which leaves the fleet."""
    require_digest(await request.body(), request.scope.get(PROVED))
    return json_answer(await joined_members.leave(shared_of(request), name, uid))
