"""One run: a program over a fleet under a workload, from the first arrival to the last token."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from tercet.decisions.scheduling import Scheduling
from tercet.fleet import EngineFleet, EngineObserver, Member, RunningSequence, Trace
from tercet.lab.bench.simulated.kv_imbalance import ImbalanceSamples, KVImbalance
from tercet.lab.bench.simulated.moving_fleet import MoveTotals, MovingFleet, MovingSettings, alongside
from tercet.lab.bench.simulated.planned import PlannedTraffic, PlannedWorkload
from tercet.lab.bench.simulated.scenario import Fault, FleetSpec, SyntheticWorkload, members_of, requests_of
from tercet.lab.bench.simulated.virtual_roles import VirtualFlip
from tercet.lab.bench.summary import Samples
from tercet.lab.sim import (
    EngineOptions,
    Host,
    Network,
    Profile,
    SimEngine,
    load_profile,
    options_from,
    run_virtual,
)
from tercet.programs import Program, name_of, run_program
from tercet.protocol import BadRequest, EngineError, LayoutMismatch, Output, Request, TercetError
from tercet.router.attempts import first_cause, is_fallback, one_engine
from tercet.router.recovery import Recovery
from tercet.settings import RetryBudget, RouterSettings

RETRIES = RetryBudget()
WAIT_FOR_ENGINE = RouterSettings().wait_for_engine_s
MOVING = MovingSettings()


@dataclass
class Outcome:
    """Results of one run: a row per measured request, and the engines' counters.

    Times are seconds of virtual time; a failed request's ``first`` is NaN. ``busy`` is the share of the engines' time
    in which a step ran.
    """

    sent: array[float] = field(default_factory=lambda: array("d"))
    first: array[float] = field(default_factory=lambda: array("d"))
    ended: array[float] = field(default_factory=lambda: array("d"))
    input_tokens: array[float] = field(default_factory=lambda: array("d"))
    output_tokens: array[float] = field(default_factory=lambda: array("d"))
    failures: Counter[str] = field(default_factory=Counter[str])
    first_error: TercetError | None = None
    fallbacks: int = 0
    retries: int = 0
    first_retried: TercetError | None = None
    busy: float = 0.0
    counts: dict[str, int] = field(default_factory=dict[str, int])
    moves: MoveTotals = field(default_factory=MoveTotals)
    imbalance: KVImbalance | None = None
    flips: list[VirtualFlip] = field(default_factory=list[VirtualFlip])

    def add(self, sent: float, first: float, ended: float, request: Request, tokens: int) -> None:
        """Record a request; ``first`` is NaN if it failed."""
        self.sent.append(sent)
        self.first.append(first)
        self.ended.append(ended)
        self.input_tokens.append(request.num_tokens)
        self.output_tokens.append(tokens)

    def samples(self) -> Samples:
        """The rows as the benchmark's columns; gaps between tokens are not stored."""
        sent, first, ended = np.array(self.sent), np.array(self.first), np.array(self.ended)
        ok = ~np.isnan(first)
        return Samples(
            scheduled=sent,
            sent=sent,
            first=first,
            last=np.where(ok, ended, np.nan),
            input_tokens=np.array(self.input_tokens),
            output_tokens=np.array(self.output_tokens),
            ok=ok,
            itl=np.empty(0),
            ended=ended,
            failures=self.failures,
        )


class FollowUps(Protocol):
    """Requests after the answers: later turns of conversations."""

    def after(self, request: Request, output: Sequence[int]) -> tuple[float, Request] | None:
        """What follows the answer to a request: seconds to think, and the next request. None if there is none."""
        ...

    def unsent(self, request: Request) -> int:
        """Number of requests that are not sent because this one failed."""
        ...


@dataclass
class _Fleet:
    fleet: EngineFleet
    engines: dict[str, SimEngine]
    network: Network
    router: float
    moving: MovingFleet
    recovery: Recovery


def run_once(
    program: Program,
    spec: FleetSpec,
    profile: str,
    options: EngineOptions,
    workload: SyntheticWorkload | PlannedWorkload,
    seed: int,
    scheduling: Scheduling | None = None,
    moving: MovingSettings = MOVING,
) -> Outcome:
    """Simulate one run; the outcome depends on the arguments alone.

    ``scheduling`` has the profiles for the program's picks, newly made; by default the built-in ones. ``moving`` are
    the settings and policies of moves.
    """
    if isinstance(workload, SyntheticWorkload):
        arrivals, follow_ups = requests_of(workload, seed), None
    else:
        follow_ups = PlannedTraffic(workload, seed)
        arrivals = follow_ups.arrivals()
    return run_requests(
        program, spec, profile, options, arrivals, workload.warm_up, seed, scheduling, follow_ups, moving
    )


