"""The router's own routes: its engines, its programs and what they run, and how to change the first two."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tercet import protocol
from tercet.fleet import EngineFleet, Member, RunningSequence
from tercet.fleet.adapters import has
from tercet.programs import migrate_context
from tercet.protocol import BadRequest, MethodNotAllowed, Role, TercetError, UnknownPath, UnknownSequence
from tercet.protocol.multimodal import MultiModalFeatures
from tercet.protocol.wire import (
    API_PREFIX,
    LoadAdapterCall,
    MoveCall,
    Name,
    ReplaceAdapterCall,
    decode_call,
)
from tercet.router import member_routes
from tercet.router.admin_answers import AdminRoute, json_answer, shared_of
from tercet.router.fleet_state import FleetState
from tercet.router.moves import MoveRecord
from tercet.router.named_files import NamedFiles
from tercet.router.proposals import pass_on
from tercet.router.routing import Plan, Source, Version
from tercet.router.service import Service
from tercet.router.shared_state import SharedState
from tercet.settings import EngineAddress


class RoleCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``PUT /tercet/v1/engines/{name}/role``."""

    role: Role


class SchedulingCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``PUT /tercet/v1/scheduling``: a path on the router's machine.

    With a ``content`` that is what it says, no file is read, and ``file`` is what it is called.
    """

    file: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    content: Source | None = None


class MigrateCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /tercet/v1/migrate_context``: token ids, and the names of two engines.

    ``mm_features`` are as the verbs take them, with their data.
    """

    prompt: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]
    source: str
    destination: str
    cache_salt: str | None = None
    adapter: str | None = None
    mm_features: MultiModalFeatures = ()


class VLLMLoadCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of vLLM's ``POST /v1/load_lora_adapter``, as far as a fleet does it."""

    lora_name: Name
    lora_path: Name
    load_inplace: bool = False


class VLLMUnloadCall(msgspec.Struct, frozen=True):
    """Body of vLLM's ``POST /v1/unload_lora_adapter``."""

    lora_name: Name


def install(
    app: FastAPI,
    shared: SharedState,
    models: Sequence[str],
    loads_adapters: bool = False,
    files: NamedFiles | None = None,
) -> None:
    """Give ``app`` the routes, which show and change what is shared; clients know the model by the names ``models``.

    ``loads_adapters``: with vLLM's own routes for adapters, in the place of those that it has then. ``files`` are those
    that they may name; none if not given.
    """
    app.state.tercet, app.state.tercet_models, app.state.tercet_files = shared, models, files or NamedFiles()
    app.include_router(router)
    app.include_router(member_routes.router)
    if loads_adapters:
        own = {route.path for route in vllms.routes if isinstance(route, Route)}
        app.router.routes[:] = [each for each in app.routes if not (isinstance(each, Route) and each.path in own)]
        app.include_router(vllms)
    app.router.middleware_stack = _refusing(app.router.middleware_stack, app.routes)


def _refusing(served: ASGIApp, routes: Sequence[BaseRoute]) -> ASGIApp:
    """What is ``served`` by ``routes``, with OpenAI's error JSON where there is none, as all else answers."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await served(scope, receive, send)
        except HTTPException as refusal:  # of the router itself: those of routes are answered there
            if scope["type"] != "http" or refusal.status_code not in (UnknownPath.status, MethodNotAllowed.status):
                raise
            await _without_route(scope, routes)(scope, receive, send)

    return answer


def _without_route(scope: Scope, routes: Sequence[BaseRoute]) -> Response:
    method, path = scope["method"], scope["path"]
    found = [route for route in routes if isinstance(route, Route) and route.matches(scope)[0] is Match.PARTIAL]
    allowed = ", ".join(sorted({name for route in found for name in route.methods or ()}))
    if not allowed:
        error: TercetError = UnknownPath(f"there is nothing at {method} {path}; see /openapi.json")
        return json_answer(error.to_wire(), error.status)
    error = MethodNotAllowed(f"{path} is not for {method}; it takes {allowed}")
    response = json_answer(error.to_wire(), error.status)
    response.headers["Allow"] = allowed
    return response


def _files(request: Request) -> NamedFiles:
    return request.app.state.tercet_files


def _asked(request: Request) -> str:
    """Who wants a change, for the log."""
    client = request.client.host if request.client is not None else "this machine"
    return f"{request.method} {request.url.path} from {client}"


router = APIRouter(prefix=API_PREFIX, tags=["tercet"], route_class=AdminRoute)


# ---- all of it -----------------------------------------------------------------------------------------------


@router.get("/status")
async def status(request: Request) -> Response:
    """Whether this router serves, what and by which program, every engine, and the moves of this process."""
    shared = shared_of(request)
    refusal = shared.refusal()
    return json_answer(
        {
            "serving": refusal is None,
            "why": "" if refusal is None else refusal.message,
            "models": request.app.state.tercet_models,
            "program": _programs(shared.service),
            "engines": [_engine(member, shared) for member in _fleet(request).members],
            "moves": [_move(move) for move in shared.service.moves.since(0) if move.outcome == "under_way"],
        }
    )


# ---- programs ------------------------------------------------------------------------------------------------


@router.get("/program")
async def program(request: Request) -> Response:
    """The programs that requests run under, unless they name another one."""
    return json_answer(_programs(shared_of(request).service))


@router.put("/program")
async def set_program(request: Request) -> Response:
    """Other programs for requests from now on; the body is a :class:`~tercet.router.routing.Plan`."""
    shared = shared_of(request)
    plan = decode_call(await request.body(), Plan)
    behind = await shared.use_program(plan, _asked(request), load_arm=_files(request).load_arm)
    return json_answer(_programs(shared.service), behind=behind)


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
    return json_answer(_scheduling(shared_of(request)))


@router.put("/scheduling")
async def set_scheduling(request: Request) -> Response:
    """Another scheduling file for picks from now on, or the same one again."""
    shared = shared_of(request)
    call = decode_call(await request.body(), SchedulingCall)
    behind = await shared.use_scheduling(
        call.file, _asked(request), content=call.content, load=_files(request).load_scheduling
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


# ---- contexts ------------------------------------------------------------------------------------------------


@router.post("/migrate_context")
async def move_context(request: Request) -> Response:
    """Have a prefix in another engine's cache; answers with what was sent, the range and the bytes."""
    call = decode_call(await request.body(), MigrateCall)
    seq_id = f"context-{uuid.uuid4().hex}"
    prefix = protocol.Request(
        seq_id=seq_id, prompt=call.prompt, cache_salt=call.cache_salt, adapter=call.adapter,
        mm_features=call.mm_features,
    )  # fmt: skip
    sent = await migrate_context(_fleet(request), prefix, call.source, call.destination)
    if sent is None:
        return json_answer({"begin": len(call.prompt), "end": len(call.prompt), "bytes": 0})
    return json_answer({"begin": sent.begin, "end": sent.end, "bytes": sent.bytes})


