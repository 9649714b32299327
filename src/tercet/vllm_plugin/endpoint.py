"""The endpoint plugin: the verbs over HTTP, on vLLM's own API server (load it with ``VLLM_PLUGINS=tercet``)."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from argparse import Namespace
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.datastructures import State

from tercet.aio.files import descriptors_watched
from tercet.engine import verbs
from tercet.engine.edge import StopWhenEmpty, fail_at_exit
from tercet.protocol import EngineError, Revision, TercetError
from tercet.protocol.access import secrets_of
from tercet.protocol.names import require_engine_name
from tercet.protocol.wire import API_PREFIX, JSON, MSGPACK, LoadAdapterCall, ReplaceAdapterCall
from tercet.settings.process_settings import ENGINE_NAME_VARIABLE, PrefillBudget, clients_see_traces
from tercet.vllm_plugin.edge.adapters import Adapters
from tercet.vllm_plugin.edge.attached_engine import AttachedEngine
from tercet.vllm_plugin.edge.llm_requests import end_with_failures
from tercet.vllm_plugin.edge.prefilled_requests import PrefilledRequests, PrefillerHeader
from tercet.vllm_plugin.mm_features import bound_uuids
from tercet.vllm_plugin.start.plugin_settings import parse_settings
from tercet.vllm_plugin.start.siblings_config import settings_of
from tercet.wire.callers import BearerKeys
from tercet.wire.client import engine_tls
from tercet.wire.client.remote_prefill import PrefillAttempts, RemotePrefill
from tercet.wire.exported_spans import exporting_spans
from tercet.wire.serving import verb_routes
from tercet.wire.serving.http_server import error_response
from tercet.wire.serving.server_access import ASKS_FOR_A_KEY, api_keys, callers_of
from tercet.wire.serving.verb_routes import VerbRoute, VerbServer, verb_route

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[Any]]


class TercetEndpoints:
    """The endpoint plugin: it implements vLLM's ``EndpointPlugin``."""

    name = "tercet"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)
        app.router.lifespan_context = partial(_stopping_when_empty, app.router.lifespan_context)
        app.add_exception_handler(TercetError, _on_error)
        # This layer is inside vLLM's layers, so the API key has been checked before.
        app.add_middleware(PrefillerHeader, state=app.state)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        if engine_client is None:
            raise EngineError("Tercet's endpoints need an engine, and this server has none")
        # The settings that the engine's other processes have. A missing connector is reported later.
        transfer = engine_client.vllm_config.kv_transfer_config
        settings = parse_settings(settings_of(transfer))
        secret = settings.fleet_secret
        state.tercet_stop_grace = settings.stop_grace
        name = os.environ.get(ENGINE_NAME_VARIABLE) or f"{args.host or 'localhost'}:{args.port}"
        require_engine_name(name, ENGINE_NAME_VARIABLE)
        lora = engine_client.vllm_config.lora_config
        adapters = Adapters(lambda: state.openai_serving_models, 0 if lora is None else lora.max_loras)
        await adapters.watch(engine_client)  # type: ignore[arg-type]
        bound_uuids(engine_client.renderer)
        end_with_failures()
        most = settings.max_request_bytes
        attached = state.tercet = await AttachedEngine.attach(engine_client, name, secret, adapters, most)  # type: ignore[arg-type]
        state.tercet_verbs = VerbServer(
            verbs.EdgeVerbs(attached.edge), attached.router_connections, callers_of(args, secret), ASKS_FOR_A_KEY,
            "this engine (max_request_bytes in kv_connector_extra_config)", most,
        )  # fmt: skip
        state.tercet_prefillers = settings.allowed_prefillers()
        for_all = clients_see_traces() or settings.client_traces
        state.tercet_trace_keys = None if for_all else BearerKeys(secrets_of(secret))
        remote: RemotePrefill | None = None
        if state.tercet_prefillers:

            async def ours() -> Revision:
                return attached.edge.revision

            # Other engines of the fleet are served as this one is: by TLS if this one is, with one secret.
            key = settings.fleet_secret or next(iter(api_keys(args)), "")
            tls = engine_tls(args.ssl_ca_certs, args.ssl_certfile, args.ssl_keyfile) if args.ssl_ca_certs else None
            budget = PrefillBudget(settings.prefill_timeout, settings.prefill_stuck_after)
            remote = RemotePrefill(PrefillAttempts(budget), ours, key, bool(args.ssl_certfile), tls)
        state.tercet_prefilling = remote, PrefilledRequests(engine_client, attached, remote)  # type: ignore[arg-type]