def run_requests(
    program: Program,
    spec: FleetSpec,
    profile: str,
    options: EngineOptions,
    arrivals: Iterable[tuple[float, Request]],
    warm_up: int = 0,
    seed: int = 0,
    scheduling: Scheduling | None = None,
    follow_ups: FollowUps | None = None,
    moving: MovingSettings = MOVING,
) -> Outcome:
    """Simulate requests at given times, in order; the first ``warm_up``, and their follow-ups, are not measured."""
    with _young_garbage_only():
        return run_virtual(
            _run(program, spec, profile, options, arrivals, warm_up, seed, scheduling, follow_ups, moving)
        )


@contextmanager
def _young_garbage_only() -> Generator[None]:
    """Collect garbage rarely: runs make hardly any cycles, and walking their data is useless."""
    before = gc.get_threshold()
    gc.set_threshold(1_000_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


async def _run(
    program: Program,
    spec: FleetSpec,
    profile: str,
    options: EngineOptions,
    arrivals: Iterable[tuple[float, Request]],
    warm_up: int,
    seed: int,
    scheduling: Scheduling | None,
    follow_ups: FollowUps | None,
    moving: MovingSettings,
) -> Outcome:
    built = _build(spec, profile, options, seed, moving)
    if scheduling is not None:
        built.fleet.scheduling = scheduling
    outcome = Outcome()
    for fault in spec.faults:
        _plan_fault(fault, built.engines[fault.engine], built.fleet)
    async with built.moving.running():
        await _serve_all(program, built, arrivals, warm_up, outcome, follow_ups)
    _collect(built, outcome)
    built.network.close()
    return outcome


def _build(spec: FleetSpec, profile: str, options: EngineOptions, seed: int, moving: MovingSettings) -> _Fleet:
    network, profiles, hosts = Network(), dict[str, Profile](), defaultdict[str, Host](Host)
    members: list[Member] = []
    engines: dict[str, SimEngine] = {}
    for group, index in members_of(spec):
        wanted = group.profile or profile
        if wanted not in profiles:
            profiles[wanted] = load_profile(wanted)
        name = f"{group.role}-{index}"
        host = None if group.host is None else hosts[group.host]
        settings = options_from(options, group.options)
        engine = engines[name] = SimEngine(name, profiles[wanted], network, settings, seed, host=host)
        room = engine.pool.total * engine.profile.block_size
        members.append(Member(name, f"sim://{name}", group.role, engine, kv_tokens=room))
    if not spec.without_kv_exchange:
        _require_exchange(list(engines.values()))
    # Simulated engines report every change, so the last report is valid, however old.
    fleet = EngineFleet(members, clock=asyncio.get_running_loop().time, stale_after=math.inf, seed=seed)

    fleet.costs.watch_once_asked()

    def listen() -> None:
        for name, engine in engines.items():
            engine.observe(EngineObserver(fleet.knowledge, name, engine.profile.block_size))

    def listen_for_blocks() -> None:
        for name, engine in engines.items():
            engine.observe_blocks(EngineObserver(fleet.knowledge, name, engine.profile.block_size))

    fleet.knowledge.hear_from(listen, listen_for_blocks)  # programs that never ask need not pay for it
    # A fleet has one router: that of the default profile of its engines.
    router = profiles[profile].router if profile in profiles else 0.0
    recovery = Recovery(fleet, WAIT_FOR_ENGINE, asyncio.get_running_loop().time)
    with_moves = MovingFleet(fleet, engines, moving, bool(spec.faults))
    return _Fleet(fleet, engines, network, router, with_moves, recovery)


def _require_exchange(engines: Sequence[SimEngine]) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` unless all engines can exchange KV: each send would fail."""
    for first, other in itertools.combinations({engine.profile.name: engine for engine in engines}.values(), 2):
        try:
            first.require_exchange(other)
        except LayoutMismatch as error:
            raise BadRequest(
                f"fleet: {first.name} ({first.profile.name}) and {other.name} ({other.profile.name}): {error.message}; "
                "choose profiles of one model, or set without_kv_exchange: true in the fleet's file",
                "fleet",
            ) from None


def _plan_fault(fault: Fault, engine: SimEngine, fleet: EngineFleet) -> None:
    begins: dict[str, Callable[[], None]] = {
        "die": engine.fail,
        "freeze": engine.freeze,
        "drain": partial(fleet.drain, engine.name),
    }
    ends: dict[str, Callable[[], None]] = {
        "die": partial(_recover, engine, fleet),
        "freeze": engine.thaw,
        "drain": partial(fleet.drain, engine.name, False),
    }
    loop = asyncio.get_running_loop()
    loop.call_at(fault.at, begins[fault.kind])
    if fault.down is not None:
        loop.call_at(fault.at + fault.down, ends[fault.kind])


def _recover(engine: SimEngine, fleet: EngineFleet) -> None:
    engine.recover()
    fleet.member(engine.name).reachable = True


async def _serve_all(
    program: Program,
    built: _Fleet,
    arrivals: Iterable[tuple[float, Request]],
    warm_up: int,
    outcome: Outcome,
    follow_ups: FollowUps | None,
) -> None:
    loop, coming = asyncio.get_running_loop(), enumerate(arrivals)
    samples = ImbalanceSamples(list(built.engines.values()))
    all_sent: asyncio.Future[None] = loop.create_future()
    # Not a TaskSet: it would log an error in a program, while an unhandled exception must end the simulation.
    running: set[asyncio.Task[None]] = set()

    def await_next() -> None:
        following = next(coming, None)
        if following is None:
            samples.over = True
            all_sent.set_result(None)
        else:
            number, (when, request) = following
            # After other callbacks of that moment: engines are sampled before the arrivals of the moment.
            loop.call_later(when - loop.time(), loop.call_soon, arrive, request, number >= warm_up)

    def arrive(request: Request, measured: bool) -> None:
        running.add(
            loop.create_task(_converse(program, built, request, outcome, measured, follow_ups, running.discard))
        )
        await_next()

    async with alongside(samples.take()):
        await_next()
        await all_sent
    outcome.imbalance = samples.summary()
    while running:
        await asyncio.wait(running)


async def _converse(
    program: Program,
    built: _Fleet,
    request: Request,
    outcome: Outcome,
    measured: bool,
    follow_ups: FollowUps | None,
    on_end: Callable[[asyncio.Task[Any] | None], object],
) -> None:
    """Run a request and its follow-ups, one after the other; ``on_end`` is called with the task that did it."""
    try:
        while True:
            sequence = await _serve(program, built, request, outcome, measured)
            if follow_ups is None:
                return
            if not sequence.ended:
                now = asyncio.get_running_loop().time()
                for _ in range(follow_ups.unsent(request) if measured else 0):
                    outcome.failures["unsent"] += 1
                    outcome.add(now, math.nan, now, request, 0)
                return
            following = follow_ups.after(request, sequence.tokens)
            if following is None:
                return
            pause, request = following
            await asyncio.sleep(pause)
    finally:
        on_end(asyncio.current_task())


async def _serve(
    program: Program, built: _Fleet, request: Request, outcome: Outcome, measured: bool
) -> RunningSequence:
    """One sequence, served to its end as at the router; after a failure it has not ended."""
    loop = asyncio.get_running_loop()
    sequence = RunningSequence(request, "", RETRIES, loop.time(), WAIT_FOR_ENGINE)
    if built.router:
        await asyncio.sleep(built.router)
    with built.moving.sequences.running(sequence):
        error = await _attempts(program, built, sequence, outcome)
    if error is not None:
        outcome.first_error = outcome.first_error or error
        if measured:
            outcome.failures[error.code] += 1
    if measured:
        first = math.nan if error is not None or sequence.ttft is None else sequence.began + sequence.ttft
        outcome.add(sequence.began, first, loop.time(), request, len(sequence.tokens))
    return sequence


async def _attempts(program: Program, built: _Fleet, sequence: RunningSequence, outcome: Outcome) -> TercetError | None:
    """Run the program, and after a failure one engine that continues where it stopped; returns the final error.

    The program's own errors are not retried: a simulation must show them.
    """
    loop = asyncio.get_running_loop()
    client, fleet = _Client(sequence, loop.time), built.fleet.traced(Trace(), sequence.generates)
    answer, tried_at = program(sequence.request, fleet), loop.time()
    while True:
        try:
            await run_program(answer, client)
            return None if sequence.ended else EngineError("the program ended before its sequence did")
        except Exception as failure:  # a user's program may raise anything
            error = first_cause(failure)
            if not isinstance(error, TercetError):
                raise
            retry = None if isinstance(error, BadRequest) else built.recovery.next_attempt(sequence, error, tried_at)
            if retry is None:
                return error
        outcome.retries += 1
        outcome.first_retried = outcome.first_retried or error
        outcome.fallbacks += is_fallback(sequence, name_of(program))
        await built.recovery.wait(retry)
        answer, tried_at = one_engine(retry.request, fleet, retry.output), loop.time()


class _Client:
    """Takes the outputs of a sequence's programs, at once; implements :class:`~tercet.programs.OutputSink`."""

    def __init__(self, sequence: RunningSequence, clock: Callable[[], float]) -> None:
        self._sequence = sequence
        self._clock = clock

    @property
    def over(self) -> bool:
        return self._sequence.ended

    def put(self, output: Output) -> None:
        if not self._sequence.ended:
            self._sequence.record(output, self._clock())

    async def until_asked(self) -> None:
        pass


def _collect(built: _Fleet, outcome: Outcome) -> None:
    totals, elapsed = Counter[str](), asyncio.get_running_loop().time()
    for engine in built.engines.values():
        counters = engine.all_counters
        outcome.busy += counters.busy / elapsed / len(built.engines)
        totals["steps"] += counters.steps
        totals["prefill_tokens"] += counters.prefill_tokens
        totals["decode_tokens"] += counters.decode_tokens
        totals["preemptions"] += counters.preemptions
        totals["evicted_blocks"] += counters.evicted
    outcome.counts = {**totals, "kv_bytes_sent": built.network.bytes_sent}
    outcome.moves = built.moving.counts.totals()
    outcome.flips = built.moving.roles.flips if built.moving.roles is not None else []
