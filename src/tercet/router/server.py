"""Assembly of the router: the fleet, the service and Tercet's routes, around vLLM's OpenAI server."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from fastapi import FastAPI, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from tercet.aio.files import descriptors_watched
from tercet.aio.importing import collect_rarely
from tercet.aio.tasks import TaskSet, signals_to
from tercet.fleet import EngineFleet
from tercet.fleet.admission import Gate
from tercet.fleet.discovery import access_of, discovery_of
from tercet.fleet.membership import READY_SECONDS, Membership, ServedModel, connecting
from tercet.logs import log_to_stderr, saying_while
from tercet.protocol import EngineUnreachable, spans
from tercet.protocol.entry_points import PARTS, provided
from tercet.protocol.spans import SpanContext
from tercet.router import admin
from tercet.router.admin.admin_server import admin_served
from tercet.router.batches.batch_routes import Batches
from tercet.router.observe.metrics import HotContextMetrics, Metrics, SessionMetrics, WriteBehindMetrics
from tercet.router.observe.request_traces import RequestTrace, RequestTraces, spans_of
from tercet.router.pooling import PoolingServers
from tercet.router.router_app import RouterApp, put_layers_before
from tercet.router.serve.context_copies import HotContexts, WriteBehind
from tercet.router.serve.moves import Rescheduler
from tercet.router.serve.plans import NamedFiles
from tercet.router.serve.service import Service
from tercet.router.serve.sessions import Sessions
from tercet.router.serve.shutdown import Shutdown
from tercet.router.state.fleet_adapters import AdapterLoader
from tercet.router.state.fleet_state import FleetState
from tercet.router.state.joined_members import GoneEngines, follow_found, remove_gone
from tercet.router.state.loaded_code import reload_on_change
from tercet.router.state.roles import RoleKeeper, with_roles_followed
from tercet.router.state.shared_state import SharedState
from tercet.router.state.state_store import StateStore, configmap_store
from tercet.router.workers import Shared, listening_socket, log_ready
from tercet.settings import RouterConfig
from tercet.settings.process_settings import ALL_ENGINES_VARIABLE, API_KEY_VARIABLE
from tercet.wire.client import StreamListener, engine_tls
from tercet.wire.exported_spans import exporting_spans
from tercet.wire.serving.http_server import error_response, served
from tercet.wire.serving.server_access import RouterKeys, api_keys

logger = logging.getLogger("tercet.router")
# Flags with which vLLM's layer does not listen at a plain port.
OTHER_LISTENING = ("--ssl", "--uds", "--root-path")
REASON = "this router has no engine yet that answers; it serves once one does"


@asynccontextmanager
async def waiting_room(config: RouterConfig, state: SharedState, files: NamedFiles, gate: Gate) -> AsyncGenerator[None]:
    """Answer clients at the router's port with 503 and :data:`REASON`, and serve admin routes, while entered.

    The port is free at the exit, so that the OpenAI API can listen there.
    """
    # The client keys among vLLM's flags; the layer that serves later checks the other flags.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--api-key", nargs="+")
    keys = RouterKeys(config, api_keys(parser.parse_known_args(list(config.vllm_args))[0]))
    keys.require_private(config.host, config)
    with listening_socket(config) as sock:
        async with served(_app(config, state, keys, files, gate), sock):
            logger.warning("%s; until then port %d answers with this error", REASON, config.port)
            yield


def _app(config: RouterConfig, state: SharedState, keys: RouterKeys, files: NamedFiles, gate: Gate) -> FastAPI:
    app = FastAPI(openapi_url=None)
    admin.install(app, state, [config.public_name, *config.model_aliases], files=files)

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
    async def not_yet(path: str) -> Response:
        return error_response(EngineUnreachable(REASON), None)

    app.middleware_stack = RouterApp(
        app.build_middleware_stack(), None, gate, keys.clients, state.service.program_called, config.max_request_bytes,
        access_log=config.access_log, admins=keys.access,
    )  # fmt: skip
    return app


SOON_SECONDS = 6.0
"""Seconds in which a named engine should answer; later the port answers with an error meanwhile."""


def serve(config: RouterConfig, shared: Shared | None = None) -> None:
    """Run the router until SIGINT or SIGTERM; with ``shared``, run it as one of several workers.

    After the first signal it finishes running requests; any further signal ends it at once.
    """
    import uvloop

    if config.serves_without_vllm:
        _serve_small()
        collect_rarely()
    log_to_stderr(config.log_level, config.log_format, config.access_log)
    with exporting_spans("tercet-router", {"service.instance.id": f"{config.public_name}-{os.getpid()}"}):
        uvloop.run(_serve(config, shared))


async def _serve(config: RouterConfig, shared: Shared | None) -> None:
    signal.signal(signal.SIGTERM, _interrupt)
    tls = engine_tls(config.engine_tls.ca, config.engine_tls.cert, config.engine_tls.key)
    fleet = EngineFleet((), stuck_after_s=config.stuck_after_s)
    fleet.picking.without_role = config.without_role
    metrics = Metrics()
    async with (
        AsyncExitStack() as until_ended,
        descriptors_watched(),
        StreamListener(stream_port(config, shared)) as listener,
        Membership(fleet, connecting(fleet, listener, config.secret, tls)) as membership,
        PoolingServers(
            config.pooling_servers, config.pooling_key, tls, config.request_timeout_s, metrics.pooling_server
        ) as pooling,
    ):
        service = Service(
            fleet, config.program, config.program_args, metrics, config.return_after, config.retries,
            config.request_timeout_s, config.wait_for_engine_s, config.moves, config.dev,
            objectives=config.objectives,
        )  # fmt: skip
        with state_path(config) as path:
            shutdown = Shutdown(config.shutdown_timeout_s)
            traces = RequestTraces(config.trace_requests, service.moves.numbered, _export_spans)
            logs_changes = shared is None or not shared.index
            # Where routers on several machines share the state; otherwise they share the file at `path`, if at all.
            store: StateStore | None = None
            if config.state_ray is not None:
                store = provided(PARTS, "ray-state", "ray", "state-ray")(config.state_ray)
            elif config.state_configmap is not None:
                store = configmap_store(access_of(config.discovery), config.state_configmap)
            state = SharedState(path, membership, service, shutdown, logs_changes, traces, store)
            gate = Gate(config.limits, fleet, metrics)
            await _Router(config, shared, membership, pooling, path, state, gate, shutdown, until_ended).run()


@dataclass(frozen=True)
class _Router:
    """The parts of one router process; ``until_ended`` is closed last, after files and sockets are removed."""

    config: RouterConfig
    shared: Shared | None
    membership: Membership
    pooling: PoolingServers
    path: Path
    state: SharedState
    gate: Gate
    shutdown: Shutdown
    until_ended: AsyncExitStack
    background: TaskSet = field(default_factory=TaskSet)

    async def run(self) -> None:
        """Wait for an engine, then serve until a shutdown."""
        try:
            if self.shared is not None:
                self.background.keep(partial(self.shared.follow_supervisor, self.shutdown.hurry), "supervisor")
            await self.state.start(FleetState.of(self.config))
            if self._engines_come_later:
                if self.state.logs_changes and self.config.discovery.is_wanted:
                    self.background.keep(lambda: follow_found(self.state, discovery_of(self.config.discovery)), "pods")
                self.background.keep(self.state.follow, "state")
            # vLLM is imported while engines are still loading.
            if not self.config.serves_without_vllm:
                from tercet.vllm_plugin.start.before_forks import light_import
                from tercet.vllm_plugin.start.process_output import errors_only

                errors_only()  # vLLM's other lines concern an engine that does not run here, and routes
                with saying_while("importing vLLM's OpenAI layer", logger.info), light_import(compiles=False):
                    from tercet.router.openai.openai_server import import_vllm, require_flags

                    import_vllm()
                require_flags(self.config.vllm_args, self.config.workers)
            model = await self._served_model()
            # From now on each engine is checked against the model that clients know.
            self.membership.served_model, self.membership.on_replaced = model, self.state.replaced
            self.background.keep(self.membership.watch, "membership")
            if self.state.logs_changes:  # of several workers, one removes engines
                gone = GoneEngines(asyncio.get_running_loop().time)
                self.background.keep(partial(remove_gone, self.state, gone), "gone engines")
            self._start_deciding()
            async with self.state.traces.answering():
                if not self.config.serves_without_vllm:
                    await self._serve_openai(model.max_model_len)
                else:
                    await _serve_small()(
                        self.config, self.state, self.gate, model.max_model_len, self.shutdown, self.pooling,
                        named_files(self.config), self._heed_signals, self.shared,
                    )  # fmt: skip
        finally:
            # What changes the state ends before the state closes.
            await self.background.close()
            self.state.close()

    @property
    def _engines_come_later(self) -> bool:
        return self.config.await_engines or self.config.discovery.is_wanted

    async def _served_model(self) -> ServedModel:
        """Wait for an engine that answers; if engines are named, the port stays closed for the first seconds."""
        if not self._engines_come_later:
            try:
                if os.environ.pop(ALL_ENGINES_VARIABLE, ""):
                    return await self.state.until_ready(partial(self.membership.until_ready, others=math.inf))
                with suppress(EngineUnreachable):
                    return await self.state.until_ready(partial(self.membership.until_ready, SOON_SECONDS))
            finally:
                self.background.keep(self.state.follow, "state")
        # Wait for the first engine that answers; answer errors at the port meanwhile, if that is possible.
        plain = not any(flag.startswith(OTHER_LISTENING) for flag in self.config.vllm_args)
        if not (self.config.workers == 1 and self.config.admin_listen is None and plain):
            return await self.state.until_ready(self.membership.until_one_answers)
        async with waiting_room(self.config, self.state, named_files(self.config), self.gate):
            seconds = math.inf if self.config.await_engines or self.config.discovery.roster else READY_SECONDS
            return await self.state.until_ready(partial(self.membership.until_one_answers, seconds))

    def _start_deciding(self) -> None:
        """Start the background decisions: roles, moves, sessions, adapters, and reloads of a program."""
        config, state, service, keep = self.config, self.state, self.state.service, self.background.keep
        policies = config.reschedule
        if config.roles_by == "auto":
            policies = with_roles_followed(policies)
            state.role_keeper = RoleKeeper(state, self.path, config.objectives)
            self.background.spawn(state.role_keeper.run(), "roles")
        keep(Rescheduler(service.fleet, service.sequences, service.moves, policies).run, "rescheduler")
        keep(WriteBehind(service.fleet, WriteBehindMetrics()).run, "write-behind")
        if config.warm_start_s:
            hot = HotContexts(service.fleet, HotContextMetrics(), config.warm_start_s, config.workers)
            service.hot_contexts = hot
            self.background.spawn(hot.run(), "hot contexts")
        if config.sessions.on:
            # With a state file, sessions outlive this process. The name is the same after a restart: it has the port
            # and the worker's number, since each worker has its own sessions.
            index = 0 if self.shared is None else self.shared.index
            name = f"{self.path.name}.sessions-{config.port}-{index}.json"
            file = None if config.state is None else self.path.with_name(name)
            service.sessions = sessions = Sessions(service.fleet, config.sessions, SessionMetrics(), file=file)
            self.background.spawn(sessions.run(), "sessions")
        if config.missing_adapters == "load":
            keep(AdapterLoader(service.fleet, self.membership).run, "adapters")
        if config.dev:
            keep(partial(reload_on_change, state), "reload")
        if (directory := config.batches.directory) is not None:
            state.batches = Batches(directory, config.batches, service, self.shutdown, config.objectives.tpot)
            keep(state.batches.run, "batches")

    async def _serve_openai(self, max_model_len: int) -> None:
        from tercet.router.openai import openai_server as vllm

        config, state, shared, service = self.config, self.state, self.shared, self.state.service
        names = [config.public_name, *config.model_aliases]
        args = vllm.server_args(config.model, names, config.host, config.port, max_model_len, config.vllm_args)
        keys = RouterKeys(config, api_keys(args))
        if not args.uds:
            keys.require_private(config.host, config)
        keys.require_private_admin(config.admin_address)
        # The router checks keys itself, also for websockets: vLLM's check does not know keys from files.
        args.api_key = None
        os.environ.pop(API_KEY_VARIABLE, None)
        following = TaskSet()
        sock = vllm.listening_socket(args, shared.listening if shared is not None else None)
        engine_client = vllm.engine_client_over(service, args)
        try:
            with saying_while("loading the tokenizer and the OpenAI API", logger.info):
                await self.membership.speak(vllm.text_of(engine_client, args))
                server = await vllm.openai_server(args, engine_client)
            if config.fast_path == "on":
                server = vllm.with_fast_path(server, args, engine_client)
            vllm.serve_adapters(server.app.state, engine_client, lambda: service.fleet.adapters)
            admin.install(server.app, state, names, vllm.loads_adapters(), named_files(config))
            # Refusals do not pass vLLM's layers; without the same CORS headers a browser hides them from its page.
            put_layers_before(
                server.app, server.layers, config, state, self.gate, keys, self.shutdown, self.pooling, server.fast,
                lambda refusals: with_cors(refusals, args),
            )  # fmt: skip
            following.keep(keys.follow, "keys")

            async def shut_down() -> None:
                self._heed_signals()
                await self.shutdown.run(self.gate.close, service.give_up)

            ready = partial(log_ready, config) if shared is None else shared.serving
            loads = None if shared is None else (shared.loads, shared.index)
            # Only the first of several workers serves the admin address; all workers follow the state that it changes.
            own = config.admin_address if shared is None or not shared.index else None
            # The admin address has the TLS options of the clients' port, as vLLM's flags give them.
            names = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs") if args.ssl_certfile else ()
            async with admin_served(server.app, own, **{name: getattr(args, name) for name in names}):
                await state.serving()
                await vllm.accept(server.app, args, sock, shut_down, loads, ready)
        finally:
            await following.close()
            engine_client.shutdown()
            sock.close()

    def _heed_signals(self) -> None:
        """Let signals begin the shutdown, until the very end: no signal interrupts the removal of files and sockets.

        In a worker a second signal does not hurry: a terminal's signals also reach the supervisor, which does that.
        """
        second = self.shutdown.hurry if self.shared is None else self.shutdown.begin
        self.until_ended.enter_context(signals_to(self.shutdown.begin, second))


@contextmanager
def state_path(config: RouterConfig) -> Generator[Path]:
    """Yield the path of the fleet's state: the operator's file, or a temporary file that ends with this process."""
    if config.state is not None:
        yield Path(config.state).expanduser().absolute()
        return
    with TemporaryDirectory(prefix="tercet-state-") as directory:
        yield Path(directory) / "state.json"


def named_files(config: RouterConfig) -> NamedFiles:
    """Return the files that admin routes may name: those below the admin folders, and those named in settings."""
    program, colon, _ = config.program.rpartition(":")
    named = [path for path in (program if colon else "", config.scheduling) if path]
    return NamedFiles(config.admin_folders, named)


def stream_port(config: RouterConfig, shared: Shared | None) -> int:
    """Return the port of this process's token streams; 0 for any free port."""
    return config.stream_port + shared.index if shared is not None and config.stream_port else config.stream_port


def _serve_small() -> Callable[..., Awaitable[None]]:
    """Import the small OpenAI layer; raise :class:`~tercet.protocol.BadRequest` if its package is missing."""
    found: Callable[..., Awaitable[None]] = provided(PARTS, "small-openai", "lab", "openai-layer")
    return found


def _export_spans(trace: RequestTrace, place: SpanContext) -> None:
    """Export the spans of a sampled request that has ended, if spans are exported at all."""
    if spans.process.sink is not None:
        spans.process.sink.take(spans_of(trace, place))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def with_cors(app: ASGIApp, args: argparse.Namespace) -> ASGIApp:
    """Return ``app`` with CORS headers for browsers, by the same options as vLLM's layers."""
    return CORSMiddleware(
        app, allow_origins=args.allowed_origins, allow_credentials=args.allow_credentials,
        allow_methods=args.allowed_methods, allow_headers=args.allowed_headers,
    )  # fmt: skip
