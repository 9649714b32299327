"""``tercet epp``: the fleet, the picker, its gRPC services, and its page of metrics."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path

import grpc.aio
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from tercet.aio.files import descriptors_watched
from tercet.aio.incoming import LONGEST_HEAD, SECONDS
from tercet.aio.tasks import TaskSet, signals_to
from tercet.decisions.scheduling import Scheduling, load_scheduling
from tercet.fleet import EngineFleet
from tercet.fleet.discovery import access_of, discovery_of, follow_found, until_known
from tercet.fleet.engine_fleet import EngineCollector
from tercet.fleet.knowledge import STALE_AFTER
from tercet.fleet.members import MemberState
from tercet.fleet.membership import Connect, Membership, connecting
from tercet.logs import log_to_stderr
from tercet.protocol import BadRequest, MethodNotAllowed, ShuttingDown, UnknownPath
from tercet.protocol.names import host_and_port
from tercet.settings.process_settings import PARALLEL_TOKENIZERS
from tercet.wire.client import StreamListener, engine_tls
from tercet.wire.exported_spans import exporting_spans
from tercet_gateway.endpoint_picker import EndpointPicker, PickerMetrics, PoolCollector
from tercet_gateway.exchange import EndpointPickerService
from tercet_gateway.gateway_settings import PickerConfig
from tercet_gateway.model_renderer import ModelRenderer, tokenizer_file
from tercet_gateway.objectives import PoolReference, follow_objectives
from tercet_gateway.openai_call import ByCharacters, Renderer
from tercet_gateway.protos import SERVICE, HealthCheckResponse, add_HealthServicer_to_server, health
from tercet_gateway.proxied_calls import ClientCall, HttpServer, ServedCertificate, application
from tercet_gateway.scraped_engine import scraping

logger = logging.getLogger("tercet.gateway")
LIVENESS, READY_NAMES = "liveness", ("readiness", SERVICE, "")
# Most bytes of the headers and metadata of a message that also has a buffered body.
BESIDE_BODY = 1024 * 1024
CONNECTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", round(1000 * SECONDS)),
    ("grpc.max_metadata_size", LONGEST_HEAD),
    ("grpc.absolute_max_metadata_size", LONGEST_HEAD),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]
"""Options of gRPC connections: one stays open while the proxy answers pings; one that never uses gRPC is closed."""
READINGS_UNTIL_STALE = 5
READY_SECONDS = 10.0
"""Seconds until the picker reports ready if no engine answers."""
POLL_INTERVAL_S = 0.1
SWITCH_SECONDS = 0.001
"""Seconds that requests wait for a thread that prepares another request's prompt in Python."""
LAST_SECONDS = 1.0
"""Seconds for streams that are open at the end; after that Envoy treats them as failures of the picker."""


def serve(config: PickerConfig) -> None:
    """Run the picker until SIGINT or SIGTERM; a second signal ends it at once."""
    import uvloop

    log_to_stderr(config.log_level, config.log_format)
    # One thread tokenizes a segment, at its own priority; otherwise the tokenizer would use one thread per core.
    os.environ.setdefault(PARALLEL_TOKENIZERS, "false")
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.set_threshold(20_000, 50, 50)  # requests make thousands of objects, few of them in cycles
    with exporting_spans("tercet-picker"):
        uvloop.run(_serve(config))


async def _serve(config: PickerConfig) -> None:
    stopped, hurried = asyncio.Event(), asyncio.Event()
    with signals_to(stopped.set, hurried.set):
        async with descriptors_watched(), fleet_of(config) as fleet, picking(fleet, config) as server:
            logger.info("listening for Envoy on port %d, /metrics on port %d", server.port, server.metrics_port)
            await stopped.wait()
            await server.drain(config.shutdown_timeout_s, hurried)


