"""Puts the front door together from vLLM's own parts.

Relies on ``AsyncLLM.__init__`` getting its client from ``EngineCoreClient.make_async_mp_client``, and on vLLM's
launcher functions ``build_app``, ``init_app_state`` and ``serve_http``.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from fastapi import FastAPI

from tercet.aio import TaskSet
from tercet.fleet import EngineFleet
from tercet.fleet.membership import Membership, connecting
from tercet.router import admin
from tercet.router.context import ContextMiddleware
from tercet.router.entrance import Entrance
from tercet.router.fleet_state import FleetState
from tercet.router.gate import Gate
from tercet.router.metrics import Metrics, export, with_metrics_of_all_workers
from tercet.router.reload import reload_on_change
from tercet.router.scheduling_file import SchedulingFile
from tercet.router.service import Service
from tercet.router.shared_state import SharedState
from tercet.router.short_prompts import render_short_prompts_here
from tercet.router.workers.worker import Shared
from tercet.settings import RouterConfig
from tercet.streams import StreamListener
from tercet.vllm_plugin.frontend_versions import accept_by_load, parsed_serve_args, structured_outputs_config


def serve(config: RouterConfig, shared: Shared | None = None) -> None:
    """Run the front door until SIGINT or SIGTERM; as one of several workers with what they have in common."""
    import uvloop

    logging.basicConfig(level=config.log_level.upper())
    uvloop.run(_serve(config, shared))


async def _serve(config: RouterConfig, shared: Shared | None) -> None:
    signal.signal(signal.SIGTERM, _interrupt)
    fleet, metrics, background = EngineFleet(()), Metrics(), TaskSet()
    export(fleet)
    async with (
        StreamListener(stream_port(config, shared)) as listener,
        Membership(fleet, connecting(fleet, listener)) as membership,
    ):
        service = Service(
            fleet, config.program, config.program_args, metrics, config.return_after, config.retries,
            config.request_timeout_s,
        )  # fmt: skip
        scheduling = SchedulingFile(fleet)
        with state_path(config) as path:
            state = SharedState(path, fleet, membership, service, scheduling, metrics)
            try:
                if shared is not None:
                    background.spawn(shared.until_supervisor_ends(), "supervisor")
                await state.start(FleetState.of(config))
                _import_vllm()  # seconds, well spent while engines are still loading
                promise = membership.promise = await state.until_ready()
                background.spawn(membership.watch(), "membership")
                background.spawn(state.follow(), "state")
                if config.dev:
                    background.spawn(reload_on_change(state, service, scheduling), "reload")
                gate = Gate(config.limits, fleet, metrics)
                await _serve_openai(config, service, scheduling, state, gate, promise.max_model_len, shared, metrics)
            finally:
                await background.close()
                state.close()


@contextmanager
def state_path(config: RouterConfig) -> Generator[Path]:
    """Where the fleet's state is: in the operator's file, or in one that ends with this process."""
    if config.state is not None:
        yield Path(config.state).expanduser().absolute()
        return
    with TemporaryDirectory(prefix="tercet-state-") as directory:
        yield Path(directory) / "state.json"


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
    scheduling: SchedulingFile,
    state: SharedState,
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
        admin.install(app, admin.State(service, state, scheduling, keys))
        # Around the whole stack, which vLLM's SageMaker layer has closed to further middleware.
        await init_app_state(engine_client, app.state, args, tasks)
        stack = app.middleware_stack or app.build_middleware_stack()
        stats = StreamStats(engine_client.logger_manager)
        inner = short_way(stack, app.state, args, engine_client, stats, service.program_called)
        app.middleware_stack = Entrance(
            inner if shared is None else with_metrics_of_all_workers(inner), gate, keys, config.max_request_bytes,
            lambda refusals: with_cors(refusals, args),
        )  # fmt: skip
        await state.serving()
        metrics.serving()
        if shared is not None:
            shared.serving()
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
