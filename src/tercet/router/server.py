"""Puts the front door together from vLLM's own parts.

Relies on ``AsyncLLM.__init__`` getting its client from ``EngineCoreClient.make_async_mp_client``, and on vLLM's
launcher functions ``build_app``, ``init_app_state`` and ``serve_http``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import logging
import os
import signal
import socket
from contextlib import AsyncExitStack
from typing import Any, cast

from fastapi import FastAPI

from tercet.fleet import EngineFleet
from tercet.router import admin, engine_metrics
from tercet.router.connections import connecting
from tercet.router.context import ContextMiddleware
from tercet.router.entrance import Entrance
from tercet.router.gate import Gate
from tercet.router.membership import Membership
from tercet.router.metrics import Metrics
from tercet.router.reload import reload_on_change
from tercet.router.scheduling_file import SchedulingFile
from tercet.router.service import Service
from tercet.router.short_prompts import render_short_prompts_here
from tercet.router.workers.sharing import Shared, Sharing, answering
from tercet.settings import RouterConfig
from tercet.streams import Listener
from tercet.vllm_plugin.frontend_versions import accept_by_load, parsed_serve_args, structured_outputs_config


def serve(config: RouterConfig, shared: Shared | None = None) -> None:
    """Run the front door until SIGINT or SIGTERM; as one of several workers with what they have in common."""
    import uvloop

    logging.basicConfig(level=config.log_level.upper())
    uvloop.run(_serve(config, shared))


async def _serve(config: RouterConfig, shared: Shared | None) -> None:
    signal.signal(signal.SIGTERM, _interrupt)
    fleet = EngineFleet(())
    async with (
        Listener(stream_port(config, shared)) as listener,
        Membership(fleet, connecting(fleet, listener)) as membership,
    ):
        await membership.start(config.engines)
        metrics = Metrics()
        engine_metrics.export(fleet)
        service = Service(
            fleet, config.program, config.program_args, metrics, config.return_after, config.retries,
            config.request_timeout_s,
        )  # fmt: skip
        gate = Gate(config.limits, fleet, metrics)
        scheduling = SchedulingFile(fleet)
        if config.scheduling is not None:
            await scheduling.use(config.scheduling)
        _import_vllm()  # seconds, well spent while engines are still loading
        replaces = shared is not None and shared.replaces
        shortest = await (membership.until_some_ready() if replaces else membership.until_ready())
        background = [asyncio.create_task(membership.watch())]
        if config.dev:
            background.append(asyncio.create_task(reload_on_change(service, scheduling)))
        try:
            await _serve_openai(config, service, membership, scheduling, gate, shortest, shared, metrics)
        finally:
            for task in background:
                task.cancel()


def stream_port(config: RouterConfig, shared: Shared | None) -> int:
    """The port of this process's token streams; 0 is any free one."""
    return config.stream_port + shared.index if shared is not None and config.stream_port else config.stream_port


def _import_vllm() -> None:
    # Prompts are tokenised one by one: handing them to a pool of threads costs more than the pool can save.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for module in ("vllm.entrypoints.launchers.api_server.entry", "vllm.v1.engine.async_llm"):
        importlib.import_module(module)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


async def _serve_openai(
    config: RouterConfig,
    service: Service,
    membership: Membership,
    scheduling: SchedulingFile,
    gate: Gate,
    max_model_len: int,
    shared: Shared | None,
    metrics: Metrics,
) -> None:  # fmt: skip
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    from tercet.router.streaming import StreamStats, short_way

    args = _vllm_args(config, max_model_len)
    sock = _socket(args, shared)
    engine_client = _engine_client(args, service)
    try:
        tasks = await engine_client.get_supported_tasks()
        app = build_app(args, tasks, engine_client.model_config)
        keys = _api_keys(args)
        admin.install(app, admin.State(service, membership, scheduling, keys))
        # Around the whole stack, which vLLM's SageMaker layer has closed to further middleware.
        await init_app_state(engine_client, app.state, args, tasks)
        stack = app.middleware_stack or app.build_middleware_stack()
        stats = StreamStats(engine_client.logger_manager)
        inner = short_way(stack, app.state, args, engine_client, stats, service.program_called)
        app.middleware_stack = Entrance(
            inner if shared is None else Sharing(inner, shared.line), gate, keys, config.max_request_bytes,
            lambda refusals: with_cors(refusals, args),
        )  # fmt: skip
        async with AsyncExitStack() as held:
            if shared is not None:
                await held.enter_async_context(shared.line)
                await shared.line.serve(answering(inner, app))
            metrics.serving()
            _settle()
            await _accept(app, args, sock, shared)
    finally:
        engine_client.shutdown()
        sock.close()


