"""``tercet model-router``: requests go to the router of the model that they name, and answers come back unchanged.

The proxy is first; then the assembly: the port, the polls, and the route by which routers are changed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta
from prometheus_client import CollectorRegistry, Counter, generate_latest

from tercet.aio import TaskSet, signals_to
from tercet.aio.descriptors import descriptors_watched
from tercet.fleet.members import CallsInFlight, UntilLost
from tercet.logs import log_to_stderr
from tercet.protocol import (
    BadRequest,
    EngineError,
    EngineUnreachable,
    ShuttingDown,
    TercetError,
    UnknownModel,
    UnknownPath,
)
from tercet.protocol.access import BearerKeys
from tercet.protocol.errors import error_body, in_form
from tercet.protocol.headers import MODELS, is_for_clients
from tercet.protocol.json_text import UNREADABLE, in_utf8, read_json
from tercet.protocol.request_checks import forms_of, labelled
from tercet.protocol.wire import API_PREFIX, decode_call
from tercet.router.limits.bodies import HeldBody
from tercet.wire.client.bounded_answers import reason_of
from tercet.wire.client.passing import (
    NotConnected,
    NotReadable,
    OriginAnswer,
    end_to_end,
    passed_trailers,
    with_forwarder,
)
from tercet.wire.serving.server_access import AdminAccess, RouterKeys
from tercet_gateway.gateway_settings import ModelBackend, ModelRouterConfig, require_backends
from tercet_gateway.model_router.backends import BackendPolls, ModelRoutes, WeightedRouter
from tercet_gateway.served_certificate import ServedCertificate
from tercet_gateway.sidecar.listener import JSON, ClientCall, Listener, ProxiedAnswer, RequestBodies

ASKS = "this model router requires an API key: Authorization: Bearer KEY"
HEALTH = frozenset({"/health", "/ping"})
LIVE = "/live"
METRICS = frozenset({"/metrics", "/metrics/"})
NOT_FOUND = "NotFoundError"
"""The type of vLLM's error for an unknown model."""
CLIENT_LEFT = 499
"""Status that proxies record for a request whose client did not wait for its answer."""
NOT_PASSED = frozenset({b"trailer", b"expect", b"content-length"})
OPTIONS = b"OPTIONS"


