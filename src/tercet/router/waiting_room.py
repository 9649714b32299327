"""The answers of a router before an engine has answered: an error to clients, and the routes by which engines join."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Response

from tercet.fleet.admission import Gate
from tercet.protocol import EngineUnreachable
from tercet.router import admin
from tercet.router.admin.admin_route import json_answer
from tercet.router.admin.admin_server import CLOSE_SECONDS, QuietServer
from tercet.router.listening import listening_socket
from tercet.router.router_app import RouterApp
from tercet.router.serve.named_files import NamedFiles
from tercet.router.state.shared_state import SharedState
from tercet.settings import RouterConfig
from tercet.wire.serving.client_connection import BoundedProtocol
from tercet.wire.serving.server_access import RouterKeys, api_keys

logger = logging.getLogger("tercet.router")
# Flags with which vLLM's layer does not listen at a plain port.
OTHER_LISTENING = ("--ssl", "--uds", "--root-path")
REASON = "this router has no engine yet that answers; it serves once one does"


def can_wait(config: RouterConfig) -> bool:
    """True if the port is a plain port of this process, which can answer until there is an engine."""
    plain = not any(flag.startswith(OTHER_LISTENING) for flag in config.vllm_args)
    return config.workers == 1 and config.admin_listen is None and plain


@asynccontextmanager
async def waiting_room(config: RouterConfig, state: SharedState, files: NamedFiles) -> AsyncGenerator[None]:
    """Answer clients at the router's port with 503 and :data:`REASON`, and serve admin routes, while entered.

    The port is free at the exit, so that the OpenAI API can listen there.
    """
    keys = RouterKeys(config, api_keys(_keys_of(config.vllm_args)))
    keys.require_private(config.host, config)
    server = QuietServer(
        uvicorn.Config(_app(config, state, keys, files), http=BoundedProtocol, log_level="warning", access_log=False,
                       lifespan="off", timeout_graceful_shutdown=CLOSE_SECONDS)
    )  # fmt: skip
    with listening_socket(config) as sock:
        serving = asyncio.ensure_future(server.serve([sock]))
        try:
            if not await server.started_by(serving):
                serving.result()
            logger.warning("%s; until then port %d answers with this error", REASON, config.port)
            yield
        finally:
            server.should_exit = True
            await serving


def _app(config: RouterConfig, state: SharedState, keys: RouterKeys, files: NamedFiles) -> FastAPI:
    app = FastAPI(openapi_url=None)
    admin.install(app, state, [config.public_name, *config.model_aliases], files=files)

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
    async def not_yet(path: str) -> Response:
        error = EngineUnreachable(REASON)
        return json_answer(error.to_wire(), error.status)

    service = state.service
    gate = Gate(config.limits, service.fleet, service.metrics)
    app.middleware_stack = RouterApp(
        app.build_middleware_stack(), None, gate, keys.clients, service.program_called, config.max_request_bytes,
        access_log=config.access_log, admins=keys.access,
    )  # fmt: skip
    return app


def _keys_of(given: Sequence[str]) -> argparse.Namespace:
    """Return the client keys among vLLM's flags; the layer that serves later checks the other flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--api-key", nargs="+")
    return parser.parse_known_args(list(given))[0]
