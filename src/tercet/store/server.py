"""The process of a store: it mirrors an engine's layout, serves two of the verbs, and reports to routers as engines do.

Each rank of the mirrored engine has a region of memory here and an agent that moves it, so leases, fences, hashes and
the secret are those of engines: the verbs are :mod:`tercet.engine.verbs`, the bytes :mod:`tercet.transport`.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import NoReturn

import msgspec
from prometheus_client import REGISTRY
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tercet.aio.files import descriptors_watched
from tercet.aio.tasks import TaskSet, signals_to
from tercet.engine.agents import AgentCalls, ProbeCollector
from tercet.engine.edge import Edge
from tercet.engine.interface import Adapter, EngineDescription, ModelLimits
from tercet.engine.liveness_probe import LivenessProbe
from tercet.engine.verbs import EdgeVerbs
from tercet.protocol import (
    AdapterReport,
    BadRequest,
    EngineLoad,
    EngineStatus,
    EngineUnreachable,
    KVLayout,
    MultiModalFeature,
    TercetError,
)
from tercet.protocol.access import secrets_of
from tercet.protocol.addresses import RankRegion, minor_version
from tercet.protocol.content import require_placed
from tercet.protocol.names import STORE, bracketed
from tercet.protocol.wire import JoinCall
from tercet.store.announcer import Announcer
from tercet.store.blocks import StoreBlocks, StoreCollector
from tercet.store.disk import DiskFolder
from tercet.transport import (
    AgentProcess,
    AgentSetup,
    AsyncControlClient,
    BlockOrder,
    BlockShape,
    KVRegion,
    ReadCounters,
    TransportSettings,
    create_file,
    shape_of,
)
from tercet.wire.callers import Callers
from tercet.wire.client import HttpEngine
from tercet.wire.client.bounded_answers import LEAVE_SECONDS, RouterMembership
from tercet.wire.exported_spans import exporting_spans
from tercet.wire.serving.http_server import served
from tercet.wire.serving.verb_routes import ROUTES, VerbServer, starlette_routes
from tercet.wire.streams import RouterConnections

logger = logging.getLogger(__name__)
MIRROR_SECONDS, RETRY_SECONDS = 600.0, 1.0
LEASE_TTL = 60.0
ANY_TOKEN = 2**31
ASKS_FOR_A_KEY = "this store requires its fleet's secret (TERCET_SECRET): Authorization: Bearer KEY"
LEAST_BLOCKS = 8


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a store runs: ``memory`` and ``disk_size`` in bytes, ``mirrors`` are URLs of engines, the first counts."""

    name: str
    host: str
    port: int
    mirrors: Sequence[str]
    memory: int
    disk: Path | None = None
    disk_size: int = 0
    transport: str = "auto"
    kv_ports: tuple[int, ...] = ()  # for KV, any if empty
    kv_events_port: int = 0  # 0: any
    secret: str = ""
    join: str = ""  # URL of a router


# ---- the mirrored engine ---------------------------------------------------------------------------------------------


async def mirrored(config: StoreConfig) -> EngineStatus:
    """Return the status of the first engine that answers; raise ``EngineUnreachable`` if none does in time."""
    deadline, failure = asyncio.get_running_loop().time() + MIRROR_SECONDS, ""
    while True:
        for url in config.mirrors:
            try:
                async with HttpEngine(url, url, secret=config.secret) as engine:
                    return await engine.status()
            except EngineUnreachable as error:
                if not failure:
                    logger.warning("waiting for the engine to mirror: %s", error.message)
                failure = error.message
        if asyncio.get_running_loop().time() > deadline:
            raise EngineUnreachable(f"mirror: no engine has answered within {MIRROR_SECONDS:g} s: {failure}", "mirror")
        await asyncio.sleep(RETRY_SECONDS)


def layout_of(status: EngineStatus) -> KVLayout:
    """Return the layout of an engine's KV; raise :class:`~tercet.protocol.BadRequest` if a store does not keep it."""
    layout = status.layout
    if layout is None or not status.regions:
        raise BadRequest(
            f"mirror: {status.engine} does not report the layout of its KV; give an engine of this version of Tercet "
            "that runs on vLLM",
            "mirror",
        )
    # A window or a state is valid at one position only: such blocks do not make up other prefixes.
    kinds = sorted({group.kind for group in layout.groups})
    if kinds:
        raise BadRequest(
            f"mirror: the model of {status.engine} has layers of other kinds ({', '.join(kinds)}); a store keeps KV of "
            "full attention only",
            "mirror",
        )
    return layout


def kind_of(status: EngineStatus) -> str:
    """Return the name of the folder for KV that this engine can use: of its weights, layout and versions."""
    # Patch releases keep the layout and meaning of KV; a minor release of either may change it.
    versions = minor_version(status.version), minor_version(status.vllm_version)
    said = msgspec.json.encode([status.fingerprint, versions, status.layout, status.regions])
    return f"tercet-{blake2b(said, digest_size=8).hexdigest()}"