class _Named(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw(b"null")


class ModelMetrics:
    """The counters of a model router; models are those that routers list."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.requests = Counter(
            "tercet_model_router_requests", "Requests that were passed to a router, by model, router and status.",
            ["model", "router", "status"], registry=own,
        )  # fmt: skip
        self.refused = Counter(
            "tercet_model_router_refused", "Requests that were refused, by error.", ["code"], registry=own
        )


class ModelProxy:
    """The proxy for requests of clients to the routers of ``routes``.

    ``keys`` are the client keys. ``draw`` returns a number in ``[0, 1)`` for each choice. Routes that are not for
    clients do not pass.
    """

    def __init__(
        self, routes: ModelRoutes, polls: BackendPolls, bodies: RequestBodies, keys: BearerKeys,
        draw: Callable[[], float] = random.random,
    ) -> None:  # fmt: skip
        self.metrics = ModelMetrics()
        self._routes = routes
        self._polls = polls
        self._bodies = bodies
        self._keys = keys
        self._draw = draw
        self._under_way = CallsInFlight()

    def give_up(self, error: TercetError) -> None:
        """End running requests with ``error``."""
        self._under_way.lose(error)

    async def handle(self, http: ClientCall) -> None:
        """Answer as the router of the request's model does, or with an error in the form of the API."""
        answer = ProxiedAnswer(http)
        try:
            async with UntilLost(self._under_way):
                await self._serve(http, answer)
        except UnknownModel as error:  # in vLLM's form
            self.metrics.refused.labels(error.code).inc()
            said = {"message": error.message, "type": NOT_FOUND, "param": "model", "code": error.status}
            await http.answer(error.status, in_form(http.path, error.status, said), JSON)
        except TercetError as error:
            self.metrics.refused.labels(error.code).inc()
            await answer.fail(error)

    async def _serve(self, http: ClientCall, answer: ProxiedAnswer) -> None:
        reads = http.method in (b"GET", b"HEAD")
        if http.path == LIVE and reads:
            await http.answer(200, b"", "text/plain")
        elif http.path in HEALTH and reads:
            self._routes.require_answers()
            await http.answer(200, b"", "text/plain")
        elif http.path in METRICS and reads:
            await http.answer(200, generate_latest(self.metrics.registry), "text/plain")
        else:
            if http.method != OPTIONS:  # browsers ask without a key whether a page may send one
                self._keys.require(http.headers("authorization"), ASKS)
            if not is_for_clients(http.path):
                raise UnknownPath(
                    f"{http.path:.200} is not for clients, so it does not pass a model router; if it exists, it is "
                    "served by the router of each model"
                )
            if http.path == MODELS and reads:
                await self._models(http, answer)
                return
            form = ""
            if http.has_body:
                form, http.fields, _ = labelled(http.fields, forms_of(http.path))
            with self._bodies.one() as body:
                await self._bodies.read(http, body)
                asks = http.method == OPTIONS and not body.size
                model = self._routes.any_model() if asks else self._model_in(body.content, form)
                await self._pass_on(http, answer, model, body)

    async def _models(self, http: ClientCall, answer: ProxiedAnswer) -> None:
        """List all models, for a client whose key a router accepts; otherwise pass on that router's refusal."""
        self._routes.require_answers()
        backend = next(each for each in self._routes.backends if each.answers and each.weight > 0)
        response = await self._asked(http, backend, b"")
        try:
            if response.status != 200:
                await self._answer(answer, response, backend)
                return
            while await response.part():
                pass
        except (NotReadable, OSError) as error:
            raise EngineUnreachable(f"{backend.url} was lost: {reason_of(error)}") from error
        finally:
            response.close()
        await http.answer(200, msgspec.json.encode({"object": "list", "data": self._routes.listed()}), JSON)

    def _model_in(self, body: bytes, form: str) -> str:
        """Return the model that a body of this form names, or the only one; of forms, only JSON is read.

        Raises :class:`~tercet.protocol.BadRequest`.
        """
        return (_model_of(in_utf8(body)) if form == JSON else None) or self._routes.only_model()

    async def _pass_on(self, http: ClientCall, answer: ProxiedAnswer, model: str, body: HeldBody) -> None:
        """Pass the request to a router of its model; try another one if a router cannot be connected.

        A router that cannot be connected has received nothing of the request. The body counts until the answer begins.
        """
        failed = set[WeightedRouter]()
        while True:
            backend = self._routes.choose(model, self._draw(), failed)
            with self._counted(backend, model) as status:
                async with UntilLost(backend.calls):
                    try:
                        async with body.until_let_go():
                            response = await self._asked(http, backend, body.content)
                    except NotConnected as error:
                        failed.add(backend)
                        self._polls.lost(backend, reason_of(error.__cause__ or error))
                        continue
                    body.forget()
                    status.append(response.status)
                    try:
                        await self._answer(answer, response, backend)
                    finally:
                        response.close()
            return

    async def _asked(self, http: ClientCall, backend: WeightedRouter, body: bytes) -> OriginAnswer:
        origin = self._polls.origins[backend.url]
        fields = end_to_end(http.fields, NOT_PASSED)
        if not any(name.lower() == b"host" for name, _ in fields):
            fields.insert(0, (b"Host", origin.host))
        host = (http.header("host") or "").encode("latin-1")
        fields = with_forwarder(fields, http.peer or "", host, http.scheme, http.http_version)
        if http.has_body:
            fields.append((b"Content-Length", str(len(body)).encode()))
        try:
            return await origin.ask(http.method, http.target, fields, body, http.inform)
        except NotConnected:
            raise
        except NotReadable as error:
            raise EngineError(f"the answer of {backend.url} cannot be read: {error}") from error
        except OSError as error:
            raise EngineUnreachable(f"{backend.url} was lost: {reason_of(error)}") from error

    async def _answer(self, answer: ProxiedAnswer, response: OriginAnswer, backend: WeightedRouter) -> None:
        await answer.begin(response)
        while True:
            try:
                part = await response.part()
            except (NotReadable, OSError) as error:
                raise EngineUnreachable(f"the router was lost: {reason_of(error)}") from error
            backend.sent = True
            if not part:
                break
            await answer.write(part)
        await answer.end(passed_trailers(response.trailers))

    @contextmanager
    def _counted(self, backend: WeightedRouter, model: str) -> Any:
        """Count one request of a router; its status is the last item that is added to the yielded list."""
        status = list[int]()
        backend.in_flight += 1
        backend.requests += 1
        try:
            yield status
        except TercetError as error:
            status.append(error.status)
            raise
        except BaseException:  # the client has left, which is not the router's fault
            status.append(CLIENT_LEFT)
            raise
        finally:
            backend.in_flight -= 1
            last = status[-1] if status else EngineUnreachable.status
            if last >= 500:
                backend.failures += 1
            self.metrics.requests.labels(model, backend.url, str(last)).inc()


def _model_of(body: bytes) -> str | None:
    """Return the model that a body names; other fields are skipped, since objects of them take many times its bytes."""
    if not body:
        return None
    try:
        model = msgspec.json.decode(msgspec.json.decode(body, type=_Named).model)
    except UNREADABLE:
        found = read_json(body)  # explains invalid JSON; other JSON than an object names no model
        model = cast("Mapping[str, Any]", found).get("model") if isinstance(found, dict) else None
    if model is not None and not isinstance(model, str):
        raise BadRequest("model: must be a string", "model")
    return model


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
