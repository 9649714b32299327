"""What the router's own routes have in common: their state, their answers, and errors in our words."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute

from tercet.protocol import Forbidden, TercetError
from tercet.protocol.headers import BEHIND_HEADER
from tercet.router.admin_access import ADMITTED
from tercet.router.shared_state import SharedState


def shared_of(request: Request) -> SharedState:
    """What the process shares with others."""
    return request.app.state.tercet


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


def json_answer(value: Any, status: int = 200, behind: Sequence[str] = ()) -> Response:
    """An answer; ``behind`` is what to say of processes that share the fleet and have not followed a change."""
    headers = {BEHIND_HEADER: _one_line("; ".join(behind))} if behind else None
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def _one_line(text: str) -> str:
    """As a header can carry it."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(printable.split()).encode("ascii", "backslashreplace").decode()
