"""A fleet in virtual time: the service, its clients of engines and their servers are real, the sockets virtual.

What is not there is vLLM: engines are simulated, and clients talk to the front door's service and not to its HTTP port.
One engine is one process here, with a server (``api``) and a core that can be frozen apart; nothing has a disk or reads
the wall clock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp.connector
import msgspec
from prometheus_client import REGISTRY

from tercet.chaos.chaos_report import ChaosResult, InjectedFault
from tercet.chaos.client_load import AnswerBrokenOff, Arrival, ClientLoad, LoadShape, arrivals, questions_of
from tercet.chaos.fault_schedule import FaultSchedule, FleetShape, PlannedFault
from tercet.chaos.full_cache import fill_cache
from tercet.chaos.invariants import Leftover
from tercet.chaos.simulated_server import SimulatedServer
from tercet.chaos.virtual_network import NetworkedLoop, VirtualProcess
from tercet.client import HttpEngine
from tercet.fleet import EngineFleet, Trace
from tercet.fleet.membership import Membership, connecting
from tercet.protocol import Request, Role
from tercet.router.metrics import Metrics
from tercet.router.service import PROGRAM_HEADER, Service
from tercet.settings import EngineAddress, RetryBudget
from tercet.sim import EngineOptions, load_profile
from tercet.sim.sim_server import ServerConfig
from tercet.streams import StreamListener

FRONT_DOOR, STRANGER = "127.0.0.1", "127.0.0.2"
PORT = 8000
START_SECONDS = 10.0
LEFTOVER_SECONDS = 120.0
# Idle HTTP connections that a client keeps for later are none too many; it takes one of them every few seconds.
POOLED = 8
PROGRAMS = ("disaggregated", "balanced", "data_parallel")


class SimulatedFleet(msgspec.Struct, frozen=True, kw_only=True):
    """Engines by role. ``blocks`` is the size of each one's KV cache, small enough that it is full at times."""

    prefill: int = 40
    decode: int = 60
    both: int = 0
    profile: str = "llama-3.1-8b-h100-tp1"
    blocks: int = 1500
    retries: RetryBudget = RetryBudget()

    @property
    def roles(self) -> dict[str, Role]:
        """The role of each engine by its name."""
        counts: list[tuple[Role, int]] = [("prefill", self.prefill), ("decode", self.decode), ("both", self.both)]
        return {f"{role}-{index}": role for role, count in counts for index in range(count)}

    def shape(self) -> FleetShape:
        """What can happen to it."""
        return FleetShape(
            engines=tuple(self.roles),
            kinds=("kill", "stop", "hang", "cut", "impostor", "full_kv"),
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
    note: Callable[[str], object] = lambda _: None,
) -> ChaosResult:
    """One run, which follows from its arguments; ``patience`` and all times are virtual seconds."""
    loop = NetworkedLoop()
    began = time.monotonic()
    with _virtual_clocks(loop), _own_metrics() as metrics, _logged_failures() as failures:
        arena = _Arena(loop, fleet, schedule, load, metrics, note)
        try:
            result = loop.run_until_complete(arena.run(patience))
        finally:
            _end_all(loop)
    wall = time.monotonic() - began
    return msgspec.structs.replace(result, wall_seconds=wall, complaints=(*loop.complaints, *failures))


def _end_all(loop: NetworkedLoop) -> None:
    """Nothing of a run that failed goes on."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=LEFTOVER_SECONDS))
    loop.close()


@contextmanager
def _virtual_clocks(loop: NetworkedLoop) -> Generator[None]:
    """Code that measures time by the system's monotonic clock, as nearly all does, measures virtual time meanwhile."""
    real: Any = time.monotonic
    connector: Any = aiohttp.connector
    time.monotonic = connector.monotonic = loop.time
    try:
        yield
    finally:
        time.monotonic = connector.monotonic = real


@contextmanager
def _own_metrics() -> Generator[Metrics]:
    """The service's metrics; they leave the registry again, so that another run can have its own."""
    registered: dict[Any, Any] = REGISTRY._collector_to_names  # pyright: ignore[reportPrivateUsage]
    before = set(registered)
    metrics = Metrics()
    try:
        yield metrics
    finally:
        for collector in set(registered) - before:
            REGISTRY.unregister(collector)