# ---- sequences -----------------------------------------------------------------------------------------------


@router.get("/sequences")
async def sequences(request: Request) -> Response:
    """What this process runs now; with ``?engine=NAME`` only what that engine generates."""
    running, engine = shared_of(request).service.sequences, request.query_params.get("engine")
    now = time.monotonic()
    return json_answer([_sequence(found, now) for found in (running if engine is None else running.on(engine))])


@router.post("/sequences/{seq_id:path}/move")
async def move_sequence(request: Request, seq_id: str) -> Response:
    """Have another engine go on with a running sequence; answers when it does, with how that went.

    If another process runs it the proposal is passed on to that one, and 202 answers.
    """
    call, service = decode_call(await request.body(), MoveCall), shared_of(request).service
    try:
        sequence = service.sequences.named(seq_id)
    except UnknownSequence:
        await pass_on(service.fleet, seq_id, call.destination, call.reason)
        return json_answer({"accepted": True}, 202)
    return json_answer(_move(await service.moves.move(sequence, call.destination, call.reason)))


@router.get("/moves")
async def moves(request: Request) -> Response:
    """The moves of this process, oldest first; with ``?since=NUMBER`` those after that one."""
    since = request.query_params.get("since", "0")
    if not since.isdecimal():
        raise BadRequest(f"since: {since!r} is not the number of a move", "since")
    return json_answer([_move(move) for move in shared_of(request).service.moves.since(int(since))])


def _move(move: MoveRecord) -> dict[str, Any]:
    return {**msgspec.to_builtins(move), "bytes": move.bytes}


def _sequence(sequence: RunningSequence, now: float) -> dict[str, Any]:
    return {
        "seq_id": sequence.request.seq_id,
        "program": sequence.program,
        "engine": sequence.engine,
        "state": sequence.state,
        "attempt": sequence.attempt,
        "moves": sequence.moves,
        "prompt_tokens": sequence.request.num_tokens,
        "tokens": len(sequence.tokens),
        "seconds": now - sequence.began,
    }


# ---- adapters ------------------------------------------------------------------------------------------------


@router.get("/adapters")
async def adapters(request: Request) -> Response:
    """The LoRA adapters of this fleet: name, path and digest, and which engines have each."""
    return json_answer(_adapters(_fleet(request)))


@router.post("/adapters")
async def load_adapter(request: Request) -> Response:
    """Serve a LoRA adapter, once every engine has loaded it from this path on its machine."""
    call = decode_call(await request.body(), LoadAdapterCall)
    return await _load_adapter(request, call.name, call.path)


@router.put("/adapters/{name:path}")
async def replace_adapter(request: Request, name: str) -> Response:
    """Have the name of a LoRA adapter stand for what is at this path now, on every engine, unless requests use it."""
    call = decode_call(await request.body(), ReplaceAdapterCall)
    return await _replace_adapter(request, name, call.path)


@router.delete("/adapters/{name:path}")
async def unload_adapter(request: Request, name: str) -> Response:
    """Serve no more requests for a LoRA adapter; what runs with it goes on where it runs."""
    return await _unload_adapter(request, name)


