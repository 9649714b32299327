"""Installation of the admin routes in an application, with JSON errors for paths that it does not have."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, FastAPI, Response
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tercet.protocol import MethodNotAllowed, TercetError, UnknownPath
from tercet.protocol.wire import API_PREFIX
from tercet.router.admin import (
    adapters,
    engines,
    members,
    planners,
    programs,
    roles,
    scheduling,
    sequences,
    status,
    traces,
    traffic,
)
from tercet.router.admin.adapters import vllms
from tercet.router.admin.admin_route import AdminRoute, json_answer
from tercet.router.serve.named_files import NamedFiles
from tercet.router.state.shared_state import SharedState

router = APIRouter(prefix=API_PREFIX, tags=["tercet"], route_class=AdminRoute)
SUBJECTS = (status, programs, scheduling, sequences, traces, adapters, engines, members, roles, traffic, planners)
for subject in SUBJECTS:
    router.include_router(subject.routes)


def install(
    app: FastAPI,
    shared: SharedState,
    models: Sequence[str],
    loads_adapters: bool = False,
    files: NamedFiles | None = None,
) -> None:
    """Add the admin routes to ``app``; they show and change ``shared``. ``models`` are the names of the base model.

    ``loads_adapters`` also replaces vLLM's routes for adapters by routes for the whole fleet. ``files`` are the files
    that requests may name; None for no files.
    """
    app.state.tercet, app.state.tercet_models, app.state.tercet_files = shared, models, files or NamedFiles()
    # The routes have their prefix and route class: include_router would make each of them again, which takes 50 ms.
    app.router.routes.extend(router.routes)
    if loads_adapters:
        own = {route.path for route in vllms.routes if isinstance(route, Route)}
        app.router.routes[:] = [each for each in app.routes if not (isinstance(each, Route) and each.path in own)]
        app.router.routes.extend(vllms.routes)
    app.router.middleware_stack = _refusing(app.router.middleware_stack, app.routes)


def _refusing(served: ASGIApp, routes: Sequence[BaseRoute]) -> ASGIApp:
    """Return ``served`` with OpenAI's error JSON in answers for a path or a method without a route."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await served(scope, receive, send)
        except HTTPException as refusal:  # raised by the routing itself: routes answer their own errors
            if scope["type"] != "http" or refusal.status_code not in (UnknownPath.status, MethodNotAllowed.status):
                raise
            await _without_route(scope, routes)(scope, receive, send)

    return answer


def _without_route(scope: Scope, routes: Sequence[BaseRoute]) -> Response:
    method, path = scope["method"], scope["path"]
    found = [route for route in routes if isinstance(route, Route) and route.matches(scope)[0] is Match.PARTIAL]
    allowed = ", ".join(sorted({name for route in found for name in route.methods or ()}))
    if not allowed:
        error: TercetError = UnknownPath(f"this server has no route {method} {path}; /openapi.json lists the routes")
        return json_answer(error.to_wire(), error.status)
    error = MethodNotAllowed(f"{path} does not accept the method {method}; use {allowed}")
    response = json_answer(error.to_wire(), error.status)
    response.headers["Allow"] = allowed
    return response