class _FailureLog(logging.Handler):
    """Keeps what was logged with an exception: a failure that nobody expected."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None:
            self.found.append(f"logged by {record.name}: {record.getMessage()}")


@contextmanager
def _logged_failures() -> Generator[list[str]]:
    handler = _FailureLog()
    logging.getLogger().addHandler(handler)
    try:
        yield handler.found
    finally:
        logging.getLogger().removeHandler(handler)


class _Arena:
    def __init__(
        self,
        loop: NetworkedLoop,
        fleet: SimulatedFleet,
        schedule: FaultSchedule,
        load: LoadShape,
        metrics: Metrics,
        note: Callable[[str], object],
    ) -> None:
        self._loop = loop
        self._roles = fleet.roles
        self._schedule = schedule
        self._load = load
        self._note = note
        self._profile = load_profile(fleet.profile)
        self._options = EngineOptions(stream_every=1, total_blocks=fleet.blocks)
        self._front_door = VirtualProcess(loop, FRONT_DOOR)
        self._stranger = VirtualProcess(loop, STRANGER)
        self._servers: dict[str, SimulatedServer] = {}
        self._ending: list[SimulatedServer] = []
        self._fleet = EngineFleet((), clock=loop.time, seed=schedule.seed)
        self._service = Service(self._fleet, "disaggregated", {}, metrics, retries=fleet.retries)
        self._zero = 0.0
        self._outcomes: list[InjectedFault] = []

    # ---- engines ---------------------------------------------------------------------------------------------

    def _address(self, name: str) -> str:
        number = list(self._roles).index(name)
        return f"127.1.{number // 250}.{number % 250 + 1}"

    async def _start(self, name: str, is_impostor: bool = False) -> SimulatedServer:
        address, profile = self._address(name), self._profile
        if is_impostor:
            model = msgspec.structs.replace(profile.model, name="another-model")
            profile = msgspec.structs.replace(profile, model=model)
        config = ServerConfig(
            name=name, profile=profile, options=self._options, host=address, port=PORT, url=f"http://{address}:{PORT}",
            model=profile.model.name,
        )  # fmt: skip
        server = SimulatedServer(self._loop, config, is_impostor)
        await server.start()
        self._servers[name] = server
        return server

    def _kill(self, name: str) -> None:
        server = self._servers.pop(name)
        server.kill()
        self._ending.append(server)

    # ---- the run ---------------------------------------------------------------------------------------------

    async def run(self, patience: float) -> ChaosResult:
        """The calm questions, then load and faults, then what is left."""
        with self._front_door.enter():
            async with self._serving():
                return await self._run(patience)

    @asynccontextmanager
    async def _serving(self) -> AsyncGenerator[None]:
        for name in self._roles:
            await self._start(name)
        async with StreamListener() as listener, Membership(self._fleet, connecting(self._fleet, listener)) as members:
            for name, role in self._roles.items():
                await members.enter(EngineAddress(name, f"http://{self._address(name)}:{PORT}", role))
            members.promise = await members.until_ready(START_SECONDS)
            watching = asyncio.create_task(members.watch())
            try:
                yield
            finally:
                watching.cancel()
                await asyncio.wait([watching])
        for name in list(self._servers):
            self._kill(name)
        for server in self._ending:
            await server.ended()

    async def _run(self, patience: float) -> ChaosResult:
        clients = ClientLoad(self._ask, self._clock, self._loop.complaints.append)
        questions = questions_of(self._load, self._schedule.seed)
        calm = await clients.ask_all(questions, "data_parallel")
        await asyncio.sleep(LEFTOVER_SECONDS)  # connections that nobody uses are closed by then
        before = self._holdings()
        self._zero = self._loop.time()
        self._note(
            f"{len(self._roles)} engines, {len(questions)} questions; {len(self._schedule.faults)} faults follow"
        )
        wanted = arrivals(self._load, questions, self._schedule.seed, self._schedule.seconds)
        faults = asyncio.create_task(self._inject_all())
        progress = asyncio.create_task(self._tell_progress(clients))
        await clients.run(wanted, self._sleep_until)
        await faults
        # Nothing is wrong with any engine any more. Whoever still waits has all the time that any timeout takes.
        await clients.settle(patience + LEFTOVER_SECONDS)
        progress.cancel()
        left = await self._leftovers(before)
        return ChaosResult(
            seed=self._schedule.seed,
            seconds=self._schedule.seconds,
            wall_seconds=0.0,
            faults=self._outcomes,
            records=clients.records,
            calm=calm,
            left=left,
            patience=patience,
        )

    def _clock(self) -> float:
        return self._loop.time() - self._zero

    async def _sleep_until(self, when: float) -> None:
        await asyncio.sleep(max(0.0, when - self._clock()))

    async def _tell_progress(self, clients: ClientLoad) -> None:
        while True:
            await asyncio.sleep(15.0)
            known = sum(fault.began is not None for fault in self._outcomes)
            self._note(
                f"{self._clock():.0f} s: {known} faults, {len(clients.records)} requests, {clients.under_way} under way"
            )

    async def _ask(self, arrival: Arrival) -> AsyncIterator[Sequence[int]]:
        question = arrival.question
        request = Request(
            seq_id=arrival.name,
            prompt=question.prompt,
            sampling_params={"max_tokens": question.max_tokens, "temperature": 0},
            headers={PROGRAM_HEADER: arrival.program},
        )
        async for output in self._service.run(request, Trace()):
            if output.token_ids:
                yield output.token_ids
            if output.broken_off:
                raise AnswerBrokenOff(f"the answer ended with {output.finish_reason}")

    # ---- faults ----------------------------------------------------------------------------------------------

    async def _inject_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for fault in self._schedule.faults:
                await self._sleep_until(fault.at)
                group.create_task(self._inject(fault))

    async def _inject(self, fault: PlannedFault) -> None:
        if fault.engine not in self._servers:
            self._outcomes.append(InjectedFault(planned=fault, why="the engine was down"))
            return
        began = self._clock()
        hit = tuple(sequence.request.seq_id for sequence in self._service.sequences.on(fault.engine))
        why = await self._happen(fault)
        self._outcomes.append(InjectedFault(planned=fault, began=began, ended=self._clock(), why=why, hit=hit))

    async def _happen(self, fault: PlannedFault) -> str:
        """Returns when all is well again; says what there is to say."""
        name, server = fault.engine, self._servers[fault.engine]
        match fault.kind:
            case "kill":
                self._kill(name)
                await asyncio.sleep(fault.seconds)
                await self._start(name)
            case "stop":
                server.freeze(fault.process)
                await asyncio.sleep(fault.seconds)
                server.thaw()
            case "hang":
                server.freeze(fault.process)
                await asyncio.sleep(fault.seconds)
                self._kill(name)
                await self._start(name)
            case "cut":
                server.process.cut_off()
                await asyncio.sleep(fault.seconds)
                server.process.cut_off(False)
            case "impostor":
                self._kill(name)
                await self._start(name, is_impostor=True)
                await asyncio.sleep(fault.seconds)
                self._kill(name)
                await self._start(name)
            case "full_kv":
                return await self._fill(name, fault.seconds)
            case "slow_disk" | "clock":
                raise ValueError(f"{fault.kind} cannot happen in a simulated fleet")
        return ""

    async def _fill(self, name: str, seconds: float) -> str:
        with self._stranger.enter():
            async with HttpEngine(name, f"http://{self._address(name)}:{PORT}") as engine:
                return f"{await fill_cache(engine, seconds, self._schedule.seed)} reservations"

    # ---- what is left ----------------------------------------------------------------------------------------

    def _holdings(self) -> Counter[tuple[str, str]]:
        """How much there is of all that must be given back, by holder and kind."""
        found: Counter[tuple[str, str]] = Counter()
        for name, server in self._servers.items():
            engine = server.engine
            found[name, "blocks in use"] = engine.pool.total - engine.pool.free
            found[name, "busy"] = int(engine.busy)
        for member in self._fleet.members:
            found["front door", f"in flight on {member.name}"] = member.in_flight
            found["front door", f"prompt tokens in flight on {member.name}"] = member.in_flight_tokens
            found["front door", f"{member.name} is not picked again"] = int(not member.reachable)
        found["front door", "sequences"] = len(self._service.sequences)
        for process in (self._front_door, self._stranger, *(server.process for server in self._servers.values())):
            found[process.address, "connections"] = len(process.transports) // POOLED
            for each in process.transports:
                if each.half_open:
                    found[process.address, f"half-open connections of {type(each.get_protocol()).__name__}"] += 1
        for task in asyncio.all_tasks():
            coroutine: Any = task.get_coro()
            found["event loop", f"tasks of {coroutine.__qualname__}"] += 1
        return found

    async def _leftovers(self, before: Counter[tuple[str, str]]) -> list[Leftover]:
        """What there is more of than before the load, as soon as there is nothing, or when time is over."""
        for _ in range(int(LEFTOVER_SECONDS)):
            left = self._holdings() - before
            if not left:
                break
            await asyncio.sleep(1.0)
        else:
            left = self._holdings() - before
        return [Leftover(holder, what, count) for (holder, what), count in sorted(left.items())]
