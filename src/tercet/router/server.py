"""Puts the front door together from vLLM's own parts.

Relies on ``AsyncLLM.__init__`` getting its client from ``EngineCoreClient.make_async_mp_client``, and on vLLM's
launcher functions ``build_app``, ``init_app_state`` and ``serve_http``.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import signal
from contextlib import AsyncExitStack, suppress
from typing import Any, cast

from tercet.client import HttpEngine
from tercet.fleet import Fleet, Member
from tercet.protocol import EngineStatus, EngineUnreachable, TercetError
from tercet.router import admin
from tercet.router.config import RouterConfig
from tercet.router.context import ContextMiddleware
from tercet.router.metrics import Metrics
from tercet.router.service import Service

logger = logging.getLogger("tercet.router")
ENGINES_READY_SECONDS = 600.0
ASK_AGAIN_SECONDS = 0.5


def serve(config: RouterConfig) -> None:
    """Run the front door until SIGINT or SIGTERM."""
    import uvloop

    logging.basicConfig(level=config.log_level.upper())
    uvloop.run(_serve(config))


async def _serve(config: RouterConfig) -> None:
    signal.signal(signal.SIGTERM, _interrupt)
    async with AsyncExitStack() as stack:
        members = [await _member(stack, address) for address in config.engines]
        service = Service(Fleet(members), config.program, config.program_args, Metrics())
        _import_vllm()  # seconds, well spent while engines are still loading
        statuses = await asyncio.gather(*(_when_ready(member) for member in members))
        shortest = min(status.max_model_len for status in statuses)
        watch = asyncio.create_task(_watch(members))
        try:
            await _serve_openai(config, service, shortest)
        finally:
            watch.cancel()


def _import_vllm() -> None:
    for module in ("vllm.entrypoints.launchers.api_server.entry", "vllm.v1.engine.async_llm"):
        importlib.import_module(module)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


async def _member(stack: AsyncExitStack, address: Any) -> Member:
    engine = await stack.enter_async_context(HttpEngine(address.name, address.url))
    return Member(address.name, address.url, address.role, engine)


async def _when_ready(member: Member) -> EngineStatus:
    """The engine's first status; waits for engines that are still loading."""
    deadline = asyncio.get_running_loop().time() + ENGINES_READY_SECONDS
    while True:
        try:
            return await member.engine.status()
        except EngineUnreachable:
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(ASK_AGAIN_SECONDS)


async def _watch(members: list[Member]) -> None:
    """Ask engines that did not answer whether they do again."""
    while True:
        await asyncio.sleep(ASK_AGAIN_SECONDS)
        for member in members:
            if not member.reachable:
                with suppress(TercetError):
                    await member.engine.status()
                    member.reachable = True


async def _serve_openai(config: RouterConfig, service: Service, max_model_len: int) -> None:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.launcher import serve_http, setup_server

    args = _vllm_args(config, max_model_len)
    _, sock = setup_server(args, reuse_port=False)
    engine_client = _engine_client(args, service)
    try:
        tasks = await engine_client.get_supported_tasks()
        app = build_app(args, tasks, engine_client.model_config)
        app.include_router(admin.router)
        app.state.tercet = service
        await init_app_state(engine_client, app.state, args, tasks)
        shutdown = await serve_http(
            app, sock=sock, enable_ssl_refresh=False, host=args.host, port=args.port,
            log_level=args.uvicorn_log_level, access_log=not args.disable_uvicorn_access_log,
        )  # fmt: skip
        await shutdown
    finally:
        engine_client.shutdown()
        sock.close()


def _vllm_args(config: RouterConfig, max_model_len: int) -> argparse.Namespace:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    argv = [
        "--model", config.model, "--served-model-name", config.served_model_name,
        "--host", config.host, "--port", str(config.port), "--max-model-len", str(max_model_len),
        "--middleware", f"{ContextMiddleware.__module__}.{ContextMiddleware.__qualname__}",
        "--disable-uvicorn-access-log", *config.vllm_args,
    ]  # fmt: skip
    args = cast(argparse.Namespace, make_arg_parser(FlexibleArgumentParser()).parse_args(argv))
    validate_parsed_serve_args(args)
    return args


def _engine_client(args: argparse.Namespace, service: Service) -> Any:
    """vLLM's ``AsyncLLM``, whole, over the client that runs programs."""
    from vllm import AsyncEngineArgs, envs
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor import Executor

    from tercet.router.core_client import ProgramClient

    engine_args = AsyncEngineArgs.from_cli_args(args)
    model_config = engine_args.create_model_config()
    # As vLLM's own render server does: no inference happens here, so no weights' format and no KV memory matter.
    model_config.quantization = None
    envs.VLLM_CPU_KVCACHE_SPACE = 0
    config = VllmConfig(
        model_config=model_config,
        logging_config=engine_args.create_logging_config(),
        structured_outputs_config=engine_args.create_structured_outputs_config(),
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
    client.report_errors_to(engine_client.output_processor)
    return engine_client
