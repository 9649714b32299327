"""vLLM's OpenAI server, assembled from vLLM's parts on the client that runs programs.

Relies on ``AsyncLLM.__init__`` getting its client from ``EngineCoreClient.make_async_mp_client``, on ``build_app`` not
wrapping the application in its layers yet, and on the launcher functions ``init_app_state`` and ``serve_http``;
``serve_http`` sets its signal handlers before its first wait, and puts its server into ``app.state.server``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tercet.protocol import BadRequest
from tercet.protocol.addresses import TextFingerprint
from tercet.router.openai.converted_streams import keeping_errors
from tercet.router.openai.fast_path.entry import FastPath, fast_path
from tercet.router.openai.program_client import ProgramClient, RouterLLM
from tercet.router.openai.server_options import keep_alive_seconds, require_served
from tercet.router.serve.service import Service
from tercet.settings.process_settings import PARALLEL_TOKENIZERS
from tercet.vllm_plugin.differences import SYSTEM_BALANCES, cli_args, structured_outputs_config
from tercet.vllm_plugin.hooks import require_hooks
from tercet.vllm_plugin.start.before_forks import text_fingerprint
from tercet.vllm_plugin.start.process_output import refuse_in_a_sentence, without_leak_reports
from tercet.wire.serving.client_connection import StreamingProtocol

# Time in seconds for remaining connections when the server closes: idle clients, and answers past their timeout.
CLOSE_SECONDS = 1
STARTED_POLL_S = 0.01
# Largest number of connections that wait to be accepted; uvicorn's value.
BACKLOG = 2048
# This is not a host name, so vLLM's check refuses all hosts; its message shows this text.
NO_DOMAIN = "(none; see --allowed-media-domains)"


@dataclass(frozen=True)
class OpenAIServer:
    """vLLM's application. ``layers`` answer requests; streams may take the path ``fast`` instead, if not None.

    The router's outer layers replace ``app.middleware_stack``.
    """

    app: FastAPI
    layers: ASGIApp
    fast: FastPath | None


async def openai_server(args: argparse.Namespace, engine_client: Any) -> OpenAIServer:
    """Return the server of ``engine_client`` under vLLM's options ``args``, without a fast path."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    from tercet.router.openai.body_models import bound_invocations, bound_routes

    tasks = await engine_client.get_supported_tasks()
    bound_invocations(tasks, engine_client.model_config)
    app = build_app(args, tasks, engine_client.model_config)
    bound_routes(app)
    describe_in_a_thread(app)
    await init_app_state(engine_client, app.state, args, tasks)
    messages = getattr(app.state, "anthropic_serving_messages", None)
    if messages is not None:
        app.state.anthropic_serving_messages = keeping_errors(messages)
    # vLLM's SageMaker layer may have built the stack of layers before.
    layers = app.middleware_stack or app.build_middleware_stack()
    return OpenAIServer(app, layers, None)


def describe_in_a_thread(app: FastAPI) -> None:
    """Make the first client that asks for ``/openapi.json`` wait alone: describing all routes takes about a second."""
    at = next((n for n, each in enumerate(app.routes) if getattr(each, "path", None) == app.openapi_url), None)
    if at is None:  # vLLM's --disable-fastapi-docs
        return
    route, describing = cast(Route, app.routes[at]), asyncio.Lock()

    async def described(request: Request) -> Response:
        async with describing:
            if app.openapi_schema is None:
                await asyncio.to_thread(app.openapi)
        return await route.endpoint(request)

    app.routes[at] = Route(route.path, described, include_in_schema=False)


def with_fast_path(server: OpenAIServer, args: argparse.Namespace, engine_client: Any) -> OpenAIServer:
    """Return ``server`` with the fast path for streams, if vLLM's options allow it.

    Raises :class:`~tercet.vllm_plugin.hooks.UnsupportedVLLM` if the fast path does not support the installed vLLM.
    """
    require_hooks("fast path")
    engine_client.renderer.render_short_prompts_here(trusts_templates=args.trust_request_chat_template)
    return replace(server, fast=fast_path(server.layers, server.app.state, args, engine_client))