def with_cors(app: Any, args: argparse.Namespace) -> Any:
    """Browsers get the headers that they ask for, by the same options as from vLLM's layers."""
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(
        app, allow_origins=args.allowed_origins, allow_credentials=args.allow_credentials,
        allow_methods=args.allowed_methods, allow_headers=args.allowed_headers,
    )  # fmt: skip


def _settle() -> None:
    """From now on the process serves, and its environment stays as it is."""
    from vllm.envs import enable_envs_cache

    # vLLM looks up dozens of variables for each request.
    enable_envs_cache()
    # Cycles are rare here, and looking for them took 5% of the time that tokens need, in pauses of 10 ms.
    gc.set_threshold(20_000, 20, 20)


async def _accept(app: FastAPI, args: argparse.Namespace, sock: socket.socket, shared: Shared | None) -> None:
    """Serve until told to stop; of several workers the one with the fewest connections takes the next."""
    from vllm.entrypoints.launchers.launcher import serve_http

    from tercet.router.streaming import StreamingProtocol

    shutdown = await serve_http(
        app, sock=sock, http=StreamingProtocol, enable_ssl_refresh=False, host=args.host, port=args.port,
        **({} if shared is None else accept_by_load(cast(Any, shared.loads), shared.index)),
        log_level=args.uvicorn_log_level, access_log=not args.disable_uvicorn_access_log,
    )  # fmt: skip
    await shutdown


def _socket(args: argparse.Namespace, shared: Shared | None) -> socket.socket:
    """The listening socket: one of our own, or the workers' one, with the rest of what vLLM does along with it."""
    from vllm.entrypoints.launchers.launcher import setup_server

    if shared is None:
        return setup_server(args, reuse_port=False)[1]
    elsewhere = argparse.Namespace(**{**vars(args), "port": 0})
    setup_server(elsewhere, reuse_port=False)[1].close()
    return shared.listening


def _api_keys(args: argparse.Namespace) -> list[str]:
    """The keys that vLLM's own check accepts, by the same rule."""
    from vllm import envs

    return [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]


def _vllm_args(config: RouterConfig, max_model_len: int) -> argparse.Namespace:
    argv = [
        "--model", config.model, "--served-model-name", config.public_name, *config.model_aliases,
        "--host", config.host, "--port", str(config.port), "--max-model-len", str(max_model_len),
        "--middleware", f"{ContextMiddleware.__module__}.{ContextMiddleware.__qualname__}",
        "--disable-uvicorn-access-log", *config.vllm_args,
    ]  # fmt: skip
    return parsed_serve_args(argv)


def _engine_client(args: argparse.Namespace, service: Service) -> Any:
    """vLLM's ``AsyncLLM``, whole, over the client that runs programs."""
    from vllm import AsyncEngineArgs, envs
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor import Executor

    from tercet.router.core_client import ProgramClient
    from tercet.vllm_plugin.hooks import require_hooks

    require_hooks("frontend")
    engine_args = AsyncEngineArgs.from_cli_args(args)
    model_config = engine_args.create_model_config()
    # As vLLM's own render server does: no inference happens here, so no weights' format and no KV memory matter.
    model_config.quantization = None
    envs.VLLM_CPU_KVCACHE_SPACE = 0
    config = VllmConfig(
        model_config=model_config,
        logging_config=engine_args.create_logging_config(),
        structured_outputs_config=structured_outputs_config(engine_args),
    )
    client = ProgramClient(service, config)
    original = EngineCoreClient.make_async_mp_client
    EngineCoreClient.make_async_mp_client = staticmethod(lambda *_, **__: client)  # type: ignore[method-assign]
    try:
        engine_client = AsyncLLM(
            config, executor_class=Executor, log_stats=not args.disable_log_stats, log_requests=False
        )  # fmt: skip
    finally:
        EngineCoreClient.make_async_mp_client = original  # type: ignore[method-assign]
    client.attach(engine_client.output_processor)
    render_short_prompts_here(engine_client.renderer)
    return engine_client