def regions_for(status: EngineStatus, memory: int) -> list[KVRegion]:
    """Return a region for each rank, of as many blocks as ``memory`` bytes hold.

    Raises :class:`~tercet.protocol.BadRequest` if these are too few.
    """
    block_bytes = layout_of(status).block_bytes
    of_a_block = sum(sum(rank.planes) for rank in status.regions) * block_bytes
    # The same number for each rank, since one slot number stands for a block on all ranks.
    blocks = memory // of_a_block
    if blocks < LEAST_BLOCKS:
        raise BadRequest(
            f"memory: {memory} bytes hold {blocks} blocks of {of_a_block} bytes; give at least {LEAST_BLOCKS} of them",
            "memory",
        )
    return [_region(rank, blocks, block_bytes) for rank in status.regions]


def _region(rank: RankRegion, blocks: int, block_bytes: int) -> KVRegion:
    shape = shape_of([blocks * block_bytes] * sum(rank.planes), blocks, block_bytes)
    order = None if rank.order is None else BlockOrder(*rank.order)
    shape = msgspec.structs.replace(shape, groups=rank.planes, order=order)
    return KVRegion(create_file(shape), shape)


# ---- what a store refuses --------------------------------------------------------------------------------------------


class AnyPrompt(ModelLimits):
    """The limits of prompts: a store does not know the vocabulary, counts no images, and adds no output to them."""

    def check_output(self, tokens: list[int], output: list[int]) -> NoReturn:
        raise BadRequest("start_generate: a store computes nothing; call an engine", "seq_id")

    def check_features(self, tokens: list[int], features: Sequence[MultiModalFeature], adapter: str | None) -> None:
        require_placed(features, len(tokens))


class NoGeneration:
    """The half of an engine that a store lacks: a :class:`~tercet.engine.interface.GenerationHalf` that refuses."""

    def __init__(self, status: EngineStatus) -> None:
        self.limits = AnyPrompt(ANY_TOKEN, status.max_model_len)
        self.version, self.model, self.model_dtype = status.vllm_version, status.model, status.model_dtype

    def encode(self, text: str) -> NoReturn:
        raise BadRequest("prompt: is text, and a store has no tokenizer; give token ids", "prompt")

    def request(self, *_: object, **__: object) -> NoReturn:
        raise BadRequest("cached_only: must be true here, as a store computes nothing", "cached_only")


class NamedAdapters:
    """Adapters are what callers say: a store knows them by the digest of their contents."""

    most = 0

    def count_users(self, names: Callable[[], list[str]]) -> None:
        """Do nothing: no adapter is unloaded here."""

    async def find(self, name: str | None, digest: str = "") -> Adapter | None:
        if name is not None and not digest:
            raise BadRequest("adapter_digest: is missing; a store knows adapters by their contents", "adapter_digest")
        return None if name is None else Adapter(name, 0, "", digest)

    async def reports(self) -> tuple[AdapterReport, ...]:
        return ()


# ---- HTTP ------------------------------------------------------------------------------------------------------------


class StoreServer:
    """The routes of a store with this ``edge``."""

    def __init__(self, edge: Edge, blocks: StoreBlocks, secret: str) -> None:
        self.edge = edge
        self._callers = Callers(secrets_of(secret))
        self.blocks = blocks
        self.stopping = False
        self._verbs = EdgeVerbs(edge)
        self.router_connections = RouterConnections(edge.name, edge.incarnation, self._load, self._verbs.stream)

    def app(self) -> Starlette:
        app = Starlette(
            routes=[*starlette_routes(ROUTES), Route("/health", self.health), Route("/metrics", self.metrics)]
        )
        app.state.tercet_verbs = VerbServer(
            self._verbs, self.router_connections, self._callers, ASKS_FOR_A_KEY, taker="this store"
        )
        return app

    async def health(self, _: Request) -> Response:
        return Response()

    async def metrics(self, _: Request) -> Response:
        return Response(generate_latest(REGISTRY), headers={"content-type": CONTENT_TYPE_LATEST})

    def _load(self) -> EngineLoad:
        stalled = self.edge.probe.stalled_s
        return EngineLoad(
            waiting=0, running=0, kv_usage=self.blocks.usage, stalled_s=stalled, stopping=self.stopping
        )  # fmt: skip


# ---- the process -----------------------------------------------------------------------------------------------------


def started_agents(config: StoreConfig, status: EngineStatus, regions: Sequence[KVRegion]) -> list[AgentProcess]:
    """Start an agent for each region; the calling thread must live as long as they."""
    layout = layout_of(status)
    settings = TransportSettings(
        transport=config.transport, hosts=(config.host,), ports=config.kv_ports, secret=config.secret
    )
    agents = list[AgentProcess]()
    try:
        for rank, region in enumerate(regions):
            setup = AgentSetup(
                rank, region.fd, region.shape, layout.exchange_key, settings, (), BlockShape.of(layout)
            )  # fmt: skip
            agents.append(AgentProcess(setup))
    except BaseException:
        for agent in agents:
            agent.close()
        raise
    return agents


