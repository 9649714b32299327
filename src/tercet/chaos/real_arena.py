"""Real processes on this machine under faults: vLLM engines or simulated ones, behind a real front door."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import msgspec
import psutil

from tercet.chaos.chaos_report import ChaosResult, InjectedFault
from tercet.chaos.client_load import ClientLoad, LoadShape, arrivals, questions_of
from tercet.chaos.engine_processes import alive, send_signal
from tercet.chaos.fault_schedule import FaultKind, FaultSchedule, FleetShape, PlannedFault
from tercet.chaos.full_cache import fill_cache
from tercet.chaos.invariants import Leftover
from tercet.chaos.openai_clients import OpenAIClients
from tercet.chaos.real_fleet import RealEngine, RealFleet, running_fleet, slow_disk
from tercet.chaos.wrong_clock import can_be_built
from tercet.client import HttpEngine
from tercet.cluster.child_process import StartFailed
from tercet.cluster.up_config import UpConfig
from tercet.protocol import EngineUnreachable, TercetError

LEFTOVER_SECONDS = 90.0
# Connections that are kept for later use, logs, and what libraries open when they are used for the first time.
SPARE_DESCRIPTORS = 32
NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
FROZEN: tuple[FaultKind, ...] = ("stop", "hang")
NAME = re.compile(r"(?:^|-)((?:r|calm-)\d+)(?:-|$)")

REAL_LOAD = LoadShape(
    rate=0.6, questions=8, shortest_prompt=40, longest_prompt=300, shortest_answer=16, longest_answer=100,
    programs=("disaggregated", "data_parallel"),
)  # fmt: skip


def real_shape(config: UpConfig) -> FleetShape:
    """What can happen to a fleet of this machine: a wrong clock where there is a C compiler."""
    kinds: tuple[FaultKind, ...] = ("kill", "stop", "hang", "cut", "impostor", "full_kv", "slow_disk")
    return FleetShape(
        engines=tuple(name for name, _ in config.roles),
        kinds=(*kinds, "clock") if can_be_built() else kinds,
        processes=("engine", "api", "core", "worker", "agent") if config.simulate is None else ("engine",),
        shortest=1.0,
        longest=20.0,
        hang_seconds=60.0,
        recovery=5.0,
    )


def run_real(
    config: UpConfig,
    model: str,
    schedule: FaultSchedule,
    load: LoadShape,
    patience: float,
    note: Callable[[str], object] = lambda _: None,
) -> ChaosResult:
    """One run on a fleet that ``config`` describes, with the checkpoint at ``model``; ``patience`` is in seconds.

    Raises :class:`~tercet.cluster.child_process.StartFailed` if the fleet does not start.
    """
    with TemporaryDirectory(prefix="tercet-chaos-") as temporary:
        log_dir = Path(config.log_dir).expanduser() if config.log_dir else Path(temporary)
        log_dir.mkdir(parents=True, exist_ok=True)
        return asyncio.run(_run(config, model, log_dir, schedule, load, patience, note))


async def _run(
    config: UpConfig,
    model: str,
    log_dir: Path,
    schedule: FaultSchedule,
    load: LoadShape,
    patience: float,
    note: Callable[[str], object],
) -> ChaosResult:
    began = time.monotonic()
    async with (
        running_fleet(config, model, log_dir, note) as fleet,
        aiohttp.ClientSession(timeout=NO_TIMEOUT, connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        arena = _RealArena(fleet, session, schedule, load, config.public_name, note)
        result = await arena.run(patience)
    still = [Leftover("this machine", f"process {pid}", 1) for pid in alive(sorted(arena.seen))]
    wall = time.monotonic() - began
    return msgspec.structs.replace(result, wall_seconds=wall, left=[*result.left, *still])


class _RealArena:
    def __init__(
        self,
        fleet: RealFleet,
        session: aiohttp.ClientSession,
        schedule: FaultSchedule,
        load: LoadShape,
        model: str,
        note: Callable[[str], object],
    ) -> None:
        self._fleet = fleet
        self._session = session
        self._schedule = schedule
        self._load = load
        self._note = note
        self._zero = time.monotonic()
        self._complaints: list[str] = []
        self._outcomes: list[InjectedFault] = []
        self._left: list[Leftover] = []
        self._clients = ClientLoad(
            OpenAIClients(session, fleet.url, model).ask, self._clock, self._complaints.append
        )  # fmt: skip
        self.seen: set[int] = set()

    def _clock(self) -> float:
        return time.monotonic() - self._zero

    async def _sleep_until(self, when: float) -> None:
        await asyncio.sleep(max(0.0, when - self._clock()))

    async def run(self, patience: float) -> ChaosResult:
        """The calm questions, then load and faults, then what is left."""
        schedule, clients = self._schedule, self._clients
        questions = questions_of(self._load, schedule.seed)
        calm = await clients.ask_all(questions, "data_parallel")
        before = await self._settled(Counter())
        self._note(f"{len(questions)} questions answered; {len(schedule.faults)} faults follow")
        self._zero = time.monotonic()
        faults = asyncio.create_task(self._inject_all())
        wanted = arrivals(self._load, questions, schedule.seed, schedule.seconds)
        await clients.run(wanted, self._sleep_until)
        await faults
        self._note(f"all is well again; {clients.under_way} requests under way")
        await clients.settle(patience + LEFTOVER_SECONDS)
        left = await self._settled(before) - before
        return ChaosResult(
            seed=schedule.seed,
            seconds=schedule.seconds,
            wall_seconds=0.0,
            faults=self._outcomes,
            records=clients.records,
            calm=calm,
            left=[*self._left, *(Leftover(who, what, count) for (who, what), count in sorted(left.items()))],
            patience=patience,
            complaints=self._complaints,
        )

    # ---- faults ----------------------------------------------------------------------------------------------

    async def _inject_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for fault in self._schedule.faults:
                await self._sleep_until(fault.at)
                group.create_task(self._inject(fault))

    async def _inject(self, fault: PlannedFault) -> None:
        engine = self._fleet.engines[fault.engine]
        others_up = sum(other.is_up for other in self._fleet.engines.values() if other is not engine)
        if not engine.is_up or not others_up:
            why = "an engine was starting, which takes longer here than a schedule can know"
            self._outcomes.append(InjectedFault(planned=fault, why=why))
            return
        pids = engine.processes()
        self.seen.update(pids.get("engine", ()))
        if fault.kind in ("kill", *FROZEN) and not pids.get(fault.process):
            self._outcomes.append(InjectedFault(planned=fault, why=f"it has no process of the kind {fault.process}"))
            return
        began, hit = self._clock(), await self._generated_by(fault.engine)
        self._note(f"{began:.1f} s: {fault.kind} {fault.engine} {fault.process}, {fault.seconds:.1f} s, {len(hit)} hit")
        why = ""
        try:
            await self._happen(fault, engine, pids)
        except (StartFailed, TercetError) as error:
            why = error.message
            self._complaints.append(f"after {fault}: {error.message}")
        self._outcomes.append(InjectedFault(planned=fault, began=began, ended=self._clock(), why=why, hit=hit))

    async def _happen(self, fault: PlannedFault, engine: RealEngine, pids: Mapping[Any, Sequence[int]]) -> None:
        """Returns when all is well again."""
        match fault.kind:
            case "kill":
                await self._kill(engine, pids[fault.process], pids["engine"], fault)
                await asyncio.sleep(fault.seconds)
                await engine.start(self._note)
            case "stop":
                send_signal(pids[fault.process], signal.SIGSTOP)
                await asyncio.sleep(fault.seconds)
                send_signal(pids[fault.process], signal.SIGCONT)
            case "hang":
                send_signal(pids[fault.process], signal.SIGSTOP)
                await asyncio.sleep(fault.seconds)
                await self._kill(engine, pids["engine"], pids["engine"], fault)
                await engine.start(self._note)
            case "cut":
                for proxy in engine.proxies:
                    proxy.cut()
                await asyncio.sleep(fault.seconds)
                for proxy in engine.proxies:
                    proxy.heal()
            case "impostor":
                await self._kill(engine, pids["engine"], pids["engine"], fault)
                await engine.start(self._note, engine.impostor())
                await asyncio.sleep(fault.seconds)
                await engine.stop()
                await engine.start(self._note)
            case "full_kv":
                async with HttpEngine(engine.name, engine.url) as stranger:
                    await fill_cache(stranger, fault.seconds, self._schedule.seed)
            case "slow_disk":
                async with slow_disk(self._fleet.log_dir):
                    await asyncio.sleep(fault.seconds)
            case "clock":
                if engine.clock is not None:
                    engine.clock.step(fault.step)
                    await asyncio.sleep(fault.seconds)
                    engine.clock.step(0.0)

    async def _kill(
        self, engine: RealEngine, killed: Sequence[int], all_of_it: Sequence[int], fault: PlannedFault
    ) -> None:
        """An engine that loses a part of itself must end, so that whoever supervises it starts it anew."""
        engine.is_up = False
        send_signal(killed, signal.SIGKILL)
        for pid in await engine.ended(all_of_it):
            self._left.append(Leftover(engine.name, f"process {pid} lives on after {fault.kind} {fault.process}", 1))
        await engine.stop()

    async def _generated_by(self, engine: str) -> tuple[str, ...]:
        """The names of the requests that the engine generates now, if the front door says so."""
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with asyncio.timeout(5.0):
                found = await self._ask_front_door(f"sequences?engine={engine}")
                named = [NAME.search(sequence["seq_id"]) for sequence in found]
                return tuple(each[1] for each in named if each is not None)
        return ()

    async def _ask_front_door(self, what: str) -> Any:
        async with self._session.get(f"{self._fleet.url}/tercet/v1/{what}") as response:
            return msgspec.json.decode(await response.read())

    # ---- what is left ----------------------------------------------------------------------------------------

    async def _settled(self, before: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
        """What there is, as soon as it is no more than before, or when time is over."""
        until = time.monotonic() + LEFTOVER_SECONDS
        while (found := await self._holdings()) - before and time.monotonic() < until:
            if not before and not any(count for (_, what), count in found.items() if what not in LASTING):
                break
            await asyncio.sleep(1.0)
        return found

    async def _holdings(self) -> Counter[tuple[str, str]]:
        """How much there is of all that must be given back, by holder and kind."""
        found: Counter[tuple[str, str]] = Counter()
        for name, engine in self._fleet.engines.items():
            async with HttpEngine(name, engine.url) as client:
                try:
                    status = await client.status()
                except EngineUnreachable as error:
                    found[name, f"does not answer ({error.message})"] = 1
                    continue
            found[name, "blocks in use"] = status.total_blocks - status.free_blocks
            for what in ("running", "waiting", "leases", "sends"):
                found[name, what] = getattr(status, what)
            for kind, pids in engine.processes().items():
                self.seen.update(pids)
                found[name, f"{kind} processes"] = len(pids)
                if kind != "engine":
                    found[name, f"file descriptors ({kind})"] = _descriptors(pids)
        for member in await self._ask_front_door("engines"):
            found["front door", f"in flight on {member['name']}"] = member["in_flight"]
            found["front door", f"{member['name']} is not picked again"] = int(not member["reachable"])
        found["front door", "sequences"] = len(await self._ask_front_door("sequences"))
        if self._fleet.router.pid is not None:
            children = psutil.Process(self._fleet.router.pid).children(recursive=True)
            found["front door", "processes"] = len(children)
            found["front door", "file descriptors"] = _descriptors([child.pid for child in children])
        return found


# These are no sign that something is still under way.
LASTING = {
    *(f"{kind} processes" for kind in ("engine", "api", "core", "worker", "agent")),
    *(f"file descriptors ({kind})" for kind in ("api", "core", "worker", "agent")),
    "processes",
    "file descriptors",
}


def _descriptors(pids: Sequence[int]) -> int:
    """Open files of processes, in steps of as many as may come and go."""
    total = 0
    for pid in pids:
        with suppress(psutil.Error):
            total += psutil.Process(pid).num_fds()
    return total // SPARE_DESCRIPTORS