def text_of(engine_client: Any, args: argparse.Namespace) -> TextFingerprint:
    """Return the fingerprint of this server's text; a chat template from ``args`` is left out of it."""
    config = engine_client.model_config
    if config.skip_tokenizer_init:
        return TextFingerprint()
    found = text_fingerprint(engine_client.get_tokenizer())
    return found if args.chat_template is None else TextFingerprint(found.tokenizer)


def loads_adapters() -> bool:
    """True if vLLM's environment variable allows clients to load adapters while the server runs."""
    from vllm import envs

    return bool(envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING)


def import_vllm() -> None:
    """Import the parts of vLLM that the server needs, which takes seconds.

    Raises :class:`~tercet.vllm_plugin.hooks.UnsupportedVLLM` before any part is used.
    """
    without_leak_reports()
    require_hooks("frontend")
    refuse_in_a_sentence()
    # Prompts are tokenised one by one: a pool of threads costs more time than it saves.
    os.environ.setdefault(PARALLEL_TOKENIZERS, "false")
    # A redirect from an image's host could lead to a host that is not in the list of allowed hosts.
    os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
    for module in ("vllm.entrypoints.launchers.api_server.entry", "vllm.v1.engine.async_llm"):
        importlib.import_module(module)


def server_args(
    model: str, names: Sequence[str], host: str, port: int, max_model_len: int, more: Sequence[str]
) -> argparse.Namespace:
    """Return vLLM's options, parsed and checked by vLLM; ``more`` are the user's flags."""
    argv = [
        "--model", model, "--served-model-name", *names, "--host", host, "--port", str(port),
        "--max-model-len", str(max_model_len), "--disable-uvicorn-access-log", "--uvicorn-log-level", "warning", *more,
    ]  # fmt: skip
    args = _parsed(argv)
    cli_args().validate_parsed_serve_args(args)
    return args


def require_flags(given: Sequence[str], workers: int = 1) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for flags that vLLM does not accept, or that have no effect here."""
    require_served(_parser(), given, workers)


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    return _parser().parse_args(list(argv))


def _parser() -> argparse.ArgumentParser:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = cli_args().make_arg_parser(FlexibleArgumentParser())
    return parser


def engine_client_over(service: Service, args: argparse.Namespace) -> Any:
    """Return vLLM's complete ``AsyncLLM``, on the client that runs the programs of ``service``."""
    import torch
    from vllm import AsyncEngineArgs
    from vllm.config import VllmConfig
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor import Executor

    from tercet.router.openai.router_renderer import own_renderers

    engine_args = AsyncEngineArgs.from_cli_args(args)
    # vLLM fetches images by ``http(s)`` from any host, unless the operator has named some.
    engine_args.allowed_media_domains = engine_args.allowed_media_domains or [NO_DOMAIN]
    model_config = engine_args.create_model_config()
    # A router runs no inference, so the weights' format does not matter (as in vLLM's render server).
    model_config.quantization = None
    # Processors of images cast their tensors to this type, which is used for nothing else. Here they stay exact: they
    # are cast to the engines' type once that is known.
    model_config.dtype = torch.float32
    config = VllmConfig(
        model_config=model_config,
        logging_config=engine_args.create_logging_config(),
        structured_outputs_config=structured_outputs_config(engine_args),
    )
    client = ProgramClient(service)
    original = EngineCoreClient.make_async_mp_client
    EngineCoreClient.make_async_mp_client = staticmethod(lambda *_, **__: client)  # type: ignore[method-assign]
    try:
        with own_renderers():
            engine_client = RouterLLM(
                config, executor_class=Executor, log_stats=not args.disable_log_stats, log_requests=False
            )
    finally:
        EngineCoreClient.make_async_mp_client = original  # type: ignore[method-assign]
    client.attach(engine_client.output_processor)
    return engine_client