@asynccontextmanager
async def serving(
    config: StoreConfig, mirror: EngineStatus, regions: Sequence[KVRegion], agents: Sequence[AgentProcess]
) -> AsyncGenerator[StoreServer]:
    """Serve the store while the context is open. Raises ``OSError`` if the address is in use."""
    layout = layout_of(mirror)
    async with AsyncExitStack() as stack:
        folder = None
        if config.disk is not None:
            of_a_block = sum(region.num_layers for region in regions) * layout.block_bytes
            folder = DiskFolder(config.disk, kind_of(mirror), of_a_block)
        blocks = StoreBlocks(regions, layout.block_size, folder, config.disk_size)
        # The order of the stack is that of closing, from the end: first routers and callers, then probes and agents'
        # channels, then the announcer, and the blocks last, since all others refer to them.
        stack.push_async_callback(blocks.close)
        # Before the agents are asked for anything: a reservation must know which blocks the disk has.
        await asyncio.to_thread(blocks.scan)
        announcer = Announcer(config.host, layout.block_size, blocks.held_by_tier, config.kv_events_port)
        stack.push_async_callback(announcer.close)
        blocks.on_stored, blocks.on_removed = announcer.stored, announcer.removed
        blocks.start()
        announcer.start()
        # A secret for each agent: its control socket is open to all processes of this machine.
        channels = [AsyncControlClient(agent.ready.control, agent.ready.secret) for agent in agents]
        for channel in channels:
            stack.callback(channel.close)
        probe = LivenessProbe(blocks.status, [partial(each.call, ReadCounters()) for each in channels], [])
        stack.push_async_callback(probe.close)
        await probe.start()
        description = EngineDescription(
            transports=[list(agent.ready.addresses) for agent in agents],
            agents=[(agent.ready.control, agent.ready.secret) for agent in agents],
            workers=[],
            layout=layout,
            token="",
            lease_ttl=LEASE_TTL,
            reserve_wait=LEASE_TTL,
            kv_events={**announcer.addresses, "topic": ""},
            regions=list(mirror.regions),
            is_store=True,
        )
        edge = Edge(
            config.name, description, blocks, NoGeneration(mirror), AgentCalls(channels), NamedAdapters(), probe,
            config.secret, mirror.text,
        )  # fmt: skip
        stack.push_async_callback(edge.tasks.close)
        server = StoreServer(edge, blocks, config.secret)
        stack.callback(server.router_connections.close)
        await stack.enter_async_context(served(server.app(), (config.host, config.port)))
        yield server


@asynccontextmanager
async def joined(config: StoreConfig) -> AsyncGenerator[None]:
    """Be a member of the fleet of the router at ``join``, if there is one, while entered."""
    if not config.join:
        yield
        return
    call = JoinCall(url=f"http://{bracketed(config.host)}:{config.port}", uid=uuid.uuid4().hex, role=STORE)
    async with RouterMembership(config.join, config.name, config.secret) as membership:
        staying = TaskSet()
        staying.keep(partial(membership.stay, call, partial(logger.info, "%s: %s", config.name)), "join of the store")
        try:
            yield
        finally:
            await staying.close()
            try:
                async with asyncio.timeout(LEAVE_SECONDS):
                    await membership.leave(call.uid)
            except (TercetError, TimeoutError) as error:
                logger.warning("%s: stops without leaving the fleet: %s", config.name, str(error) or "no answer")


def serve(config: StoreConfig) -> None:
    """Serve a store until SIGINT or SIGTERM. Raises :class:`~tercet.protocol.TercetError` if it cannot start."""
    import uvloop

    with exporting_spans("tercet-store", {"service.instance.id": config.name}):
        uvloop.run(_serve(config))


async def _serve(config: StoreConfig) -> None:
    stopped = asyncio.Event()
    with signals_to(stopped.set, stopped.set):
        finding = asyncio.ensure_future(mirrored(config))
        stopping = asyncio.ensure_future(stopped.wait())
        await asyncio.wait({finding, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not finding.done():
            finding.cancel()
            return
        mirror = finding.result()
        regions = regions_for(mirror, config.memory)
        agents = started_agents(config, mirror, regions)  # in this thread, which lives as long as they
        try:
            async with descriptors_watched(), serving(config, mirror, regions, agents) as server:
                for collector in (ProbeCollector(server.edge.probe), StoreCollector(server.blocks)):
                    REGISTRY.register(collector)
                logger.info(
                    "%s keeps KV of %s: %d blocks in memory", config.name, mirror.model, server.blocks.pool.slots
                )
                async with joined(config):
                    await stopped.wait()
                    server.stopping = True
                    server.router_connections.tell_now()
        finally:
            for agent in agents:
                agent.close()