def require_usable(config: PickerConfig) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for a file that cannot be used: scheduling, TLS, tokenizer."""
    scheduling_of(config)
    engine_tls(config.engine_tls.ca, config.engine_tls.cert, config.engine_tls.key)
    if config.tls_cert is not None and config.tls_key is not None:
        ServedCertificate(Path(config.tls_cert), Path(config.tls_key))
    if config.render_model is not None:
        tokenizer_file(Path(config.render_model).expanduser())


@asynccontextmanager
async def fleet_of(config: PickerConfig) -> AsyncGenerator[EngineFleet]:
    """Follow the engines in this context; they are picked once they have answered."""
    fleet = EngineFleet(
        (),
        scheduling=scheduling_of(config),
        stale_after=max(STALE_AFTER, READINGS_UNTIL_STALE * config.metrics_interval_s),
        stuck_after_s=config.stuck_after_s,
    )
    fleet.picking.without_role = config.without_role
    fleet.costs.watch_once_asked()
    background = TaskSet()
    async with (
        StreamListener(config.stream_port) as listener,
        Membership(fleet, _connect(fleet, listener, config)) as membership,
    ):
        try:
            await membership.become([MemberState(address) for address in config.engines])
            background.keep(membership.watch, "membership")
            if config.discovery.is_wanted:
                discovery, known = discovery_of(config.discovery), asyncio.Event()
                background.keep(partial(follow_found, discovery, membership, config.engines, known), "pods")
                await until_known(known, discovery.source)
            yield fleet
        finally:
            await background.close()


def _connect(fleet: EngineFleet, listener: StreamListener, config: PickerConfig) -> Connect:
    """Return the connector of engines: their loads arrive as reports, or by scraping."""
    tls = engine_tls(config.engine_tls.ca, config.engine_tls.cert, config.engine_tls.key)
    if config.load_from == "metrics":
        return scraping(fleet, config.metrics_interval_s, config.kv_events_port, tls)
    return connecting(fleet, listener, config.secret, tls)


def scheduling_of(config: PickerConfig) -> Scheduling:
    """Return the scheduling of the file, or the built-in one.

    Raises :class:`~tercet.protocol.BadRequest` for a missing profile.
    """
    if config.scheduling is None:
        with resources.as_file(resources.files("tercet_gateway") / "default.yaml") as file:
            return load_scheduling(file)
    found = load_scheduling(Path(config.scheduling).expanduser())
    if "decode" not in found.by_role:
        raise BadRequest("scheduling: several profiles need a profile handler, which assigns them to roles", "plugins")
    return found


def renderer_of(config: PickerConfig) -> Renderer:
    """Return the renderer of the configured model, or one by characters.

    Raises :class:`~tercet.protocol.BadRequest`.
    """
    if config.render_model is None:
        return ByCharacters()
    return ModelRenderer(Path(config.render_model).expanduser(), config.render_budget, config.render_cache_bytes)


@dataclass
class PickerServer:
    """A serving picker: its ports, and its shutdown."""

    port: int
    metrics_port: int
    picker: EndpointPicker
    _health: health.HealthServicer
    _starting: asyncio.Task[None]

    async def drain(self, seconds: float, hurried: asyncio.Event) -> None:
        """Report not ready for ``seconds`` or until ``hurried``, so that Envoy uses other pickers; continue to pick."""
        self._starting.cancel()
        await _say(self._health, READY_NAMES, HealthCheckResponse.NOT_SERVING)
        try:
            async with asyncio.timeout(seconds):
                await hurried.wait()
        except TimeoutError:
            pass
        self.picker.close(ShuttingDown("this endpoint picker is shutting down"))


@asynccontextmanager
async def picking(fleet: EngineFleet, config: PickerConfig) -> AsyncGenerator[PickerServer]:
    """Serve in this context. Raises :class:`~tercet.protocol.BadRequest` for a port in use."""
    metrics = PickerMetrics(fleet.serves)
    metrics.registry.register(PoolCollector(fleet, config.pool))
    metrics.registry.register(EngineCollector(fleet))
    renderer = renderer_of(config)
    picker = EndpointPicker(fleet, renderer, metrics, config)
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", config.max_request_bytes + BESIDE_BODY), *CONNECTIONS]
    )
    server.add_generic_rpc_handlers((EndpointPickerService(picker, metrics, config.max_request_bytes).handler(),))
    servicer = health.HealthServicer()
    add_HealthServicer_to_server(servicer, server)
    port = _listen(server, config)
    probed = _health_server(servicer, config)
    await _say(servicer, [LIVENESS], HealthCheckResponse.SERVING)
    await _say(servicer, READY_NAMES, HealthCheckResponse.NOT_SERVING)
    async with _metrics_server(metrics, config) as metrics_port:
        await server.start()
        if probed is not None:
            await probed.start()
        starting = asyncio.create_task(_until_ready(fleet, servicer), name="readiness")
        background = TaskSet()
        try:
            if (name := config.discovery.pool_name) is not None:
                api, pool = access_of(config.discovery), PoolReference(name, group=config.discovery.pool_group)
                namespace = config.discovery.pool_namespace or api.namespace
                background.keep(partial(follow_objectives, api, namespace, pool, picker.set_objectives), "objectives")
            yield PickerServer(port, metrics_port, picker, servicer, starting)
        finally:
            starting.cancel()
            await background.close()
            await server.stop(LAST_SECONDS)
            if probed is not None:
                await probed.stop(None)
            renderer.close()


async def _until_ready(fleet: EngineFleet, servicer: health.HealthServicer) -> None:
    """Report ready once an engine has answered, or after a timeout: then 503 answers show that no engine answers."""
    try:
        async with asyncio.timeout(READY_SECONDS):
            while not fleet.health.answers:  # noqa: ASYNC110 - several events may set it, and it is awaited only once
                await asyncio.sleep(POLL_INTERVAL_S)
    except TimeoutError:
        logger.warning("no engine has answered within %g s; requests get 503 until one does", READY_SECONDS)
    await _say(servicer, READY_NAMES, HealthCheckResponse.SERVING)


async def _say(servicer: health.HealthServicer, names: Sequence[str], status: int) -> None:
    for name in names:
        await servicer.set(name, status)


def _health_server(servicer: health.HealthServicer, config: PickerConfig) -> grpc.aio.Server | None:
    """Return a health server on a separate port without TLS, since kubelets cannot use TLS; None if not configured."""
    if config.grpc_health_port is None:
        return None
    server = grpc.aio.server(options=CONNECTIONS)
    add_HealthServicer_to_server(servicer, server)
    address = host_and_port(config.host, config.grpc_health_port)
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise BadRequest(f"grpc-health-port: cannot listen on {address}", "grpc-health-port") from error
    return server


def _listen(server: grpc.aio.Server, config: PickerConfig) -> int:
    address = host_and_port(config.host, config.port)
    try:
        if config.tls_cert is None or config.tls_key is None:
            return server.add_insecure_port(address)
        shown = ServedCertificate(Path(config.tls_cert), Path(config.tls_key))
        return server.add_secure_port(address, shown.credentials())
    except RuntimeError as error:
        raise BadRequest(f"port: cannot listen on {address}", "port") from error


@asynccontextmanager
async def _metrics_server(metrics: PickerMetrics, config: PickerConfig) -> AsyncGenerator[int]:
    async def answer(http: ClientCall) -> None:
        if http.path != "/metrics":
            raise UnknownPath(f"{http.path:.200} does not exist; this port serves only /metrics")
        if http.method not in ("GET", "HEAD"):
            raise MethodNotAllowed("this route accepts only GET")
        await http.answer(200, generate_latest(metrics.registry), CONTENT_TYPE_LATEST)

    server = HttpServer(application(answer))
    try:
        await server.start(config.host, config.metrics_port)
    except OSError as error:
        raise BadRequest(f"metrics-port: {error.strerror}", "metrics-port") from error
    try:
        yield server.port
    finally:
        await server.close()
