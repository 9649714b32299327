"""The arena in virtual time: the router's service and the engines' servers are real; sockets and engines are not.

Engines are simulated. One engine is one process here, with a server (``api``) and a core that can be frozen separately,
killed and restarted. The router's HTTP port is uvicorn's protocol with the router's limits; behind it are the layers
that every request passes, and the small OpenAI API. The fleet has no disk and does not read the wall clock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any
from zlib import crc32

import aiohttp.connector
import msgspec
import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from uvicorn.server import ServerState

from tercet.aio.tasks import TaskSet
from tercet.fleet import EngineFleet, Trace
from tercet.fleet.admission import Gate
from tercet.fleet.membership import Membership, connecting
from tercet.protocol import Request, Role, TercetError
from tercet.protocol.headers import PROGRAM_HEADER
from tercet.router.observe.metrics import Metrics
from tercet.router.observe.request_traces import RequestTraces
from tercet.router.request_bodies import LARGEST_AT_ONCE
from tercet.router.router_app import RouterApp
from tercet.router.serve.moves import MoveRecord, Rescheduler
from tercet.router.serve.service import Service, entering
from tercet.settings import EngineAddress, RouterSettings
from tercet.wire.client import StreamListener
from tercet.wire.serving.client_connection import BoundedProtocol
from tercet_checks.chaos.adversary import Adversary, PlannedTrick, Sizes
from tercet_checks.chaos.arena import (
    LOAD_VOCABULARY,
    AnswerBrokenOff,
    Arena,
    Arrival,
    BreakableEngine,
    Holdings,
    LoadShape,
    Note,
    retries_in,
)
from tercet_checks.chaos.chaos_report import ORPHANS, ChaosResult, FaultSchedule, FleetShape, ProcessKind
from tercet_checks.chaos.virtual_network import NetworkedLoop, VirtualProcess
from tercet_gateway.gateway_settings import ModelBackend, ModelRouterConfig
from tercet_gateway.model_router import model_router
from tercet_lab.prompt_texts import ChatMessage, PromptTexts
from tercet_lab.sim import EngineOptions, SimEngine, load_profile
from tercet_lab.sim.block_pool import VOCABULARY, Prompt
from tercet_lab.sim.sim_server import ServerConfig, serving
from tercet_lab.small_openai import small_app

# Virtual seconds for the clean-up code of killed processes. (Real killed processes do not run any.)
ENDS_WITHIN = 60.0


class OtherPrompt(Prompt):
    """A prompt with the answer of another model."""

    __slots__ = ()

    def output(self, begin: int, end: int) -> tuple[int, ...]:
        """Do as :meth:`tercet_lab.sim.block_pool.Prompt.output`; every token differs."""
        return tuple((token + 1) % VOCABULARY for token in super().output(begin, end))


class SimulatedEngine:
    """A simulated engine as :class:`~tercet_checks.chaos.arena.BreakableEngine`.

    ``process`` and ``engine`` are those of the last start. One engine is one process, whose core can be frozen
    separately.
    """

    process: VirtualProcess
    engine: SimEngine

    def __init__(self, loop: NetworkedLoop, config: ServerConfig) -> None:
        self.name, self.url = config.name, config.url
        self.is_up = False
        self._loop = loop
        self._config = config
        self._serving = TaskSet()

    def has(self, process: ProcessKind) -> bool:
        return process in ("engine", "api", "core")

    async def start(self, is_impostor: bool = False) -> None:
        config = self._config
        if is_impostor:
            model = msgspec.structs.replace(config.profile.model, name="another-model")
            profile = msgspec.structs.replace(config.profile, model=model)
            config = msgspec.structs.replace(config, profile=profile, model=model.name)
        self.process, self._killed = VirtualProcess(self._loop, config.host), asyncio.Event()
        started: asyncio.Future[SimEngine] = self._loop.create_future()
        with self.process.enter():
            serving = self._serving.spawn(self._serve(config, started, self._killed))
        await asyncio.wait([serving, started], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        self.engine, self.is_up = started.result(), not is_impostor
        if is_impostor:
            self.engine.network.prompt = OtherPrompt

    async def _serve(self, config: ServerConfig, started: asyncio.Future[SimEngine], killed: asyncio.Event) -> None:
        async with serving(config) as engine:
            started.set_result(engine)
            await killed.wait()

    async def terminate(self) -> Sequence[str]:
        return await self.kill()

    async def kill(self, process: ProcessKind = "engine") -> Sequence[str]:
        self.is_up = False
        self.process.kill()
        self.engine.fail()
        self._killed.set()
        return ()

    def freeze(self, process: ProcessKind) -> None:
        if process in ("engine", "api"):
            self.process.freeze()
        if process in ("engine", "core"):
            self.engine.freeze()

    def thaw(self) -> None:
        self.engine.thaw()
        self.process.freeze(False)

    def cut_off(self, is_cut: bool) -> None:
        self.process.cut_off(is_cut)

    def step_clock(self, seconds: float) -> None:
        raise ValueError("a simulated fleet does not read the wall clock; leave out the fault clock")

    async def ended(self) -> None:
        """Return when the clean-up code of killed processes has ended. Other processes saw their end long before."""
        await self._serving.wait(ENDS_WITHIN)


MAX_MODEL_LEN = 4096


class WordTexts(PromptTexts):
    """A tokenizer with one token for each word, which needs no file."""

    def __init__(self) -> None:
        """Do nothing: there is no file to read."""

    def encode(self, text: str) -> list[int]:
        return [crc32(word.encode()) % LOAD_VOCABULARY for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(f"{token} " for token in tokens)

    def chat(self, messages: Sequence[ChatMessage]) -> str:
        return " ".join(str(each.to_template()["content"]) for each in messages)


@asynccontextmanager
async def http_port(
    loop: NetworkedLoop, service: Service, host: str, port: int, model: str, most_bytes: int,
    traces: RequestTraces,
) -> AsyncGenerator[RouterApp]:  # fmt: skip
    """Serve HTTP in the current virtual process while the context is open. Bodies have at most ``most_bytes`` bytes."""
    limits = RouterSettings().limits
    gate = Gate(limits, service.fleet, service.metrics, clock=loop.time)
    app = small_app(service, WordTexts(), [model], MAX_MODEL_LEN)
    router = RouterApp(app.build_middleware_stack(), None, gate, (), service.program_called, most_bytes, traces=traces)
    app.middleware_stack = router
    config = uvicorn.Config(app, http=BoundedProtocol, log_config=None, access_log=False, lifespan="off")
    config.load()
    made = partial(BoundedProtocol, config=config, server_state=ServerState(), app_state={})
    server = await loop.create_server(made, host, port)
    try:
        yield router
    finally:
        server.close()


ROUTER, STRANGER, HOSTILE, MODELS = "127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"
PORT = 8000
# Maximum of a body at the router's HTTP port: small, so that a run reaches the limit of all bodies together.
MOST_BYTES = 2**20
# A trace of a request with one sequence, whatever its client called it; and the retries of one that meets faults.
MOST_BYTES_OF_TRACE = 16 * 1024
HOSTILE_SIZES = Sizes(items=20_000, body=900 * 1024)
PROFILE = "llama-3.1-8b-h100-tp1"
MODEL = "simulated"
START_SECONDS = 10.0
REST_SECONDS = 12
# Number of idle HTTP connections that a client may keep for later; one of them is used every few seconds.
POOLED = 8
MODEL_ROUTER = ModelRouterConfig(
    routers=(ModelBackend(f"http://{ROUTER}:{PORT}"),), host=MODELS, port=PORT, max_request_bytes=MOST_BYTES
)
PROGRAMS = ("disaggregated", "balanced", "data_parallel")


class SimulatedFleet(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a simulated fleet: numbers of engines by role, behind a router with default settings.

    ``blocks`` is the size of each KV cache, in blocks; it is small enough to be full at times.
    """

    prefill: int = 40
    decode: int = 60
    blocks: int = 1500

    @property
    def roles(self) -> dict[str, Role]:
        counts: list[tuple[Role, int]] = [("prefill", self.prefill), ("decode", self.decode)]
        return {f"{role}-{index}": role for role, count in counts for index in range(count)}

    def shape(self) -> FleetShape:
        return FleetShape(
            engines=tuple(self.roles),
            kinds=("kill", "stop", "hang", "cut", "impostor", "full_kv", "drain", "restart", "move"),
            processes=("engine", "api", "core"),
            shortest=0.02,
            longest=8.0,
            hang_seconds=150.0,
        )


