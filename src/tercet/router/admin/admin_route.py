"""What all routes of the router's administration share: who may call them, what they act on, and how they answer."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute

from tercet.fleet import EngineFleet
from tercet.protocol import Forbidden, TercetError
from tercet.protocol.headers import BEHIND_HEADER
from tercet.router.admin_access import ADMITTED
from tercet.router.named_files import NamedFiles
from tercet.router.shared_state import SharedState


class AdminRoute(APIRoute):
    """Answers with our errors as they are; the application's own handlers would make them failures of the server."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                if ADMITTED not in request.scope:  # what the router has not looked at is not served
                    raise Forbidden("this route answers through the router only")
                return await handle(request)
            except TercetError as error:
                return json_answer(error.to_wire(), error.status)

        return answer


def shared_of(request: Request) -> SharedState:
    """The state that the router's processes share."""
    return request.app.state.tercet


def fleet_of(request: Request) -> EngineFleet:
    """The fleet of this process."""
    return shared_of(request).service.fleet


def files_of(request: Request) -> NamedFiles:
    """The files that a request may name."""
    return request.app.state.tercet_files


def asked_by(request: Request) -> str:
    """Who wants a change, for the log."""
    client = request.client.host if request.client is not None else "this machine"
    return f"{request.method} {request.url.path} from {client}"


def json_answer(value: Any, status: int = 200, behind: Sequence[str] = ()) -> Response:
    """A response with a value as JSON.

    ``behind`` names the processes that share the fleet and have not applied a change.
    """
    headers = {BEHIND_HEADER: _one_line("; ".join(behind))} if behind else None
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def _one_line(text: str) -> str:
    """As a header can carry it."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(printable.split()).encode("ascii", "backslashreplace").decode()