async def _load_adapter(request: Request, name: str, path: str) -> Response:
    _require_free(request, name)
    behind = await shared_of(request).load_adapter(name, path, _asked(request))
    return json_answer(_adapter(request, name), 201, behind)


async def _replace_adapter(request: Request, name: str, path: str) -> Response:
    _require_free(request, name)
    behind = await shared_of(request).replace_adapter(name, path, _asked(request))
    return json_answer(_adapter(request, name), behind=behind)


def _require_free(request: Request, name: str) -> None:
    if name in request.app.state.tercet_models:
        raise BadRequest(f"name: {name!r} is what the base model is called", "name")


def _adapter(request: Request, name: str) -> dict[str, Any]:
    return next(each for each in _adapters(_fleet(request)) if each["name"] == name)


async def _unload_adapter(request: Request, name: str) -> Response:
    behind = await shared_of(request).unload_adapter(name, _asked(request))
    return json_answer({"name": name, "unloaded": True}, behind=behind)


def _adapters(fleet: EngineFleet) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "path": adapter.path,
            "digest": adapter.digest,
            "engines": [member.name for member in fleet.members if has(member.adapters, adapter)],
        }
        for name, adapter in fleet.adapters.items()
    ]


# vLLM's own routes, for the whole fleet.
vllms = APIRouter(tags=["tercet"], route_class=AdminRoute)


@vllms.post("/v1/load_lora_adapter")
async def load_lora_adapter(request: Request) -> Response:
    """As vLLM's."""
    call = decode_call(await request.body(), VLLMLoadCall)
    change = _replace_adapter if call.load_inplace else _load_adapter
    await change(request, call.lora_name, call.lora_path)
    return Response(f"Success: LoRA adapter '{call.lora_name}' added successfully.")


@vllms.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(request: Request) -> Response:
    """As vLLM's."""
    call = decode_call(await request.body(), VLLMUnloadCall)
    await _unload_adapter(request, call.lora_name)
    return Response(f"Success: LoRA adapter '{call.lora_name}' removed successfully.")


# ---- engines -------------------------------------------------------------------------------------------------


@router.get("/engines")
async def engines(request: Request) -> Response:
    """Every engine: name, url, role, what runs on it, and its last report with the age in seconds."""
    return json_answer([_engine(member, shared_of(request)) for member in _fleet(request).members])


@router.post("/engines")
async def add_engine(request: Request) -> Response:
    """One more engine, once it has answered; the body is an :class:`~tercet.settings.EngineAddress`."""
    address = decode_call(await request.body(), EngineAddress)
    behind = await shared_of(request).add(address, _asked(request))
    return _one(request, address.name, behind, 201)


@router.delete("/engines/{name}")
async def remove_engine(request: Request, name: str) -> Response:
    """Forget an engine; what runs on it finishes."""
    shared = shared_of(request)
    gone = _engine(_fleet(request).member(name), shared)
    return json_answer(gone, behind=await shared.change(lambda state: state.without_member(name), _asked(request)))


@router.post("/engines/{name}/drain")
async def drain_engine(request: Request, name: str) -> Response:
    """Pick it for nothing new; what runs on it goes to other engines, or finishes."""
    return await _changed(request, name, lambda state: state.with_draining(name, True))


@router.delete("/engines/{name}/drain")
async def undrain_engine(request: Request, name: str) -> Response:
    """Pick it again."""
    return await _changed(request, name, lambda state: state.with_draining(name, False))


@router.put("/engines/{name}/role")
async def set_role(request: Request, name: str) -> Response:
    """Another role for an engine."""
    role = decode_call(await request.body(), RoleCall).role
    return await _changed(request, name, lambda state: state.with_role(name, role))


def _fleet(request: Request) -> EngineFleet:
    return shared_of(request).service.fleet


async def _changed(request: Request, name: str, change: Callable[[FleetState], FleetState]) -> Response:
    return _one(request, name, await shared_of(request).change(change, _asked(request)))


def _one(request: Request, name: str, behind: Sequence[str], status: int = 200) -> Response:
    return json_answer(_engine(_fleet(request).member(name), shared_of(request)), status, behind)


def _engine(member: Member, shared: SharedState) -> dict[str, Any]:
    """An engine as this process knows it; what runs on it, as all do that share the fleet.

    What one that does not answer has reported is no longer so, and not shown.
    """
    everywhere = shared.engines()[member.name]
    last = shared.service.fleet.knowledge.loads.last(member.name) if everywhere.reachable else None
    return {
        "name": member.name,
        "url": member.url,
        "role": member.role,
        "reachable": everywhere.reachable,
        "refused": member.refused,
        "draining": member.draining,
        "stopping": member.stopping,
        "in_flight": everywhere.in_flight,
        "report": None if last is None else {"age": last[1], **msgspec.structs.asdict(last[0])},
        "labels": dict(member.labels),
        "adapters": sorted(member.adapters),
    }