def listening_socket(args: argparse.Namespace, shared: socket.socket | None = None) -> socket.socket:
    """Return the socket to serve on, a new one or the ``shared`` one, with vLLM's settings."""
    from vllm.entrypoints.launchers.launcher import setup_server

    if shared is None:
        try:
            sock = setup_server(args, reuse_port=False)[1]
        except OSError as error:
            raise _taken(f"{args.host}:{args.port}", error) from error
        listen_alone(sock)
        return sock
    elsewhere = argparse.Namespace(**{**vars(args), "port": 0})
    setup_server(elsewhere, reuse_port=False)[1].close()
    listen_alone(shared)
    return shared


def listen_alone(sock: socket.socket) -> None:
    """Listen on ``sock`` now: two processes can bind one address before either listens, and then only one can listen.

    Raises :class:`~tercet.protocol.BadRequest` in the other process.
    """
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        where = ":".join(map(str, sock.getsockname()[:2]))
        sock.close()
        raise _taken(where, error) from error


def _taken(where: str, error: OSError) -> BadRequest:
    return BadRequest(f"port: cannot listen at {where}: {error.strerror}; choose another port", "port")


async def accept(
    app: FastAPI,
    args: argparse.Namespace,
    sock: socket.socket,
    shut_down: Callable[[], Awaitable[None]],
    peer_loads: tuple[memoryview[int], int] | None = None,
    on_ready: Callable[[], object] = lambda: None,
) -> None:
    """Serve until ``shut_down`` returns or the server ends; ``shut_down`` is called once the socket is served.

    ``shut_down`` handles signals. ``on_ready`` is called once, when connections are accepted.

    The worker with the fewest connections takes the next one.

    ``peer_loads`` has the number of connections of each worker, and this worker's index. With a vLLM that has
    :data:`~tercet.vllm_plugin.differences.SYSTEM_BALANCES`, it is not used.
    """
    from vllm.entrypoints.launchers.launcher import serve_http

    _settle()
    by_load: dict[str, Any] = {}
    if peer_loads is not None and not SYSTEM_BALANCES.is_here:
        by_load["peer_loads"] = peer_loads
    serving = asyncio.ensure_future(serve_http(
        app, sock=sock, http=StreamingProtocol, host=args.host, port=args.port,
        timeout_graceful_shutdown=CLOSE_SECONDS, timeout_keep_alive=keep_alive_seconds(),
        enable_ssl_refresh=args.enable_ssl_refresh, ssl_keyfile=args.ssl_keyfile, ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs, ssl_cert_reqs=args.ssl_cert_reqs, ssl_ciphers=args.ssl_ciphers,
        **by_load, log_level=args.uvicorn_log_level, access_log=not args.disable_uvicorn_access_log,
    ))  # fmt: skip
    await asyncio.sleep(0)  # until its first wait: vLLM's signal handlers are set then, and can be replaced
    ending = asyncio.ensure_future(shut_down())
    announcing = asyncio.ensure_future(_announce(app, on_ready))
    try:
        await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            ending.result()
            app.state.server.should_exit = True
        await (await serving)
    finally:
        announcing.cancel()
        ending.cancel()
        serving.cancel()


async def _announce(app: FastAPI, on_ready: Callable[[], object]) -> None:
    while not app.state.server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(STARTED_POLL_S)
    on_ready()


def _settle() -> None:
    """Prepare the process for serving: keep vLLM's environment variables as they are now, and collect cycles rarely."""
    from vllm.envs import enable_envs_cache

    # vLLM looks up dozens of variables for each request.
    enable_envs_cache()
    # Cycles are rare here, and the search for them took 5% of the time for tokens, in pauses of 10 ms.
    gc.set_threshold(20_000, 20, 20)
