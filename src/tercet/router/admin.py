"""The front door's own routes: which engines there are and which programs run, and how to change both."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.routing import APIRoute

from tercet import protocol
from tercet.fleet import EngineFleet, Member
from tercet.programs import migrate_context
from tercet.protocol import Role, TercetError
from tercet.protocol.wire import PREFIX, decode_call
from tercet.router.keys import require_key
from tercet.router.membership import Membership
from tercet.router.plan import Plan
from tercet.router.routing import Version
from tercet.router.scheduling_file import SchedulingFile
from tercet.router.service import Service
from tercet.settings import EngineAddress


class RoleCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``PUT /tercet/v1/engines/{name}/role``."""

    role: Role


class SchedulingCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``PUT /tercet/v1/scheduling``: a path on the front door's machine."""

    file: str


class MigrateCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /tercet/v1/migrate_context``: token ids, and the names of two engines."""

    prompt: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]
    source: str
    destination: str
    cache_salt: str | None = None


@dataclass(frozen=True)
class State:
    """What the routes work on. Callers must show one of ``keys``, if there are any."""

    service: Service
    membership: Membership
    scheduling: SchedulingFile
    keys: Sequence[str] = ()


def install(app: FastAPI, state: State) -> None:
    """Give ``app`` the routes."""
    app.state.tercet = state.service
    app.state.tercet_admin = state
    app.include_router(router)


def _state(request: Request) -> State:
    return request.app.state.tercet_admin


def _require_key(request: Request) -> None:
    """vLLM's own check of ``--api-key`` covers its own paths only."""
    require_key(_state(request).keys, request.url.path, request.headers.get("authorization", ""))


class _Route(APIRoute):
    """Answers with our errors as they are; the application's own handlers would make them failures of the server."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except TercetError as error:
                return _json(error.to_wire(), error.status)

        return answer


router = APIRouter(prefix=PREFIX, tags=["tercet"], dependencies=[Depends(_require_key)], route_class=_Route)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


# ---- programs ------------------------------------------------------------------------------------------------


@router.get("/program")
async def program(request: Request) -> Response:
    """The programs that requests run under, unless they name another one."""
    return _json(_programs(_state(request).service))


@router.put("/program")
async def set_program(request: Request) -> Response:
    """Other programs for requests from now on; the body is a :class:`~tercet.router.plan.Plan`."""
    service = _state(request).service
    await service.use(decode_call(await request.body(), Plan))
    return _json(_programs(service))


def _programs(service: Service) -> dict[str, Any]:
    routing = service.routing
    return {
        **_version(routing.current),
        "failures_in_a_row": dict(routing.failures),
        "previous": None if routing.previous is None else _version(routing.previous),
        "returned": routing.returned,
    }


def _version(version: Version) -> dict[str, Any]:
    plan = version.plan
    one = {} if plan.program is None else {"program": plan.program, "args": plan.args}
    return {"version": version.number, **one, **msgspec.to_builtins(plan)}


# ---- scheduling ----------------------------------------------------------------------------------------------


@router.get("/scheduling")
async def scheduling(request: Request) -> Response:
    """The scheduling file in use, and the profiles in it."""
    return _json(_state(request).scheduling.describe())


@router.put("/scheduling")
async def set_scheduling(request: Request) -> Response:
    """Another scheduling file for picks from now on, or the same one anew."""
    found = _state(request).scheduling
    await found.use(decode_call(await request.body(), SchedulingCall).file)
    return _json(found.describe())


# ---- contexts ------------------------------------------------------------------------------------------------


@router.post("/migrate_context")
async def move_context(request: Request) -> Response:
    """Have a prefix in another engine's cache; answers with what was sent, the range and the bytes."""
    call = decode_call(await request.body(), MigrateCall)
    prefix = protocol.Request(seq_id=f"context-{uuid.uuid4().hex}", prompt=call.prompt, cache_salt=call.cache_salt)
    sent = await migrate_context(_fleet(request), prefix, call.source, call.destination)
    if sent is None:
        return _json({"begin": len(call.prompt), "end": len(call.prompt), "bytes": 0})
    return _json({"begin": sent.begin, "end": sent.end, "bytes": sent.bytes})


# ---- engines -------------------------------------------------------------------------------------------------


@router.get("/engines")
async def engines(request: Request) -> Response:
    """Every engine: name, url, role, what this front door runs on it, and its last report with the age in seconds."""
    return _json([_engine(member, _fleet(request)) for member in _fleet(request).members])


@router.post("/engines")
async def add_engine(request: Request) -> Response:
    """One more engine, once it has answered; the body is an :class:`~tercet.settings.EngineAddress`."""
    address = decode_call(await request.body(), EngineAddress)
    return _json(_engine(await _state(request).membership.add(address), _fleet(request)), 201)


@router.delete("/engines/{name}")
async def remove_engine(request: Request, name: str) -> Response:
    """Forget an engine; what runs on it finishes."""
    return _json(_engine(_state(request).membership.remove(name), _fleet(request)))


@router.post("/engines/{name}/drain")
async def drain_engine(request: Request, name: str) -> Response:
    """Pick it for nothing new; what runs on it finishes."""
    return _json(_engine(_state(request).membership.drain(name), _fleet(request)))


@router.delete("/engines/{name}/drain")
async def undrain_engine(request: Request, name: str) -> Response:
    """Pick it again."""
    return _json(_engine(_state(request).membership.drain(name, draining=False), _fleet(request)))


@router.put("/engines/{name}/role")
async def set_role(request: Request, name: str) -> Response:
    """Another role for an engine."""
    role = decode_call(await request.body(), RoleCall).role
    return _json(_engine(_state(request).membership.set_role(name, role), _fleet(request)))


def _fleet(request: Request) -> EngineFleet:
    return _state(request).service.fleet


def _engine(member: Member, fleet: EngineFleet) -> dict[str, Any]:
    last = fleet.knowledge.loads.last(member.name)
    return {
        "name": member.name,
        "url": member.url,
        "role": member.role,
        "reachable": member.reachable,
        "draining": member.draining,
        "in_flight": member.in_flight,
        "report": None if last is None else {"age": last[1], **msgspec.structs.asdict(last[0])},
        "labels": dict(member.labels),
    }