SIMULATED_LOAD = LoadShape(
    rate=20.0, questions=64, shortest_prompt=40, longest_prompt=1200, shortest_answer=8, longest_answer=160,
    programs=PROGRAMS,
)  # fmt: skip


def run_simulated(
    fleet: SimulatedFleet,
    schedule: FaultSchedule,
    load: LoadShape,
    patience: float,
    note: Note = lambda _: None,
    tricks: Sequence[PlannedTrick] = (),
) -> ChaosResult:
    """Run once and return the result, which depends only on the arguments. All times are in virtual seconds."""
    loop = NetworkedLoop()
    with _virtual_clocks(loop):
        arena = SimulatedArena(loop, fleet, schedule, load, note, tricks)
        failures = _FailureLog(arena.complaints)
        logging.getLogger().addHandler(failures)
        try:
            return loop.run_until_complete(arena.run(patience))
        finally:
            _end_all(loop)
            logging.getLogger().removeHandler(failures)


def _end_all(loop: NetworkedLoop) -> None:
    """Cancel all tasks of a run that failed, and close the loop."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=SimulatedArena.leftover_seconds))
    loop.close()


@contextmanager
def _virtual_clocks(loop: NetworkedLoop) -> Generator[None]:
    """Replace the system's monotonic clock, which nearly all code uses, by virtual time while the context is open."""
    real: Any = time.monotonic
    connector: Any = aiohttp.connector
    time.monotonic = connector.monotonic = loop.time
    try:
        yield
    finally:
        time.monotonic = connector.monotonic = real


