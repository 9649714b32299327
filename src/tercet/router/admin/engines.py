"""Routes for the engines of the fleet: their state, roles, drains and LoRA adapters, and engines that join and leave.

Engines join and leave with the fleet's secret. vLLM's own routes for adapters act on the whole fleet here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from tercet.fleet import EngineFleet, Member
from tercet.fleet.adapters import has
from tercet.protocol import BadRequest, Role
from tercet.protocol.access import require_digest
from tercet.protocol.wire import MEMBERS, JoinCall, LoadAdapterCall, Name, ReplaceAdapterCall, decode_call
from tercet.router.admin.admin_route import AdminRoute, asked_by, fleet_of, json_answer, shared_of
from tercet.router.state import joined_members
from tercet.router.state.fleet_state import FleetState
from tercet.router.state.shared_state import SharedState
from tercet.settings import EngineAddress
from tercet.settings.fleet_settings import DEFAULT_CLASS, ObjectiveClass, Objectives
from tercet.wire.serving.server_access import PROVED

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


vllms = APIRouter(tags=["tercet"], route_class=AdminRoute)
"""vLLM's own routes, which act on the whole fleet here."""


class VLLMLoadCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of vLLM's ``POST /v1/load_lora_adapter``, with the fields that a fleet supports."""

    lora_name: Name
    lora_path: Name
    load_inplace: bool = False


class VLLMUnloadCall(msgspec.Struct, frozen=True):
    """Body of vLLM's ``POST /v1/unload_lora_adapter``."""

    lora_name: Name


@routes.get("/adapters")
async def adapters(request: Request) -> Response:
    """List the LoRA adapters of this fleet: name, path and digest, and the engines that have each."""
    return json_answer(_adapters(fleet_of(request)))


@routes.post("/adapters")
async def load_adapter(request: Request) -> Response:
    """Serve a LoRA adapter after every engine has loaded it from this path on the engine's machine."""
    call = decode_call(await request.body(), LoadAdapterCall)
    return await _load_adapter(request, call.name, call.path)


@routes.put("/adapters/{name:path}")
async def replace_adapter(request: Request, name: str) -> Response:
    """Replace a LoRA adapter on every engine by the files at this path, unless requests use the adapter."""
    call = decode_call(await request.body(), ReplaceAdapterCall)
    return await _replace_adapter(request, name, call.path)


@routes.delete("/adapters/{name:path}")
async def unload_adapter(request: Request, name: str) -> Response:
    """Stop accepting requests for a LoRA adapter; running sequences that use it continue."""
    return await _unload_adapter(request, name)


async def _load_adapter(request: Request, name: str, path: str) -> Response:
    _require_free(request, name)
    behind = await shared_of(request).adapters.load(name, path, asked_by(request))
    return json_answer(_adapter(request, name), 201, behind)


async def _replace_adapter(request: Request, name: str, path: str) -> Response:
    _require_free(request, name)
    behind = await shared_of(request).adapters.replace(name, path, asked_by(request))
    return json_answer(_adapter(request, name), behind=behind)


def _require_free(request: Request, name: str) -> None:
    if name in request.app.state.tercet_models:
        raise BadRequest(f"name: {name!r} is a name of the base model; choose another name for the adapter", "name")


def _adapter(request: Request, name: str) -> dict[str, Any]:
    return next(each for each in _adapters(fleet_of(request)) if each["name"] == name)


async def _unload_adapter(request: Request, name: str) -> Response:
    behind = await shared_of(request).adapters.unload(name, asked_by(request))
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


@vllms.post("/v1/load_lora_adapter")
async def load_lora_adapter(request: Request) -> Response:
    """Load a LoRA adapter on every engine; answers as vLLM does."""
    call = decode_call(await request.body(), VLLMLoadCall)
    change = _replace_adapter if call.load_inplace else _load_adapter
    await change(request, call.lora_name, call.lora_path)
    return Response(f"Success: LoRA adapter '{call.lora_name}' added successfully.")


@vllms.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(request: Request) -> Response:
    """Unload a LoRA adapter from every engine; answers as vLLM does."""
    call = decode_call(await request.body(), VLLMUnloadCall)
    await _unload_adapter(request, call.lora_name)
    return Response(f"Success: LoRA adapter '{call.lora_name}' removed successfully.")


@routes.get("/roles")
async def roles(request: Request) -> Response:
    """Show objectives and how many requests met them; if roles follow the load, also the last decision and changes."""
    shared = shared_of(request)
    keeper = shared.role_keeper
    decision = None if keeper is None else await keeper.decision()
    return json_answer(
        {
            "roles": "fixed" if keeper is None else "auto",
            "objectives": objectives_shown(shared),
            "engines": {member.name: member.role for member in shared.service.fleet.members},
            "decision": None if decision is None else msgspec.to_builtins(decision),
        }
    )


def objectives_shown(shared: SharedState) -> dict[str, Any]:
    """Return the objectives (seconds) and the requests of all processes; ``attainment`` is None before a request ended.

    Each of ``classes`` counts the requests whose ``header`` names it; the top level counts all other requests.
    """
    wanted, counts = shared.service.attainments.objectives, shared.reports.attainment()
    classes = [{"name": each.name, **_shown(each, counts[each.name])} for each in wanted.classes]
    return {**_shown(wanted, counts[DEFAULT_CLASS]), "header": wanted.header, "classes": classes}


def _shown(wanted: Objectives | ObjectiveClass, counts: tuple[int, int]) -> dict[str, Any]:
    ended, met = counts
    return {
        "ttft": wanted.ttft,
        "tpot": wanted.tpot,
        "share": wanted.share,
        "requests": ended,
        "met": met,
        "attainment": met / ended if ended else None,
    }