@asynccontextmanager
async def _stopping_when_empty(lifespan: Lifespan, app: FastAPI) -> AsyncGenerator[Any]:
    """Wrap vLLM's ``lifespan`` of the server: while it is active, SIGTERM first empties the engine."""
    async with descriptors_watched(), lifespan(app) as state:
        attached: AttachedEngine = app.state.tercet
        grace: float = app.state.tercet_stop_grace
        # SIGTERM means: tell the routers, and end once no lease, sequence or request is left, or the grace is over.
        stop = StopWhenEmpty(
            attached.announce_stop, lambda: attached.is_empty, partial(signal.raise_signal, signal.SIGINT), grace
        )
        # In place of vLLM's handler. Relies on vLLM handling SIGINT as it handles SIGTERM, and on both handlers being
        # set before its server starts.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.ask)
        try:
            with exporting_spans("tercet-engine", {"service.instance.id": attached.edge.name}):
                yield state
        finally:
            # vLLM may end with exit code 0, which a supervisor would take for a wanted end.
            if attached.core_is_lost and not stop.is_asked:
                fail_at_exit("the engine's core was lost, itself or with one of its workers or agents")
            remote: RemotePrefill | None = app.state.tercet_prefilling[0]
            if remote is not None:
                await remote.close()


async def _on_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, TercetError):
        raise error
    return error_response(error, None)


ROUTES = [*verb_routes.ROUTES]
"""The routes of an engine on vLLM: those of every engine, and those of its LoRA adapters."""


def _adapters(http: Request) -> Adapters:
    return http.app.state.tercet.adapters


@verb_route(ROUTES, "GET", "/adapters")
async def _list_adapters(server: VerbServer, http: Request, call: None) -> Any:
    """List the LoRA adapters of this engine: name, path, and a digest of their contents."""
    return await _adapters(http).reports()


@verb_route(ROUTES, "POST", "/adapters", LoadAdapterCall)
async def _load_adapter(server: VerbServer, http: Request, call: LoadAdapterCall) -> Any:
    """Load a LoRA adapter, if `VLLM_ALLOW_RUNTIME_LORA_UPDATING` allows it."""
    return await _adapters(http).load(call.name, call.path)


@verb_route(ROUTES, "PUT", "/adapters/{name:path}", ReplaceAdapterCall)
async def _replace_adapter(server: VerbServer, http: Request, call: ReplaceAdapterCall) -> Any:
    """Use the name of a LoRA adapter for the files at this path from now on, unless requests use the adapter."""
    return await _adapters(http).replace(http.path_params["name"], call.path)


@verb_route(ROUTES, "DELETE", "/adapters/{name:path}")
async def _unload_adapter(server: VerbServer, http: Request, call: None) -> Any:
    """Accept no more requests for a LoRA adapter; running requests continue."""
    await _adapters(http).unload(http.path_params["name"])
    return {"unloaded": True}


def _described(route: VerbRoute) -> dict[str, Any]:
    """Return what FastAPI does not know of a route: its path's parameters, and the schema of its body."""
    found: dict[str, Any] = {
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)", route.path)
        ]
    }
    if route.call is None:
        return found
    # With its definitions inlined, since FastAPI collects only its own components.
    (schema,), components = msgspec.json.schema_components([route.call], ref_template="{name}")

    def expand(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return expand(components[node["$ref"]])
            return {key: expand(value) for key, value in node.items()}
        return [expand(item) for item in node] if isinstance(node, list) else node

    content = {form: {"schema": expand(schema)} for form in (JSON, MSGPACK)}
    return {**found, "requestBody": {"required": True, "content": content}}


router = APIRouter(prefix=API_PREFIX, tags=["tercet"])
for each in ROUTES:
    router.add_api_route(each.path, each.answer, methods=[each.method], openapi_extra=_described(each))
