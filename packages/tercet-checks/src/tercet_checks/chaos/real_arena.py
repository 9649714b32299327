"""The arena of real processes on this machine: vLLM engines or simulated ones, behind a real router.

Its clients read streams of the router's OpenAI API as pieces of text.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import msgspec
import psutil
from yarl import URL

from tercet.cluster.up_config import UpConfig
from tercet.protocol import EngineUnreachable, SequenceReport, from_wire
from tercet.protocol.headers import PROGRAM_HEADER
from tercet.protocol.sse import AnswerFailed, object_of, read_answer
from tercet.protocol.wire import UNREADABLE
from tercet.router.serve.moves import MoveRecord
from tercet.wire.client import HttpEngine
from tercet_checks.chaos.adversary import Adversary, PlannedTrick, Sizes
from tercet_checks.chaos.arena import AnswerBrokenOff, Arena, Arrival, Holdings, LoadShape, Note, retries_in
from tercet_checks.chaos.chaos_report import KINDS, ORPHANS, ChaosResult, FaultSchedule, FleetShape, Leftover
from tercet_checks.chaos.real_fleet import RealFleet, alive, can_be_built, running_fleet, slow_disk


class OpenAIClients:
    """The clients of the router at ``url``. Time limits of answers are checked later, in the records."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._model = model

    async def ask(self, arrival: Arrival) -> AsyncIterator[Sequence[str]]:
        """Send a request and yield the text of each event. Raise :class:`~tercet.protocol.TercetError` if it fails."""
        question = arrival.question
        body = {
            "model": self._model, "prompt": list(question.prompt), "max_tokens": question.max_tokens, "stream": True,
            "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        headers = {PROGRAM_HEADER: arrival.program, "x-request-id": arrival.name}
        try:
            async with self._session.post(self._url, json=body, headers=headers) as response:
                if response.status != 200:
                    raise from_wire(response.status, _decoded(await response.read()))
                whole = False
                async for data in read_answer(response.content.iter_any()):
                    event: dict[str, Any] = msgspec.json.decode(data)
                    for choice in event["choices"]:
                        reason = choice["finish_reason"]
                        whole = whole or reason is not None
                        if choice["text"]:
                            yield (choice["text"],)
                        if reason in ("abort", "error"):
                            raise AnswerBrokenOff(f"the answer ended with {reason}")
                if not whole:
                    raise AnswerBrokenOff("the answer ended without a finish reason")
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnreachable(f"the connection to the router failed: {error!r}") from error
        except AnswerFailed as error:
            said = object_of(error.event)
            raise from_wire(500, said) if "error" in said else AnswerBrokenOff(error.message) from error
        except UNREADABLE as error:
            raise AnswerBrokenOff(f"the answer does not match the API: {error}") from error


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except UNREADABLE:
        return {"error": {"message": body[:200].decode(errors="replace")}}


# Allowed growth of the number at the start: idle connections, logs, and files that libraries open at first use.
SPARE_DESCRIPTORS = 32
# Servers close connections that were idle for 5 s, which may be the moment of the next request.
IDLE_SECONDS = 2.0
NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
NAME = re.compile(r"(?:^|-)((?:r|calm-)\d+)(?:-|$)")
# Resources that exist also without running work.
DESCRIPTORS = "file descriptors"
LASTING = re.compile(rf".*processes|{DESCRIPTORS}.*")

# Eight of these bodies are more than the router keeps at the same time.
HOSTILE_SIZES = Sizes(items=40_000, body=48 * 2**20, bodies=8)
MOST_MEMORY = 512 * 2**20
"""Largest allowed growth of the router, in bytes. All bodies together have 256 MiB; long ones are parsed repeatedly."""

REAL_LOAD = LoadShape(
    rate=0.6, questions=8, shortest_prompt=40, longest_prompt=300, shortest_answer=16, longest_answer=100,
    programs=("disaggregated", "data_parallel"),
)  # fmt: skip


def real_shape(config: UpConfig) -> FleetShape:
    """Return the possible faults of a fleet on this machine. A wrong clock needs a C compiler."""
    return FleetShape(
        engines=tuple(name for name, _ in config.engine_roles),
        kinds=KINDS if can_be_built() else tuple(kind for kind in KINDS if kind != "clock"),
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
    note: Note = lambda _: None,
    tricks: Sequence[PlannedTrick] = (),
) -> ChaosResult:
    """Run once on a fleet that ``config`` describes, with the checkpoint at ``model``. Return the result.

    ``patience`` is in seconds. Raise :class:`~tercet.cluster.child_process.StartFailed` if the fleet does not start.
    """

    async def run(log_dir: Path) -> ChaosResult:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
        async with (
            running_fleet(config, model, log_dir, note) as fleet,
            aiohttp.ClientSession(timeout=NO_TIMEOUT, connector=connector) as session,
        ):
            arena = RealArena(fleet, session, schedule, load, config.public_name, note, tricks)
            result = await arena.play(patience)
        seen = {pid for engine in fleet.engines.values() for pid in engine.seen}
        still = [Leftover("this machine", f"process {pid}", 1) for pid in alive(sorted(seen))]
        return msgspec.structs.replace(result, left=[*result.left, *still])

    with TemporaryDirectory(prefix="tercet-chaos-") as temporary:
        log_dir = Path(config.log_dir).expanduser() if config.log_dir else Path(temporary)
        log_dir.mkdir(parents=True, exist_ok=True)
        return asyncio.run(run(log_dir))


class RealArena(Arena):
    """An arena of processes that receive signals, proxies that can be cut, and clients of the router's OpenAI API."""

    leftover_seconds = 90.0

    def __init__(
        self,
        fleet: RealFleet,
        session: aiohttp.ClientSession,
        schedule: FaultSchedule,
        load: LoadShape,
        model: str,
        note: Note,
        tricks: Sequence[PlannedTrick],
    ) -> None:
        self._fleet = fleet
        self._memory = _memory(fleet.router.pid)
        self._session = session
        self._ids: dict[str, str] = {}
        self._openai = OpenAIClients(session, fleet.url, model)
        router = URL(fleet.url)
        adversary = Adversary(router.host or "", router.port or 0, model, schedule.seed, HOSTILE_SIZES, self._clock)
        super().__init__(fleet.engines, schedule, load, time.monotonic, note, adversary, tricks)

    def _ask(self, arrival: Arrival) -> AsyncIterator[Sequence[str]]:
        return self._openai.ask(arrival)

    def _slow_disk(self) -> AbstractAsyncContextManager[None]:
        return slow_disk(self._fleet.log_dir)

    async def _generated_by(self, engine: str) -> tuple[str, ...]:
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with asyncio.timeout(5.0):
                found = await self._ask_router(f"sequences?engine={engine}")
                named = {sequence["seq_id"]: NAME.search(sequence["seq_id"]) for sequence in found}
                self._ids.update({each[1]: seq_id for seq_id, each in named.items() if each is not None})
                return tuple(each[1] for each in named.values() if each is not None)
        return ()

    async def _move(self, name: str, destination: str) -> None:
        url = f"{self._fleet.url}/tercet/v1/sequences/{self._ids[name]}/move"
        with suppress(aiohttp.ClientError, OSError):
            async with self._session.post(url, json={"destination": destination}) as response:
                await response.read()

    async def _moves_since(self, number: int) -> Sequence[MoveRecord]:
        return msgspec.convert(await self._ask_router(f"moves?since={number}"), list[MoveRecord])

    async def _drain(self, engine: str, draining: bool) -> None:
        method = "POST" if draining else "DELETE"
        async with self._session.request(method, f"{self._fleet.url}/tercet/v1/engines/{engine}/drain") as response:
            if response.status != 200:
                self.complaints.append(f"{method} of the drain of {engine} was answered with {response.status}")

    async def _program(self) -> str:
        found = await self._ask_router("program")
        return f"{found['program']}, version {found['version']}"

    async def _retries(self) -> int:
        async with self._session.get(f"{self._fleet.url}/metrics") as response:
            return retries_in(await response.text())

    async def _look_at_memory(self) -> None:
        grown = await asyncio.to_thread(_memory, self._fleet.router.pid) - self._memory
        self._most_memory = max(self._most_memory, grown)
        if grown > MOST_MEMORY and not any("memory" in complaint for complaint in self.complaints):
            self.complaints.append(f"the router's memory grew by {grown // 2**20} MiB")

    async def _ask_router(self, what: str) -> Any:
        async with self._session.get(f"{self._fleet.url}/tercet/v1/{what}") as response:
            return msgspec.json.decode(await response.read())

    # ---- resources in use ------------------------------------------------------------------------------------

    async def _at_rest(self) -> Holdings:
        lasting = Holdings({key: 2**31 for key in await self._holdings() if LASTING.fullmatch(key[1])})
        found = await self._settled(lasting)
        for key in found:
            if key[1].startswith(DESCRIPTORS):
                found[key] += SPARE_DESCRIPTORS
        return found

    async def _holdings(self) -> Holdings:
        found = Holdings()
        sequences: list[dict[str, Any]] = await self._ask_router("sequences")
        owned = tuple(each["seq_id"] for each in sequences)
        for name, engine in self._fleet.engines.items():
            async with HttpEngine(name, engine.url) as client:
                try:
                    status = await client.status()
                    found[name, ORPHANS] = sum(not is_owned(each, owned) for each in await client.sequences())
                except EngineUnreachable as error:
                    found[name, f"does not answer ({error.message})"] = 1
                    continue
            found[name, "blocks in use"] = status.total_blocks - status.free_blocks
            for what in ("running", "waiting", "leases", "sends"):
                found[name, what] = getattr(status, what)
            for kind, pids in engine.processes().items():
                found[name, f"{kind} processes"] = len(pids)
                if kind != "engine":
                    found[name, f"{DESCRIPTORS} ({kind})"] = _descriptors(pids)
        for member in await self._ask_router("engines"):
            found["router", f"in flight on {member['name']}"] = member["in_flight"]
            found["router", f"{member['name']} is not picked again"] = int(not member["reachable"])
        found["router", "sequences"] = len(sequences)
        if self._fleet.router.pid is not None:
            children = psutil.Process(self._fleet.router.pid).children(recursive=True)
            found["router", "processes"] = len(children)
            found["router", DESCRIPTORS] = _descriptors([child.pid for child in children])
        return found


def is_owned(report: SequenceReport, owned: Sequence[str]) -> bool:
    """True if the sequence has one of the ``owned`` ids, or an id that a retry or a move made from one of them."""
    return any(report.seq_id == seq_id or report.seq_id.startswith(f"{seq_id}.") for seq_id in owned)


def _memory(pid: int | None) -> int:
    """Return the resident memory of the router's processes, in bytes."""
    total = 0
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            total += child.memory_info().rss
    return total


def _descriptors(pids: Sequence[int]) -> int:
    """Return the number of open file descriptors of processes."""
    total = 0
    for pid in pids:
        with suppress(psutil.Error):
            total += psutil.Process(pid).num_fds()
    return total
