"""One run for any kind of fleet: questions without faults, load with faults, and a check of leftover resources."""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from typing import Any, Protocol, cast

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from tercet.aio.tasks import TaskSet
from tercet.protocol import Engine, NoSpace, Request, TercetError
from tercet.router.serve.moves import MoveRecord
from tercet.wire.client import HttpEngine
from tercet_checks.chaos.adversary import Adversary, PlannedTrick
from tercet_checks.chaos.chaos_report import (
    ON_PROCESSES,
    ChaosResult,
    ClientRecord,
    FaultSchedule,
    InjectedFault,
    Leftover,
    Piece,
    PlannedFault,
    ProcessKind,
)

LOAD_VOCABULARY = 30_000


# Number of prefixes that questions share, like system prompts.
SHARED_PREFIXES = 4


class AnswerBrokenOff(TercetError):
    """The error of an answer that ended too early, without a reason."""

    code = "answer_broken_off"


class Question(msgspec.Struct, frozen=True):
    """A prompt as token ids, with the number of requested tokens."""

    number: int
    prompt: tuple[int, ...]
    max_tokens: int


class LoadShape(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of the load: ``rate`` in requests per second, ``questions`` different questions, lengths in tokens.

    ``leaving`` is the share of clients that leave before the end of their answers.
    """

    rate: float
    questions: int
    shortest_prompt: int
    longest_prompt: int
    shortest_answer: int
    longest_answer: int
    leaving: float = 0.1
    programs: tuple[str, ...] = ("disaggregated",)
    vocabulary: int = LOAD_VOCABULARY


class Arrival(msgspec.Struct, frozen=True):
    """One request, at a time in seconds. Its client leaves after ``leaves_after`` events (None: it does not leave)."""

    at: float
    name: str
    question: Question
    program: str
    leaves_after: int | None


def questions_of(shape: LoadShape, seed: int) -> list[Question]:
    """Return the questions of clients. Half of the prompts share prefixes with others."""
    chance = random.Random(f"{seed} questions")
    length = shape.shortest_prompt // 2
    prefixes = [_tokens(chance, shape, length) for _ in range(SHARED_PREFIXES)]
    found: list[Question] = []
    for number in range(shape.questions):
        prefix = chance.choice(prefixes) if number % 2 else ()
        size = chance.randint(shape.shortest_prompt, shape.longest_prompt)
        prompt = prefix + _tokens(chance, shape, size - len(prefix))
        found.append(Question(number, prompt, chance.randint(shape.shortest_answer, shape.longest_answer)))
    return found


def _tokens(chance: random.Random, shape: LoadShape, count: int) -> tuple[int, ...]:
    return tuple(chance.randrange(shape.vocabulary) for _ in range(count))


def arrivals(shape: LoadShape, questions: Sequence[Question], seed: int, seconds: float) -> Iterator[Arrival]:
    """Yield requests in the order of their times, which are those of a Poisson process."""
    chance, now, number = random.Random(f"{seed} arrivals"), 0.0, 0
    while (now := now + chance.expovariate(shape.rate)) < seconds:
        question, program = chance.choice(questions), chance.choice(shape.programs)
        leaves = chance.randint(1, question.max_tokens) if chance.random() < shape.leaving else None
        yield Arrival(now, f"r{number}", question, program, leaves)
        number += 1


Ask = Callable[[Arrival], AsyncIterator[Sequence[Piece]]]
"""A function that sends a request. It yields the pieces of each event, and raises ``TercetError`` for a failure."""


class ClientLoad:
    """The clients of a run, with their records. ``clock`` is in seconds from the beginning of the run."""

    def __init__(self, ask: Ask, clock: Callable[[], float], on_error: Callable[[str], object]) -> None:
        self.records: list[ClientRecord] = []
        self._ask = ask
        self._clock = clock
        self._on_error = on_error
        self._tasks = TaskSet()

    @property
    def under_way(self) -> int:
        """Number of requests that have not ended."""
        return len(self._tasks)

    async def run(self, wanted: Iterator[Arrival], sleep_until: Callable[[float], Awaitable[object]]) -> None:
        """Send every request at its time. Return when the last one is sent."""
        for arrival in wanted:
            await sleep_until(arrival.at)
            self._tasks.spawn(self._client(arrival))

    async def settle(self, seconds: float) -> None:
        """Wait for every answer, for at most ``seconds``. The records of unfinished answers stay ``pending``."""
        if not await self._tasks.wait(seconds):
            await self._tasks.close(seconds)

    async def ask_all(self, questions: Sequence[Question], program: str) -> dict[int, tuple[Piece, ...]]:
        """Send every question once, one after the other, and return the answers by question.

        Raise the first :class:`~tercet.protocol.TercetError`.
        """
        found: dict[int, tuple[Piece, ...]] = {}
        for question in questions:
            arrival = Arrival(0.0, f"calm-{question.number}", question, program, None)
            record = ClientRecord(name=arrival.name, question=question.number, began=0.0)
            async with aclosing(cast("Any", self._ask(arrival))) as events:
                async for pieces in events:
                    record.received.append((0.0, tuple(pieces)))
            found[question.number] = record.answer
        return found

    async def _client(self, arrival: Arrival) -> None:
        record = ClientRecord(
            name=arrival.name, question=arrival.question.number, began=self._clock(), program=arrival.program
        )
        self.records.append(record)
        try:
            async with aclosing(cast("Any", self._ask(arrival))) as events:
                async for pieces in events:
                    record.received.append((self._clock(), tuple(pieces)))
                    if len(record.received) == arrival.leaves_after:
                        break
            record.outcome = "answered" if len(record.received) != arrival.leaves_after else "left"
        except TercetError as error:
            record.outcome, record.error, record.message = "failed", error.code, error.message
        except asyncio.CancelledError:
            raise  # the run no longer waits for it: the record stays pending
        except Exception as error:
            record.outcome, record.error, record.message = "failed", "unhandled", repr(error)
            self._on_error(f"a client of {record.name} got {error!r}")
        record.ended = self._clock()


Holdings = Counter[tuple[str, str]]
"""Numbers of all resources that must be released, by holder and kind."""
Note = Callable[[str], object]
PROGRESS_SECONDS = 15.0
RETRY_DELAY_S = 0.2
MEMORY_SECONDS = 0.5
RETRIES = "tercet_retries_total"
# If a schedule has more faults, only their number is logged.
MOST_LOGGED = 200
MOST_RESERVATIONS = 1000


class BreakableEngine(Protocol):
    """The place of one engine in a fleet. ``is_up`` is True while the engine itself runs there, and no impostor."""

    name: str
    url: str
    is_up: bool

    def has(self, process: ProcessKind) -> bool:
        """True if the engine has processes of this kind."""
        ...

    async def start(self, is_impostor: bool = False) -> None:
        """Start the engine, or an engine with another model in its place. Return when it answers."""

    async def terminate(self) -> Sequence[str]:
        """Send SIGTERM and wait for the end. Return the processes that did not end and were killed."""
        ...

    async def kill(self, process: ProcessKind = "engine") -> Sequence[str]:
        """Send SIGKILL. Return the processes that should have ended too, and still run."""
        ...

    def freeze(self, process: ProcessKind) -> None:
        """Send SIGSTOP."""

    def thaw(self) -> None:
        """Send SIGCONT to stopped processes."""

    def cut_off(self, is_cut: bool) -> None:
        """Drop all packets between the engine and the router, or pass them again."""

    def step_clock(self, seconds: float) -> None:
        """Set the engine's wall clock ``seconds`` ahead of the machine's."""


class Arena(ABC):
    """A fleet with its clients and faults.

    ``now`` is a clock in seconds; times of the run count from the begin of its load. ``leftover_seconds`` is the time
    limit for the release of resources. ``adversary`` plays ``tricks``.
    """

    leftover_seconds: float

    def __init__(
        self,
        engines: Mapping[str, BreakableEngine],
        schedule: FaultSchedule,
        load: LoadShape,
        now: Callable[[], float],
        note: Note,
        adversary: Adversary,
        tricks: Sequence[PlannedTrick],
    ) -> None:
        self.complaints: list[str] = []
        self._adversary = adversary
        self._tricks = tricks
        self._most_memory = 0
        self._engines = engines
        self._schedule = schedule
        self._load = load
        self._now = now
        self._note = note
        self._zero = now()
        self._outcomes: list[InjectedFault] = []
        self._left: list[Leftover] = []
        self._moves: dict[int, MoveRecord] = {}
        self._clients = ClientLoad(self._ask, self._clock, lambda complaint: self.complaints.append(complaint))

    @abstractmethod
    def _ask(self, arrival: Arrival) -> AsyncIterator[Sequence[Any]]:
        """See :data:`tercet_checks.chaos.chaos_report.Ask`."""

    @abstractmethod
    async def _generated_by(self, engine: str) -> tuple[str, ...]:
        """Return the names of the requests that the engine generates now."""

    @abstractmethod
    async def _holdings(self) -> Holdings:
        """Return the resources in use now."""

    @abstractmethod
    async def _at_rest(self) -> Holdings:
        """Return the resources in use before the load, after the first questions have ended."""

    @abstractmethod
    async def _move(self, name: str, destination: str) -> None:
        """Let the router move the sequence of this name. Ignore failures."""

    @abstractmethod
    async def _moves_since(self, number: int) -> Sequence[MoveRecord]:
        """Return the router's moves after move ``number``, also those in progress."""

    @abstractmethod
    async def _drain(self, engine: str, draining: bool) -> None:
        """Let the router drain an engine, or use it again."""

    @abstractmethod
    async def _program(self) -> str:
        """Return the program in use and its version, which no client may change."""

    @abstractmethod
    async def _retries(self) -> int:
        """Return the number of retries of sequences."""

    @abstractmethod
    async def _look_at_memory(self) -> None:
        """Record the router's memory, and add a complaint if it is too much."""

    async def _play_tricks(self) -> None:
        """Play the hostile client's tricks. Return when the last one has begun."""
        await self._adversary.run(self._tricks, self._sleep_until)

    def _slow_disk(self) -> AbstractAsyncContextManager[None]:
        """Make the disk slow while the context is open."""
        raise ValueError("a simulated fleet has no disk; leave out the fault slow_disk")

    async def play(self, patience: float) -> ChaosResult:
        """Run, and return the result. ``patience`` is the longest time, in seconds, that a client may wait."""
        began, schedule, clients = time.perf_counter(), self._schedule, self._clients
        questions = questions_of(self._load, schedule.seed)
        calm = await clients.ask_all(questions, "data_parallel")
        before = await self._at_rest()
        self._note(f"{len(questions)} questions answered without faults; {len(schedule.faults)} faults follow")
        self._zero, program, retries = self._now(), await self._program(), await self._retries()
        meanwhile = [
            asyncio.create_task(each) for each in (self._log_progress(), self._note_moves(), self._watch_memory())
        ]
        coming = arrivals(self._load, questions, schedule.seed, schedule.seconds)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._play_tricks())
            group.create_task(clients.run(coming, self._sleep_until))
            for fault in schedule.faults:
                await self._sleep_until(fault.at)
                group.create_task(self._inject(fault))
        # All faults have ended. A client that still waits may take as long as the longest timeout.
        self._note(f"all faults have ended; {clients.under_way} requests still running")
        await clients.settle(patience + self.leftover_seconds)
        await self._adversary.settle()
        for task in meanwhile:
            task.cancel()
        left = await self._settled(before) - before
        await self._take_moves()
        if (now := await self._program()) != program:
            self.complaints.append(f"the program in use changed from {program} to {now}, and no client may change it")
        return ChaosResult(
            seed=schedule.seed,
            seconds=schedule.seconds,
            wall_seconds=time.perf_counter() - began,
            faults=self._outcomes,
            records=clients.records,
            calm=calm,
            left=[*self._left, *(Leftover(who, what, count) for (who, what), count in sorted(left.items()))],
            patience=patience,
            complaints=self.complaints,
            moves=list(self._moves.values()),
            tricks=self._adversary.played,
            retries=await self._retries() - retries,
            memory=self._most_memory,
        )

    async def _settled(self, before: Holdings) -> Holdings:
        """Return the resources in use when they are no more than ``before``, or at the time limit."""
        found = await self._holdings()
        for _ in range(int(self.leftover_seconds)):
            if not found - before:
                break
            await asyncio.sleep(1.0)
            found = await self._holdings()
        return found

    def _clock(self) -> float:
        return self._now() - self._zero

    async def _sleep_until(self, when: float) -> None:
        await asyncio.sleep(max(0.0, when - self._clock()))

    async def _note_moves(self) -> None:
        """Record moves at intervals, since the router drops the oldest ones."""
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            await self._take_moves()

    async def _watch_memory(self) -> None:
        while True:
            await self._look_at_memory()
            await asyncio.sleep(MEMORY_SECONDS)

    async def _take_moves(self) -> None:
        under_way = [number for number, move in self._moves.items() if move.outcome == "under_way"]
        since = min(under_way) - 1 if under_way else max(self._moves, default=0)
        self._moves.update({move.number: move for move in await self._moves_since(since)})

    async def _log_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            known, clients = sum(fault.began is not None for fault in self._outcomes), self._clients
            self._note(
                f"{self._clock():.0f} s: {known} faults, {len(clients.records)} requests, {clients.under_way} running"
            )

    # ---- faults ----------------------------------------------------------------------------------------------

    async def _inject(self, fault: PlannedFault) -> None:
        engine, why = self._engines[fault.engine], ""
        if not engine.is_up or not any(other.is_up for other in self._engines.values() if other is not engine):
            why = "an engine was still starting"
        elif fault.kind in ON_PROCESSES and not engine.has(fault.process):
            why = f"the engine has no process of kind {fault.process}"
        if why:
            self._outcomes.append(InjectedFault(planned=fault, why=why))
            return
        began, hit = self._clock(), await self._generated_by(fault.engine)
        if len(self._schedule.faults) <= MOST_LOGGED:
            self._note(f"{fault}; {len(hit)} requests hit")
        try:
            why = await self._happen(fault, engine)
        except TercetError as error:
            why = error.message
            self.complaints.append(f"after {fault}: {why}")
        self._outcomes.append(InjectedFault(planned=fault, began=began, ended=self._clock(), why=why, hit=hit))

    async def _happen(self, fault: PlannedFault, engine: BreakableEngine) -> str:
        """Inject the fault. Return a note when it has ended."""
        match fault.kind:
            case "kill":
                await self._kill(engine, fault, fault.process)
                await asyncio.sleep(fault.seconds)
                await engine.start()
            case "stop":
                engine.freeze(fault.process)
                await asyncio.sleep(fault.seconds)
                engine.thaw()
            case "hang":
                engine.freeze(fault.process)
                await asyncio.sleep(fault.seconds)
                await self._kill(engine, fault)
                await engine.start()
            case "cut":
                engine.cut_off(True)
                await asyncio.sleep(fault.seconds)
                engine.cut_off(False)
            case "impostor":
                await self._kill(engine, fault)
                await engine.start(is_impostor=True)
                await asyncio.sleep(fault.seconds)
                await self._kill(engine, fault)
                await engine.start()
            case "full_kv":
                return f"{await self._fill(engine, fault.seconds)} reservations"
            case "drain":
                await self._drain(engine.name, True)
                await asyncio.sleep(fault.seconds)
                await self._drain(engine.name, False)
            case "restart":
                self._note_left(engine, fault, await engine.terminate())
                await engine.start()
            case "move":
                chance, until = random.Random(fault.at), self._clock() + fault.seconds
                others = [name for name in self._engines if name != engine.name]
                while self._clock() < until:
                    for name in await self._generated_by(engine.name):
                        await self._move(name, chance.choice(others))
                    await asyncio.sleep(RETRY_DELAY_S)
            case "slow_disk":
                async with self._slow_disk():
                    await asyncio.sleep(fault.seconds)
            case "clock":
                engine.step_clock(fault.step)
                await asyncio.sleep(fault.seconds)
                engine.step_clock(0.0)
        return ""

    async def _kill(self, engine: BreakableEngine, fault: PlannedFault, process: ProcessKind = "engine") -> None:
        """Kill an engine's processes. An engine that loses one must end, so that its supervisor restarts the engine."""
        self._note_left(engine, fault, await engine.kill(process))

    def _note_left(self, engine: BreakableEngine, fault: PlannedFault, lives_on: Sequence[str]) -> None:
        for what in lives_on:
            self._left.append(Leftover(engine.name, f"{what} still runs after {fault.kind} {fault.process}", 1))

    async def _fill(self, engine: BreakableEngine, seconds: float) -> int:
        async with HttpEngine(engine.name, engine.url) as stranger:
            return await fill_cache(stranger, seconds, self._schedule.seed)


def retries_in(metrics: str) -> int:
    """Return the number of retries of sequences, from a router's metrics page."""
    families = text_string_to_metric_families(metrics)
    return round(sum(each.value for family in families for each in family.samples if each.name == RETRIES))


async def fill_cache(engine: Engine, seconds: float, seed: int) -> int:
    """Reserve all blocks that the engine lends, for ``seconds``. Return the number of reservations.

    Return earlier if the engine fails.
    """
    chance, held = random.Random(seed), 0
    async with AsyncExitStack() as stack:
        try:
            status = await engine.status()
            length = min(status.total_blocks // 8 * status.block_size, status.max_model_len - 1)
            while held < MOST_RESERVATIONS and length >= status.block_size:
                prompt = tuple(chance.randrange(LOAD_VOCABULARY) for _ in range(length))
                request = Request(seq_id=f"stranger-{chance.getrandbits(64):x}", prompt=prompt)
                try:
                    await stack.enter_async_context(engine.prep_recv(request))
                    held += 1
                except NoSpace:
                    length //= 2
        except TercetError:
            return held
        await asyncio.sleep(seconds)
    return held
