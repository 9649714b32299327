"""The front door's own routes: what the fleet looks like and which program runs."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from tercet.protocol.wire import PREFIX
from tercet.router.service import Service

router = APIRouter(prefix=PREFIX, tags=["tercet"])


def _service(request: Request) -> Service:
    return request.app.state.tercet


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


@router.get("/engines")
async def engines(request: Request) -> Response:
    """Every engine: name, url, role, and the sequences that this front door runs on it."""
    return _json(
        [
            {
                "name": member.name,
                "url": member.url,
                "role": member.role,
                "reachable": member.reachable,
                "in_flight": member.in_flight,
            }
            for member in _service(request).fleet.members
        ]
    )


@router.get("/program")
async def program(request: Request) -> Response:
    """The program that requests run under, unless they name another one."""
    service = _service(request)
    return _json({"program": service.program, "args": service.program_args})
