"""The endpoint plugin: the verbs over HTTP, on vLLM's own API server (load it with ``VLLM_PLUGINS=tercet``)."""

from __future__ import annotations

import asyncio
import os
import signal
from argparse import Namespace
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.datastructures import State
from starlette.responses import StreamingResponse

from tercet.aio.files import descriptors_watched
from tercet.engine import verbs
from tercet.engine.edge import Edge, StopWhenEmpty, fail_at_exit
from tercet.logs import lines_of_call, logged_call
from tercet.protocol import DeadlineExceeded, EngineError, Output, Revision, TercetError, UnknownSequence
from tercet.protocol.access import secrets_of
from tercet.protocol.names import require_engine_name
from tercet.protocol.types import FinishReason
from tercet.protocol.wire import (
    API_PREFIX,
    JSON,
    MSGPACK,
    AbortCall,
    ConnectCall,
    LoadAdapterCall,
    MoveCall,
    PrepRecvCall,
    ReleaseAnswer,
    ReleaseCall,
    RemoteSendCall,
    ReplaceAdapterCall,
    StartGenerateCall,
)
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
from tercet.wire.serving.http_server import admit, call_in, error_response, json_response, unless_disconnected
from tercet.wire.serving.server_access import ASKS_FOR_A_KEY, api_keys, callers_of

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

T = TypeVar("T")
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[Any]]
# Seconds for which a caller may leave an event unread, with all buffers full; then its sequence is ended.
UNREAD_SECONDS = 60.0


async def _admit(request: Request) -> None:
    admit(request, request.app.state.tercet_callers, _edge(request).incarnation, ASKS_FOR_A_KEY)


router = APIRouter(prefix=API_PREFIX, tags=["tercet"], dependencies=[Depends(_admit)])


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
        state.tercet_max_request_bytes = settings.max_request_bytes
        state.tercet_callers = callers_of(args, secret)
        name = os.environ.get(ENGINE_NAME_VARIABLE) or f"{args.host or 'localhost'}:{args.port}"
        require_engine_name(name, ENGINE_NAME_VARIABLE)
        lora = engine_client.vllm_config.lora_config
        adapters = Adapters(lambda: state.openai_serving_models, 0 if lora is None else lora.max_loras)
        await adapters.watch(engine_client)  # type: ignore[arg-type]
        bound_uuids(engine_client.renderer)
        end_with_failures()
        most = settings.max_request_bytes
        attached = state.tercet = await AttachedEngine.attach(engine_client, name, secret, adapters, most)  # type: ignore[arg-type]
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
    return error_response(error, getattr(request.app.state, "tercet_callers", None))


def _attached(request: Request) -> AttachedEngine:
    return request.app.state.tercet


def _edge(request: Request) -> Edge:
    return _attached(request).edge


async def _call(request: Request, kind: type[T]) -> T:
    most: int = request.app.state.tercet_max_request_bytes
    return await call_in(request, kind, most, "this engine (max_request_bytes in kv_connector_extra_config)")