class _FailureLog(logging.Handler):
    """A log handler that collects the records with an exception, which are unexpected failures."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None:
            self._found.append(f"logged by {record.name}: {record.getMessage()}")


class SimulatedArena(Arena):
    """An arena of engines, a router and clients that are virtual processes of one event loop."""

    leftover_seconds = 120.0

    def __init__(
        self,
        loop: NetworkedLoop,
        fleet: SimulatedFleet,
        schedule: FaultSchedule,
        load: LoadShape,
        note: Note,
        tricks: Sequence[PlannedTrick],
    ) -> None:
        self._loop = loop
        self._roles = fleet.roles
        self._places = dict[str, SimulatedEngine]()
        profile, options = load_profile(PROFILE), EngineOptions(stream_every=1, total_blocks=fleet.blocks)
        for number, name in enumerate(fleet.roles):
            address = f"127.1.{number // 250}.{number % 250 + 1}"
            self._places[name] = SimulatedEngine(loop, ServerConfig(
                name=name, profile=profile, options=options, host=address, port=PORT, url=f"http://{address}:{PORT}",
                model=profile.model.name,
            ))  # fmt: skip
        adversary = Adversary(ROUTER, PORT, MODEL, schedule.seed, HOSTILE_SIZES, self._clock, [(MODELS, PORT)])
        super().__init__(self._places, schedule, load, loop.time, note, adversary, tricks)
        loop.complaints = self.complaints
        self._router = VirtualProcess(loop, ROUTER)
        self._stranger = VirtualProcess(loop, STRANGER)
        self._hostile = VirtualProcess(loop, HOSTILE)
        self._models = VirtualProcess(loop, MODELS)
        self._traces = RequestTraces()
        self._registry = CollectorRegistry()  # another run can register its metrics, too
        metrics, given = Metrics(self._registry), RouterSettings()
        self._fleet = EngineFleet((), clock=loop.time, stuck_after_s=given.stuck_after_s, seed=schedule.seed)
        self._service = Service(
            self._fleet, given.program, {}, metrics, retries=given.retries, wait_for_engine=given.wait_for_engine_s
        )

    async def run(self, patience: float) -> ChaosResult:
        with self._router.enter():
            return await self._run(patience)

    async def _run(self, patience: float) -> ChaosResult:
        for engine in self._places.values():
            await engine.start()
        async with StreamListener() as listener, Membership(self._fleet, connecting(self._fleet, listener)) as members:
            for name, role in self._roles.items():
                await members.enter(EngineAddress(name, self._places[name].url, role))
            members.served_model = await members.until_ready(START_SECONDS)
            service, policies = self._service, RouterSettings().reschedule
            rescheduler = Rescheduler(self._fleet, service.sequences, service.moves, policies)
            looking = [asyncio.create_task(members.watch()), asyncio.create_task(rescheduler.run())]
            try:
                async with http_port(
                    self._loop, self._service, ROUTER, PORT, MODEL, MOST_BYTES, self._traces
                ) as self._door:
                    with self._models.enter():
                        serving = model_router(MODEL_ROUTER)
                        self._model_router = await serving.__aenter__()
                    try:
                        result = await self.play(patience)
                    finally:
                        with self._models.enter():
                            await serving.__aexit__(None, None, None)
            finally:
                for task in looking:
                    task.cancel()
                await asyncio.wait(looking)
        for engine in self._places.values():
            if engine.is_up:
                await engine.kill()
        for engine in self._places.values():
            await engine.ended()
        return result

    async def _ask(self, arrival: Arrival) -> AsyncIterator[Sequence[int]]:
        question = arrival.question
        request = Request(
            seq_id=arrival.name,
            prompt=question.prompt,
            sampling_params={"max_tokens": question.max_tokens, "temperature": 0},
            headers={PROGRAM_HEADER: arrival.program},
        )
        async for output in self._service.run(entering(request), Trace()):
            if output.token_ids:
                yield output.token_ids
            if output.broken_off:
                raise AnswerBrokenOff(f"the answer ended with {output.finish_reason}")

    async def _generated_by(self, engine: str) -> tuple[str, ...]:
        return tuple(sequence.request.seq_id for sequence in self._service.sequences.on(engine))

    async def _move(self, name: str, destination: str) -> None:
        with suppress(TercetError):
            await self._service.moves.move(self._service.sequences.named(name), destination, "chaos")

    async def _moves_since(self, number: int) -> Sequence[MoveRecord]:
        return list(self._service.moves.since(number))

    async def _drain(self, engine: str, draining: bool) -> None:
        self._fleet.drain(engine, draining)

    async def _fill(self, engine: BreakableEngine, seconds: float) -> int:
        with self._stranger.enter():
            return await super()._fill(engine, seconds)

    async def _play_tricks(self) -> None:
        with self._hostile.enter():
            await super()._play_tricks()

    async def _program(self) -> str:
        current = self._service.routing.current
        return f"{current.plan.program}, version {current.number}"

    async def _retries(self) -> int:
        return retries_in(generate_latest(self._registry).decode())

    async def _look_at_memory(self) -> None:
        self._most_memory = max(self._most_memory, self._door.bytes_kept)
        if self._door.bytes_kept > LARGEST_AT_ONCE * MOST_BYTES:
            self.complaints.append(f"the router keeps {self._door.bytes_kept} bytes of bodies, more than its limit")
        if self._model_router.bytes_kept > LARGEST_AT_ONCE * MOST_BYTES:
            kept = self._model_router.bytes_kept
            self.complaints.append(f"the model router keeps {kept} bytes of bodies, more than its limit")
        traces, size = self._traces.kept
        if size > traces * MOST_BYTES_OF_TRACE:
            self.complaints.append(f"the router keeps {size} bytes of {traces} traces")

    async def _at_rest(self) -> Holdings:
        await asyncio.sleep(self.leftover_seconds)  # idle connections are closed by then
        # Each engine is polled every few seconds, by a connection that stays open for a part of that time: the number
        # of connections depends on the moment.
        most = Holdings()
        for _ in range(REST_SECONDS):
            most |= await self._holdings()
            await asyncio.sleep(1.0)
        return most

    async def _holdings(self) -> Holdings:
        found = Holdings()
        owned = {each.generation.request.seq_id for each in self._service.sequences if each.generation is not None}
        for name, place in self._places.items():
            found[name, "blocks in use"] = place.engine.pool.total - place.engine.pool.free
            found[name, "busy"] = int(place.engine.busy)
            found[name, ORPHANS] = sum(each.seq_id not in owned for each in place.engine.reports())
        for member in self._fleet.members:
            found["router", f"in flight on {member.name}"] = member.in_flight
            found["router", f"prompt tokens in flight on {member.name}"] = member.in_flight_tokens
            found["router", f"{member.name} is not picked again"] = int(not member.reachable)
        found["router", "sequences"] = len(self._service.sequences)
        found["router", "bytes of bodies"] = self._door.bytes_kept
        found["model router", "bytes of bodies"] = self._model_router.bytes_kept
        found["router", "connections of clients"] = sum(
            isinstance(each.get_protocol(), BoundedProtocol) for each in self._router.transports
        )
        everywhere = self._router, self._stranger, self._hostile, self._models
        for process in (*everywhere, *(place.process for place in self._places.values())):
            found[process.address, "connections"] = len(process.transports) // POOLED
            for each in process.transports:
                if each.half_open:
                    found[process.address, f"half-open connections of {type(each.get_protocol()).__name__}"] += 1
        for task in asyncio.all_tasks():
            coroutine: Any = task.get_coro()
            found["event loop", f"tasks of {coroutine.__qualname__}"] += 1
        return found
