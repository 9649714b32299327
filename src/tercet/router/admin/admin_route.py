"""Base of all admin routes: the check of access, the objects that they act on, and the form of answers and errors."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute

from tercet.fleet import EngineFleet
from tercet.protocol import Forbidden, TercetError
from tercet.protocol.headers import BEHIND_HEADER
from tercet.router.serve.routing import NamedFiles
from tercet.router.state.shared_state import SharedState
from tercet.wire.serving.server_access import ADMITTED

MOST_DIGITS = 18
"""Most digits of a number in a query; Python refuses to read thousands of them."""


def whole_number(text: str) -> int | None:
    """Return the number in a query's text; None if it is not a number from 0 on."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS else None


class AdminRoute(APIRoute):
    """A route that answers with Tercet's errors; the application's handlers would turn them into server failures."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                if ADMITTED not in request.scope:  # the router's check of access has not seen this request
                    raise Forbidden("this route accepts only requests that came through the router")
                return await handle(request)
            except TercetError as error:
                return json_answer(error.to_wire(), error.status)

        return answer


def shared_of(request: Request) -> SharedState:
    """Return the state that the router's processes share."""
    return request.app.state.tercet


def fleet_of(request: Request) -> EngineFleet:
    """Return the fleet of this process."""
    return shared_of(request).service.fleet


def files_of(request: Request) -> NamedFiles:
    """Return the files that a request may name."""
    return request.app.state.tercet_files


def asked_by(request: Request) -> str:
    """Return the origin of a change (method, path and client address), for the log."""
    client = request.client.host if request.client is not None else "this machine"
    return f"{request.method} {request.url.path} from {client}"


def json_answer(value: Any, status: int = 200, behind: Sequence[str] = ()) -> Response:
    """Return a response with ``value`` as JSON.

    ``behind`` lists the processes that share the fleet and have not applied a change; a header carries the list.
    """
    headers = {BEHIND_HEADER: _one_line("; ".join(behind))} if behind else None
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def _one_line(text: str) -> str:
    """Return the text in a form that a header can carry: printable ASCII without line breaks."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(printable.split()).encode("ascii", "backslashreplace").decode()