def _body(kind: type) -> dict[str, Any]:
    # With its definitions inlined, since FastAPI collects only its own components.
    (schema,), components = msgspec.json.schema_components([kind], ref_template="{name}")

    def expand(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return expand(components[node["$ref"]])
            return {key: expand(value) for key, value in node.items()}
        return [expand(item) for item in node] if isinstance(node, list) else node

    content = {"schema": expand(schema)}
    return {"requestBody": {"required": True, "content": dict.fromkeys((JSON, MSGPACK), content)}}


@router.post("/prep_recv", openapi_extra=_body(PrepRecvCall))
async def prep_recv(request: Request) -> Response:
    """Match `prompt[:end]` in the prefix cache and reserve blocks for the rest, under a lease."""
    call = await _call(request, PrepRecvCall)
    with logged_call("prep_recv", call, request.headers, _edge(request).model_of(call)):
        return json_response(await verbs.prep_recv(_edge(request), call))


@router.post("/remote_send", openapi_extra=_body(RemoteSendCall))
async def remote_send(request: Request) -> Response:
    """Get the KV of `prompt[begin:end)` and push it into a reservation; optionally sample the first token."""
    call = await _call(request, RemoteSendCall)
    with logged_call("remote_send", call, request.headers, _edge(request).model_of(call)):
        return json_response(await unless_disconnected(request, verbs.remote_send(_edge(request), call)))


@router.post("/start_generate", openapi_extra=_body(StartGenerateCall))
async def start_generate(request: Request) -> Response:
    """Prefill `prompt[begin:]` and decode; server-sent events, one answer (`stream: false`), or a `router`'s stream."""
    call = await _call(request, StartGenerateCall)
    with lines_of_call(request.headers):
        if call.router is not None:
            link = await _attached(request).router_connections.connect(call.router.address, call.router.key)
            await verbs.stream(_edge(request), call, link, call.router.number)
            return json_response({"accepted": True})
        outputs = verbs.start_generate(_edge(request), call)
        if not call.stream:
            return json_response(await unless_disconnected(request, _collect(outputs)))
        # Await the first output before sending the status line, so that invalid input is still a 4xx.
        first = await unless_disconnected(request, anext(outputs))
    return StreamingResponse(_events(first, outputs), media_type="text/event-stream")


@router.post("/connect", openapi_extra=_body(ConnectCall))
async def connect(request: Request) -> Response:
    """Connect to a router. The engine then sends token streams and load reports to that router."""
    router = (await _call(request, ConnectCall)).router
    await _attached(request).router_connections.connect(router.address, router.key)
    return json_response({"connected": True})


@router.post("/abort", openapi_extra=_body(AbortCall))
async def abort(request: Request) -> Response:
    """End all work of this engine for a sequence; unknown ids are ignored."""
    call = await _call(request, AbortCall)
    return json_response({"aborted": await _edge(request).abort(call.seq_id)})


@router.post("/release", openapi_extra=_body(ReleaseCall))
async def release(request: Request) -> Response:
    """End a lease; KV that arrived under it stays in the prefix cache."""
    call = await _call(request, ReleaseCall)
    return json_response(ReleaseAnswer(valid_end=await _edge(request).leases.release(call.lease)))


@router.get("/status")
async def status(request: Request) -> Response:
    """Report this engine's load, and its leases and sends."""
    return json_response(await _edge(request).status())


@router.get("/sequences")
async def sequences(request: Request) -> Response:
    """List the sequences that this engine generates now: id, tokens, blocks, whether it runs, age, and router."""
    return json_response(await _edge(request).generated.reports())


@router.get("/leases/{seq_id:path}")
async def leases(request: Request, seq_id: str) -> Response:
    """Tell the lives of a sequence's latest leases: seconds, ledger, state and cause of each step."""
    return json_response([each.report() for each in _edge(request).leases.stories(seq_id)])


@router.post("/sequences/{seq_id:path}/move", openapi_extra=_body(MoveCall))
async def propose_move(request: Request, seq_id: str) -> Response:
    """Pass a proposal to move a sequence on to the router that runs the sequence."""
    call = await _call(request, MoveCall)
    _edge(request).generated.propose_move(seq_id, call)
    return json_response({"accepted": True}, 202)


@router.get("/adapters")
async def adapters(request: Request) -> Response:
    """List the LoRA adapters of this engine: name, path, and a digest of their contents."""
    return json_response(await _attached(request).adapters.reports())


@router.post("/adapters", openapi_extra=_body(LoadAdapterCall))
async def load_adapter(request: Request) -> Response:
    """Load a LoRA adapter, if `VLLM_ALLOW_RUNTIME_LORA_UPDATING` allows it."""
    call = await _call(request, LoadAdapterCall)
    return json_response(await _attached(request).adapters.load(call.name, call.path))


@router.put("/adapters/{name:path}", openapi_extra=_body(ReplaceAdapterCall))
async def replace_adapter(request: Request, name: str) -> Response:
    """Use the name of a LoRA adapter for the files at this path from now on, unless requests use the adapter."""
    call = await _call(request, ReplaceAdapterCall)
    return json_response(await _attached(request).adapters.replace(name, call.path))


@router.delete("/adapters/{name:path}")
async def unload_adapter(request: Request, name: str) -> Response:
    """Accept no more requests for a LoRA adapter; running requests continue."""
    await _attached(request).adapters.unload(name)
    return json_response({"unloaded": True})


async def _events(first: Output, rest: AsyncGenerator[Output, None]) -> AsyncGenerator[bytes, None]:
    """Yield outputs as server-sent events. If the caller reads nothing for :data:`UNREAD_SECONDS`, end its sequence."""
    encoder = msgspec.json.Encoder()
    loop, closing = asyncio.get_running_loop(), list[asyncio.Future[None]]()

    def give_up() -> None:  # while the caller has the event, ``rest`` does not run
        closing.append(asyncio.ensure_future(rest.aclose()))

    output: Output | None = first
    try:
        while output is not None:
            unread = loop.call_later(UNREAD_SECONDS, give_up)
            try:
                yield b"data: " + encoder.encode(output) + b"\n\n"
            finally:
                unread.cancel()
            if closing:
                await closing[0]
                raise DeadlineExceeded(f"the caller read nothing for {UNREAD_SECONDS:.0f} s")
            output = await anext(rest, None)
    except TercetError as error:
        yield b"data: " + encoder.encode(error.to_wire()) + b"\n\n"
    finally:
        await rest.aclose()


async def _collect(outputs: AsyncGenerator[Output, None]) -> Output:
    collected = [output async for output in outputs]
    if not collected:
        raise UnknownSequence("the sequence was aborted before its first token", "seq_id")
    finish_reason: FinishReason | None = collected[-1].finish_reason
    has_logprobs = any(output.logprobs is not None for output in collected)
    return Output(
        token_ids=tuple(token for output in collected for token in output.token_ids),
        finish_reason=finish_reason,
        stop_reason=collected[-1].stop_reason,
        logprobs=tuple(at for output in collected for at in output.logprobs or ()) if has_logprobs else None,
        prompt_logprobs=collected[0].prompt_logprobs,
        usage=collected[0].usage,
    )
