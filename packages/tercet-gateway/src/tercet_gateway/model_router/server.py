"""The assembly of ``tercet model-router``: its port, its polls, and the route by which its routers are changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tercet.aio import TaskSet, signals_to
from tercet.aio.descriptors import descriptors_watched
from tercet.protocol import BadRequest, ShuttingDown, TercetError
from tercet.protocol.errors import error_body
from tercet.protocol.wire import API_PREFIX, decode_call
from tercet.settings.log_lines import log_to_stderr
from tercet.wire.serving.server_access import AdminAccess, RouterKeys
from tercet_gateway.model_router.backends import BackendPolls
from tercet_gateway.model_router.model_router_config import ModelBackend, ModelRouterConfig, require_backends
from tercet_gateway.model_router.proxy import ModelProxy
from tercet_gateway.model_router.routes import ModelRoutes, WeightedRouter
from tercet_gateway.proxied_answer import JSON
from tercet_gateway.request_bodies import RequestBodies
from tercet_gateway.served_certificate import ServedCertificate
from tercet_gateway.sidecar.listener import ClientCall, Listener

logger = logging.getLogger("tercet.gateway")
BACKENDS = f"{API_PREFIX}/backends"
ERROR_SECONDS = 2.0
"""Seconds to send errors of ended requests to their clients; then connections are closed."""


class BackendsCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``PUT /tercet/v1/backends``: all routers that the model router should have."""

    routers: Annotated[tuple[ModelBackend, ...], Meta(max_length=256)]


class BackendReport(msgspec.Struct, frozen=True):
    """The state of one router, as the model router sees it."""

    url: str
    weight: float
    answers: bool
    models: tuple[str, ...]
    in_flight: int
    requests: int
    failures: int

    @classmethod
    def of(cls, each: WeightedRouter) -> BackendReport:
        """Return the report of a router."""
        names = tuple(each.models or ())
        return cls(each.url, each.weight, each.answers, names, each.in_flight, each.requests, each.failures)


def serve(config: ModelRouterConfig) -> None:
    """Run the model router until SIGINT or SIGTERM.

    After the first signal it finishes running requests; a second one ends it at once.
    """
    import uvloop

    log_to_stderr(config.log_level, config.log_format)
    uvloop.run(_serve(config))


async def _serve(config: ModelRouterConfig) -> None:
    stopped, hurried = asyncio.Event(), asyncio.Event()
    with signals_to(stopped.set, hurried.set):
        async with descriptors_watched(), model_router(config) as server:
            logger.info("ready on port %d, before %d routers", server.port, len(config.routers))
            await stopped.wait()
            await server.finish(config.shutdown_timeout_s, hurried)


@dataclass
class ModelRouterServer:
    """A serving model router: its port, its routes, and its shutdown."""

    port: int
    routes: ModelRoutes
    _bodies: RequestBodies
    _proxy: ModelProxy
    _listener: Listener

    @property
    def bytes_kept(self) -> int:
        """Bytes of buffered bodies of requests that no router has yet."""
        return self._bodies.size

    async def finish(self, seconds: float, hurried: asyncio.Event) -> None:
        """Accept no new requests, and return when all requests have ended.

        Requests that still run after ``seconds``, or when ``hurried`` is set, end with an error.
        """
        giving_up = asyncio.create_task(self._give_up(seconds, hurried))
        try:
            await self._listener.finish()
        finally:
            giving_up.cancel()

    async def _give_up(self, seconds: float, hurried: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(seconds):
                await hurried.wait()
        except TimeoutError:
            pass
        self._proxy.give_up(ShuttingDown("this model router is shutting down, and ended the request"))
        await asyncio.sleep(ERROR_SECONDS)
        self._listener.abort()


def keys_of(config: ModelRouterConfig) -> RouterKeys:
    """Return the keys of a model router.

    Raises :class:`~tercet.protocol.BadRequest` for unusable keys, and for a model router that other machines reach
    without a client key, as a router does.
    """
    keys = RouterKeys(config, [config.api_key] if config.api_key else [])
    keys.require_private(config.host, config)
    return keys


@asynccontextmanager
async def model_router(config: ModelRouterConfig) -> AsyncGenerator[ModelRouterServer]:
    """Serve in this context.

    Raises :class:`~tercet.protocol.BadRequest` for keys, a port or a certificate that cannot be used.
    """
    routes = ModelRoutes([WeightedRouter(each.url.rstrip("/"), each.weight) for each in config.routers])
    async with AsyncExitStack() as stack:
        keys = keys_of(config)
        polls = BackendPolls(routes, config.poll_s, lambda: config.router_key or keys.first_of_clients)
        await stack.enter_async_context(polls)
        bodies = RequestBodies(config.max_request_bytes)
        proxy = ModelProxy(routes, polls, bodies, keys.clients)
        admin = _BackendsRoute(routes, polls, bodies, keys.access)

        async def handle(http: ClientCall) -> None:
            await (admin.handle if http.path == BACKENDS else proxy.handle)(http)

        listener = Listener(handle, error_body)
        stack.push_async_callback(listener.close)
        tls = None
        if config.tls_cert is not None and config.tls_key is not None:
            tls = ServedCertificate(Path(config.tls_cert), Path(config.tls_key)).context()
        try:
            await listener.start(config.host, config.port, tls)
        except OSError as error:
            raise BadRequest(f"port: cannot listen on {config.host}:{config.port}: {error.strerror}", "port") from error
        following = TaskSet()
        stack.push_async_callback(following.close)
        following.keep(keys.follow, "keys")
        yield ModelRouterServer(listener.port, routes, bodies, proxy, listener)


class _BackendsRoute:
    """The route that shows and replaces routers, for the callers that ``access`` admits to admin routes."""

    def __init__(self, routes: ModelRoutes, polls: BackendPolls, bodies: RequestBodies, access: AdminAccess) -> None:
        self._routes = routes
        self._polls = polls
        self._bodies = bodies
        self._access = access
        self._turn = asyncio.Lock()

    async def handle(self, http: ClientCall) -> None:
        """Serve ``GET`` and ``PUT /tercet/v1/backends``."""
        try:
            self._access.require_call(http.method.decode("latin-1"), http.path, http.fields, http.peer)
            if http.method == b"PUT":
                with self._bodies.one() as body:
                    await self._bodies.read(http, body)
                    await self._replace(body.content)
            elif http.method != b"GET":
                raise BadRequest("this route accepts only GET and PUT")
            body = msgspec.json.encode([BackendReport.of(each) for each in self._routes.backends])
            await http.answer(200, body, JSON)
        except TercetError as error:
            await http.answer(error.status, error_body(http.path, error), JSON)

    async def _replace(self, body: bytes) -> None:
        wanted: Any = decode_call(body, BackendsCall)
        require_backends(wanted.routers, "routers")
        async with self._turn:
            await self._polls.replace({each.url.rstrip("/"): each.weight for each in wanted.routers})
        shares = ", ".join(f"{each.url} weight {each.weight:g}" for each in self._routes.backends)
        logger.info("routers are now %s", shares)
