"""Routes for the LoRA adapters of the fleet: Tercet's own, and vLLM's, which act on the whole fleet here."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from tercet.fleet import EngineFleet
from tercet.fleet.adapters import has
from tercet.protocol import BadRequest
from tercet.protocol.wire import LoadAdapterCall, Name, ReplaceAdapterCall, decode_call
from tercet.router.admin.admin_route import AdminRoute, asked_by, fleet_of, json_answer, shared_of

routes = APIRouter(route_class=AdminRoute)
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
