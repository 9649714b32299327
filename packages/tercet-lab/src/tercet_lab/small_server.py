"""The server of the small OpenAI API: as :mod:`.server`, but with uvicorn instead of vLLM's layer."""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NoReturn

import uvicorn

from tercet.aio import keep_running
from tercet.protocol import BadRequest
from tercet.protocol.access import given_key
from tercet.router import admin
from tercet.router.admin.admin_server import CLOSE_SECONDS, QuietServer, admin_served
from tercet.router.pooling import PoolingServers
from tercet.router.router_app import put_layers_before
from tercet.router.serve.routing import NamedFiles
from tercet.router.serve.service_programs import ServicePrograms
from tercet.router.serve.shutdown import Shutdown
from tercet.router.state.shared_state import SharedState
from tercet.router.workers import Shared, listening_socket, tell_ready
from tercet.settings import RouterConfig
from tercet.wire.serving.client_connection import BoundedProtocol
from tercet.wire.serving.server_access import RouterKeys, api_keys
from tercet_lab.small_openai import prompt_texts, small_app


class _Flags(argparse.ArgumentParser):
    """A parser for the only flag of vLLM's that the small layer accepts, ``--api-key``."""

    def error(self, message: str) -> NoReturn:
        raise BadRequest(
            f"router-args: {message}; the small OpenAI layer accepts only --api-key; for others use "
            "--openai-layer vllm",
            "router-args",
        )


def flags_of(given: Sequence[str]) -> argparse.Namespace:
    """Return the parsed flags after ``--``; raise :class:`~tercet.protocol.BadRequest` for those of vLLM's layer."""
    parser = _Flags(add_help=False, allow_abbrev=False)
    parser.add_argument("--api-key", nargs="+", type=lambda text: given_key(text, "--api-key"))
    return parser.parse_args(list(given))


async def serve_small(
    config: RouterConfig, state: SharedState, max_model_len: int, shutdown: Shutdown, pooling: PoolingServers,
    files: NamedFiles, heed_signals: Callable[[], object], shared: Shared | None = None,
) -> None:  # fmt: skip
    """Serve until a shutdown; ``heed_signals`` is called to make signals begin it.

    With ``shared``, serve as one of several workers: one of them accepts each connection, and the first one serves the
    admin address. ``files`` are the files that admin routes may name.
    """
    service = state.service
    keys = RouterKeys(config, api_keys(flags_of(config.vllm_args)))
    keys.require_private(config.host, config)
    keys.require_private_admin(config.admin_address)
    names = [config.public_name, *config.model_aliases]
    app = small_app(ServicePrograms(service), prompt_texts(config.model), names, max_model_len)
    admin.install(app, state, names, files=files)
    gate = put_layers_before(app, app.build_middleware_stack(), config, state, keys, shutdown, pooling)
    server = QuietServer(
        uvicorn.Config(app, http=BoundedProtocol, log_level="warning", access_log=False, lifespan="off",
                       timeout_graceful_shutdown=CLOSE_SECONDS)
    )  # fmt: skip
    run = partial(shutdown.run, gate.close, service.give_up)
    ready = partial(tell_ready, config) if shared is None else shared.serving
    own = config.admin_address if shared is None or not shared.index else None
    with listening_socket(config) if shared is None else nullcontext(shared.listening) as sock:
        async with admin_served(app, own):
            await state.serving()
            await _accept(server, sock, ready, keys, _shut_down(heed_signals, run))


async def _accept(
    server: QuietServer,
    sock: socket.socket,
    ready: Callable[[], object],
    keys: RouterKeys,
    shut_down: Coroutine[Any, Any, None],
) -> None:
    """Serve until ``shut_down`` returns."""
    serving = asyncio.ensure_future(server.serve([sock]))
    following = asyncio.ensure_future(keep_running(keys.follow, "keys"))
    ending = asyncio.ensure_future(shut_down)
    try:
        if await server.started_by(serving):
            ready()
        await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        if ending.done():
            ending.result()
        await serving
    finally:
        following.cancel()
        ending.cancel()
        serving.cancel()


async def _shut_down(heed_signals: Callable[[], object], run: Callable[[], Awaitable[None]]) -> None:
    heed_signals()
    await run()
