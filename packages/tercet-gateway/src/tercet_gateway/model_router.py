"""``tercet model-router``: requests go to the router of the model that they name, and answers come back unchanged.

The proxy is first; then the assembly: the port, the polls, and the route by which routers are changed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Self, cast

import aiohttp
import msgspec
from msgspec import Meta
from prometheus_client import CollectorRegistry, Counter, generate_latest

from tercet.aio.files import descriptors_watched
from tercet.aio.tasks import TaskSet, repeat, signals_to
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
from tercet.protocol.errors import error_body, in_form
from tercet.protocol.headers import MODELS, is_for_clients
from tercet.protocol.json_text import UNREADABLE, in_utf8, read_json
from tercet.protocol.names import chosen_by_weight
from tercet.protocol.request_checks import forms_of, labelled
from tercet.protocol.wire import API_PREFIX, JSON, decode_call
from tercet.router.request_bodies import HeldBody
from tercet.wire.callers import BearerKeys, bearer
from tercet.wire.client.bounded_answers import PLAIN, read_answer, reason_of
from tercet.wire.client.passing import (
    Fields,
    NotConnected,
    NotReadable,
    OriginAnswer,
    end_to_end,
    passing_session,
    request,
    values,
)
from tercet.wire.serving.server_access import AdminAccess, RouterKeys
from tercet_gateway.gateway_settings import ModelBackend, ModelRouterConfig, require_backends
from tercet_gateway.proxied_calls import (
    ClientCall,
    HttpServer,
    ProxiedAnswer,
    RequestBodies,
    certificate_of,
    ended_later,
    serving,
)


@dataclass(eq=False)
class WeightedRouter:
    """One router and its fleet, at ``url``.

    ``models`` are the entries of its ``/v1/models`` by name, from its last answer; None before that. ``answers`` is
    True if it answered the last poll; ``silent`` counts consecutive polls without an answer in time, and ``lost`` is
    True from its first failure to its next answer. ``weight`` is its share of the requests for each of its models,
    relative to other routers that serve the same name. ``failures`` counts requests that ended with a status of 500 or
    above, or were cut off.

    ``sent`` is True if a part of an answer came since the last silent poll; ``still`` counts consecutive silent polls
    before which none came. ``calls`` ends running requests when the router stands still.
    """

    url: str
    weight: float = 1.0
    models: Mapping[str, Any] | None = None
    answers: bool = False
    silent: int = 0
    lost: bool = False
    in_flight: int = 0
    requests: int = 0
    failures: int = 0
    sent: bool = False
    still: int = 0
    calls: CallsInFlight = field(default_factory=CallsInFlight, repr=False)

    def serves(self, model: str) -> bool:
        return self.models is not None and model in self.models


@dataclass
class ModelRoutes:
    """The routers, and the choice among them."""

    backends: Sequence[WeightedRouter] = field(default_factory=list[WeightedRouter])

    def choose(self, model: str, draw: float, but: Collection[WeightedRouter] = ()) -> WeightedRouter:
        """Return the router for a request of ``model``: one with a weight that answers, by ``draw`` in ``[0, 1)``.

        Routers in ``but`` are left out. Raises :class:`~tercet.protocol.UnknownModel` for a name that no router serves,
        and :class:`~tercet.protocol.EngineUnreachable` if no router that serves it is available now.
        """
        serving = [each for each in self.backends if each.serves(model)]
        if not serving:
            self._require_all_known()
            raise UnknownModel(f"The model `{model:.200}` does not exist.", "model")
        able = [each for each in serving if each.answers and each.weight > 0 and each not in but]
        if not able:
            urls = ", ".join(each.url for each in serving)
            raise EngineUnreachable(f"no router of the model {model!r} is available now: {urls}")
        return able[chosen_by_weight([each.weight for each in able], draw)]

    def only_model(self) -> str:
        """Return the model for a request that names none.

        Raises :class:`~tercet.protocol.BadRequest` if there are several. vLLM takes its model then, which a router
        lists first.
        """
        first = {next(iter(each.models)) for each in self.backends if each.models}
        if len(first) == 1:
            return first.pop()
        self._require_all_known()
        raise BadRequest(f"model: is missing; choose one of {', '.join(self.names)}", "model")

    def any_model(self) -> str:
        """Return a model of a router that answers, for a request to which every router answers alike.

        Raises :class:`~tercet.protocol.EngineUnreachable` if no router answers.
        """
        self.require_answers()
        able = (each.models for each in self.backends if each.answers and each.weight > 0 and each.models)
        return next((next(iter(models)) for models in able), "") or self.only_model()

    @property
    def names(self) -> list[str]:
        """All names that routers have listed."""
        return sorted({name for each in self.backends for name in each.models or ()})

    def listed(self) -> list[Any]:
        """Return the entries of ``/v1/models``: each name once, of the router with the largest weight that answers."""
        found = dict[str, Any]()
        for each in sorted(self.backends, key=lambda each: -each.weight):
            if each.answers and each.weight > 0:
                for name, entry in (each.models or {}).items():
                    found.setdefault(name, entry)
        return [found[name] for name in sorted(found)]

    def require_answers(self) -> None:
        """Raise :class:`~tercet.protocol.EngineUnreachable` if no router with a weight answers."""
        if not any(each.answers and each.weight > 0 for each in self.backends):
            raise EngineUnreachable("no router answers")

    def replaced(self, wanted: Iterable[tuple[str, float]]) -> tuple[list[WeightedRouter], list[WeightedRouter]]:
        """Set the routers, by URL and weight; routers that stay keep their state.

        Returns the new routers, and those that have left, whose running requests continue.
        """
        before = {each.url: each for each in self.backends}
        after = list[WeightedRouter]()
        for url, weight in wanted:
            backend = before.get(url) or WeightedRouter(url)
            backend.weight = weight
            after.append(backend)
        new = [each for each in after if each.url not in before]
        left = [each for each in before.values() if each not in after]
        self.backends = after
        return new, left

    def _require_all_known(self) -> None:
        silent = [each.url for each in self.backends if each.models is None]
        if silent:
            raise EngineUnreachable(f"these routers have not yet listed their models: {', '.join(silent)}")


POLL_TIMEOUT = aiohttp.ClientTimeout(total=5.0, sock_connect=2.0)
SILENT_POLLS = 3
"""Consecutive polls without an answer in time, after which a router that accepts connections counts as lost."""
KEEPALIVE_SECONDS, CONNECT_SECONDS, MOST_ANSWER_HEAD = 2.0, 5.0, 1024 * 1024


class _ModelList(msgspec.Struct):
    data: list[dict[str, Any]]


class BackendPolls:
    """Polls of the routers of ``routes`` every ``interval_s`` seconds, with the key that ``key`` returns.

    An async context manager, in which ``session`` has the connections to the routers.
    """

    session: aiohttp.ClientSession

    def __init__(self, routes: ModelRoutes, interval_s: float, key: Callable[[], str]) -> None:
        self._routes = routes
        self._interval_s = interval_s
        self._key = key
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._tasks = TaskSet()

    async def __aenter__(self) -> Self:
        self.session = passing_session(
            None, keep_alive_s=KEEPALIVE_SECONDS, connect_s=CONNECT_SECONDS, max_head=MOST_ANSWER_HEAD
        )
        await self._begin(self._routes.backends)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.close()
        await self.session.close()

    async def replace(self, weights: Mapping[str, float]) -> None:
        """Set the routers, by URL and weight; new ones are first asked for their models."""
        new, left = self._routes.replaced(weights.items())
        for backend in left:
            self._polls.pop(backend.url).cancel()
            logger.info("%s is no longer polled", backend.url)
        await self._begin(new)

    async def _begin(self, backends: Sequence[WeightedRouter]) -> None:
        firsts = [asyncio.Event() for _ in backends]
        for backend, first in zip(backends, firsts, strict=True):
            polling = self._polling(backend, first)
            self._polls[backend.url] = self._tasks.spawn(polling, f"polls of {backend.url}")
        for first in firsts:  # a caller that leaves here leaves routers that are polled
            await first.wait()

    async def _polling(self, backend: WeightedRouter, first: asyncio.Event) -> None:
        """Poll a router until cancelled; set ``first`` after the first poll, or when none will follow."""

        async def poll() -> None:
            try:
                await self.poll(backend)
            finally:
                first.set()

        await repeat(poll, self._interval_s, f"polls of {backend.url}")

    async def poll(self, backend: WeightedRouter) -> None:
        try:
            async with self.session.get(
                f"{backend.url}/v1/models",
                headers={**bearer(self._key()), **PLAIN},
                timeout=POLL_TIMEOUT,
                allow_redirects=False,
            ) as response:
                response.raise_for_status()
                found = msgspec.json.decode(await read_answer(response), type=_ModelList)
                models = {str(each["id"]): each for each in found.data}
        except TimeoutError as error:
            self._silent(backend, error)
        except aiohttp.ClientResponseError as error:
            self.lost(backend, f"it answers {error.status} when asked for its models")
        except (aiohttp.ClientError, OSError) as error:
            self.lost(backend, reason_of(error))
        except (KeyError, *UNREADABLE):
            self.lost(backend, "its list of models cannot be read")
        else:
            if not backend.answers or backend.models is None or models.keys() != backend.models.keys():
                logger.info("%s serves %s", backend.url, ", ".join(models) or "no model")
            backend.models, backend.answers, backend.silent, backend.lost = models, True, 0, False
            backend.still = 0

    def _silent(self, backend: WeightedRouter, error: TimeoutError) -> None:
        """Count a poll without an answer. A router that is overloaded may still send its answers; they continue."""
        backend.silent += 1
        backend.still = 0 if backend.sent else backend.still + 1
        backend.sent = False
        if backend.silent >= SILENT_POLLS:
            self.lost(backend, reason_of(error))
        if backend.still >= SILENT_POLLS:
            reason = f"{backend.url} was lost: it did not answer {SILENT_POLLS} polls, and sent nothing meanwhile"
            backend.calls.lose(EngineUnreachable(reason))

    def lost(self, backend: WeightedRouter, reason: str) -> None:
        """Mark the router as lost: it gets no request until a poll succeeds. Running requests continue."""
        if not backend.lost:
            logger.warning("%s is unavailable: %s", backend.url, reason)
        backend.answers, backend.lost = False, True


ASKS = "this model router requires an API key: Authorization: Bearer KEY"
HEALTH = frozenset({"/health", "/ping"})
LIVE = "/live"
METRICS = frozenset({"/metrics", "/metrics/"})
NOT_FOUND = "NotFoundError"
"""The type of vLLM's error for an unknown model."""
CLIENT_LEFT = 499
"""Status that proxies record for a request whose client did not wait for its answer."""
NOT_PASSED = frozenset({b"expect"})
OPTIONS = "OPTIONS"


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
        reads = http.method in ("GET", "HEAD")
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
                if asks:
                    model = self._routes.any_model()
                else:  # of forms, only JSON is read
                    named = _model_of(in_utf8(body.content)) if form == JSON else None
                    model = named or self._routes.only_model()
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
                        self._polls.lost(backend, reason_of(error))
                        continue
                    body.forget()
                    status.append(response.status)
                    try:
                        await self._answer(answer, response, backend)
                    finally:
                        response.close()
            return

    async def _asked(self, http: ClientCall, backend: WeightedRouter, body: bytes) -> OriginAnswer:
        fields = end_to_end(http.fields, NOT_PASSED)
        host = (http.header("host") or "").encode("latin-1")
        fields = with_forwarder(fields, http.peer or "", host, http.scheme, http.http_version.encode())
        if http.has_body:
            fields.append((b"Content-Length", str(len(body)).encode()))
        try:
            return await request(self._polls.session, backend.url, http.method, http.target, fields, body)
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
        await answer.end()

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
    _server: HttpServer

    @property
    def bytes_kept(self) -> int:
        """Bytes of buffered bodies of requests that no router has yet."""
        return self._bodies.size

    async def finish(self, seconds: float, hurried: asyncio.Event) -> None:
        """Accept no new requests, and return when all requests have ended.

        Requests that still run after ``seconds``, or when ``hurried`` is set, end with an error.
        """
        error = ShuttingDown("this model router is shutting down, and ended the request")
        async with ended_later(self._server, seconds, hurried, partial(self._proxy.give_up, error)):
            pass


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

        tls = certificate_of(config.tls_cert, config.tls_key)
        server = await stack.enter_async_context(serving(handle, config.host, config.port, tls))
        following = TaskSet()
        stack.push_async_callback(following.close)
        following.keep(keys.follow, "keys")
        yield ModelRouterServer(server.port, routes, bodies, proxy, server)


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
            self._access.require_call(http.method, http.path, http.fields, http.peer)
            if http.method == "PUT":
                with self._bodies.one() as body:
                    await self._bodies.read(http, body)
                    wanted: Any = decode_call(body.content, BackendsCall)
                require_backends(wanted.routers, "routers")
                async with self._turn:
                    await self._polls.replace({each.url.rstrip("/"): each.weight for each in wanted.routers})
                shares = ", ".join(f"{each.url} weight {each.weight:g}" for each in self._routes.backends)
                logger.info("routers are now %s", shares)
            elif http.method != "GET":
                raise BadRequest("this route accepts only GET and PUT")
            body = msgspec.json.encode([BackendReport.of(each) for each in self._routes.backends])
            await http.answer(200, body, JSON)
        except TercetError as error:
            await http.answer(error.status, error_body(http.path, error), JSON)


def with_forwarder(fields: Fields, peer: str, host: bytes, scheme: str, version: bytes) -> list[tuple[bytes, bytes]]:
    """Return the fields with those by which a proxy says that it forwards a request (RFC 9110, 7.6.3; RFC 7239).

    ``peer`` is the address of the client, empty if it is not known; ``host``, ``scheme`` and ``version`` are those of
    its request. They follow what the client itself said in such fields: the last values are the ones to believe.
    """
    node = (peer or "unknown").encode()
    forwarded = b"for=" + (b'"[%b]"' % node if b":" in node else node) + b";proto=" + scheme.encode()
    if host:
        forwarded += b';host="%b"' % host.replace(b"\\", b"\\\\").replace(b'"', b'\\"')
    chain = b", ".join([*values(fields, b"x-forwarded-for"), node])
    kept = [(name, value) for name, value in fields if name.lower() != b"x-forwarded-for"]
    return [*kept, (b"X-Forwarded-For", chain), (b"Forwarded", forwarded), (b"Via", version + b" tercet")]
