"""One simulated run of a program on a fleet under a workload, from the first arrival to the last token."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np

from tercet.decisions.scheduling import Scheduling
from tercet.fleet import EngineFleet, EngineObserver, Member, RunningSequence, Trace
from tercet.lab.bench.simulated.kv_imbalance import ImbalanceSamples, KVImbalance
from tercet.lab.bench.simulated.moving_fleet import MoveCounts, MoveTotals, MovingFleet, MovingSettings, alongside
from tercet.lab.bench.simulated.planned import FollowUp, PlannedTraffic, PlannedWorkload
from tercet.lab.bench.simulated.request_classes import ClassedSamples, classed, weights_of
from tercet.lab.bench.simulated.scenario import Fault, FleetSpec, SyntheticWorkload, members_of, requests_of
from tercet.lab.bench.simulated.timeline import TimelineRecorder
from tercet.lab.bench.simulated.virtual_roles import VirtualFlip
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
from tercet.programs import Program, name_of
from tercet.protocol import BadRequest, LayoutMismatch, Output, ProgramFailed, Request, TercetError
from tercet.protocol.trace import FALLBACK, RETRY
from tercet.router.attempts import ProgramFault
from tercet.router.page.records import Frame
from tercet.router.service import Service
from tercet.settings import RetryBudget, RouterSettings
from tercet.settings.role_settings import ObjectiveClass, Objectives

RETRIES = RetryBudget()
WAIT_FOR_ENGINE = RouterSettings().wait_for_engine_s
MOVING = MovingSettings()


@dataclass
class Outcome:
    """The results of one run: columns with one entry per measured request, and the engines' counters.

    Times are in seconds of virtual time; ``first`` is NaN for a failed request. ``busy`` is the share of the engines'
    time in which a step ran. ``timeline`` is empty unless it was requested.
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
    first_retried: str | None = None
    busy: float = 0.0
    counts: dict[str, int] = field(default_factory=dict[str, int])
    moves: MoveTotals = field(default_factory=MoveTotals)
    imbalance: KVImbalance | None = None
    flips: list[VirtualFlip] = field(default_factory=list[VirtualFlip])
    timeline: list[Frame] = field(default_factory=list[Frame])
    objectives: Objectives = field(default_factory=Objectives)
    classes: list[ObjectiveClass | None] = field(default_factory=list[ObjectiveClass | None])

    def add(self, sent: float, first: float, ended: float, request: Request, tokens: int) -> None:
        """Record a request with its times in seconds; ``first`` is NaN if it failed."""
        self.sent.append(sent)
        self.first.append(first)
        self.ended.append(ended)
        self.input_tokens.append(request.num_tokens)
        self.output_tokens.append(tokens)
        if self.objectives.classes:
            self.classes.append(self.objectives.class_of(request.headers))

    def count_attempts(self, trace: Trace) -> None:
        """Count the attempts after failures in a request's trace."""
        for event in trace.events:
            if event.verb in (RETRY, FALLBACK):
                self.retries += 1
                self.fallbacks += event.verb == FALLBACK
                self.first_retried = self.first_retried or event.reason

    def samples(self) -> ClassedSamples:
        """Return the requests in the benchmark's form, without gaps between tokens, which are not stored."""
        sent, first, ended = np.array(self.sent), np.array(self.first), np.array(self.ended)
        ok = ~np.isnan(first)
        return ClassedSamples(
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
            classes=tuple(self.classes),
        )


class FollowUps(Protocol):
    """The source of the requests that follow an answer: later turns of conversations."""

    def after(self, request: Request, output: Sequence[int]) -> FollowUp | None:
        """Return the next turn after the answer to a request, or None at the end."""
        ...

    def unsent(self, request: Request) -> int:
        """Return the number of later requests that are not sent because this request failed."""
        ...


Companion = Callable[[Service[MoveCounts], Mapping[str, SimEngine]], Coroutine[Any, Any, None]]
"""A function that returns a coroutine, which runs until the end of the simulated run and may change the fleet."""


@dataclass
class _Fleet:
    service: Service[MoveCounts]
    engines: dict[str, SimEngine]
    network: Network
    router: float
    moving: MovingFleet


def run_once(
    program: Program,
    spec: FleetSpec,
    profile: str,
    options: EngineOptions,
    workload: SyntheticWorkload | PlannedWorkload,
    seed: int,
    scheduling: Scheduling | None = None,
    moving: MovingSettings = MOVING,
    record_s: float | None = None,
    companion: Companion | None = None,
) -> Outcome:
    """Simulate one run. The outcome depends only on the arguments.

    ``scheduling`` has the profiles for the program's picks, loaded for this run (None: the built-in ones). ``moving``
    has the settings and policies of moves. With ``record_s``, a timeline is recorded, with a frame every ``record_s``
    virtual seconds. ``companion`` is that of :func:`run_requests`.
    """
    if isinstance(workload, SyntheticWorkload):
        arrivals, follow_ups = requests_of(workload, seed), None
    else:
        follow_ups = PlannedTraffic(workload, seed)
        arrivals = follow_ups.arrivals()
    return run_requests(
        program,
        spec,
        profile,
        options,
        arrivals,
        workload.warm_up,
        seed,
        scheduling,
        follow_ups,
        moving,
        record_s,
        companion,
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
    record_s: float | None = None,
    companion: Companion | None = None,
) -> Outcome:
    """Simulate requests at given times (seconds), in order.

    The first ``warm_up`` requests and their follow-ups are not measured. ``companion`` is called with the service and
    the engines; its coroutine runs until the end of the run.
    """
    with _young_garbage_only():
        return run_virtual(
            _run(
                program,
                spec,
                profile,
                options,
                arrivals,
                warm_up,
                seed,
                scheduling,
                follow_ups,
                moving,
                record_s,
                companion,
            )
        )


@contextmanager
def _young_garbage_only() -> Generator[None]:
    """Make the garbage collector run rarely: a run creates few reference cycles, and walking its data is useless."""
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
    record_s: float | None,
    companion: Companion | None,
) -> Outcome:
    built = _build(program, spec, profile, options, seed, moving)
    if scheduling is not None:
        built.service.fleet.scheduling = scheduling
    outcome = Outcome(objectives=moving.objectives)
    if moving.objectives.classes:
        weights = weights_of(moving.class_traffic, moving.objectives)
        arrivals = classed(arrivals, weights, moving.objectives.header, seed)
    for fault in spec.faults:
        _plan_fault(fault, built.engines[fault.engine], built.service.fleet)
    recorder = None if record_s is None else TimelineRecorder(built.service, built.engines, profile, record_s)
    others: list[Coroutine[Any, Any, None]] = [] if recorder is None else [recorder.run()]
    if companion is not None:
        others.append(companion(built.service, built.engines))
    async with built.moving.running(), alongside(*others):
        await _serve_all(built, arrivals, warm_up, outcome, follow_ups)
    if recorder is not None:
        recorder.close()
        outcome.timeline = recorder.frames
    _collect(built, outcome)
    built.network.close()
    return outcome


def _build(
    program: Program, spec: FleetSpec, profile: str, options: EngineOptions, seed: int, moving: MovingSettings
) -> _Fleet:
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
    # Simulated engines report every change, so the last report is valid at any age.
    fleet = EngineFleet(members, clock=asyncio.get_running_loop().time, stale_after=math.inf, seed=seed)

    fleet.costs.watch_once_asked()

    def listen() -> None:
        for name, engine in engines.items():
            engine.observe(EngineObserver(fleet.knowledge, name, engine.profile.block_size))

    def listen_for_blocks() -> None:
        for name, engine in engines.items():
            engine.observe_blocks(EngineObserver(fleet.knowledge, name, engine.profile.block_size))

    fleet.knowledge.hear_from(listen, listen_for_blocks)  # only programs that ask for reports cause their cost
    # A fleet has one router, with the time of the engines' default profile.
    router = profiles[profile].router if profile in profiles else 0.0
    service = Service(
        fleet, name_of(program), {}, MoveCounts(), retries=RETRIES, wait_for_engine=WAIT_FOR_ENGINE,
        moves=moving.moves, retries_faults=False, load_arm=lambda _: program,
    )  # fmt: skip
    with_moves = MovingFleet(service, engines, moving, bool(spec.faults))
    return _Fleet(service, engines, network, router, with_moves)


def _require_exchange(engines: Sequence[SimEngine]) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` unless all engines can exchange KV: sends would fail."""
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
    built: _Fleet,
    arrivals: Iterable[tuple[float, Request]],
    warm_up: int,
    outcome: Outcome,
    follow_ups: FollowUps | None,
) -> None:
    loop, coming = asyncio.get_running_loop(), enumerate(arrivals)
    samples = ImbalanceSamples(list(built.engines.values()))
    all_sent: asyncio.Future[None] = loop.create_future()
    # Not a TaskSet: it would log an error of a program, but an unhandled exception must end the simulation.
    running: set[asyncio.Task[None]] = set()

    def await_next() -> None:
        following = next(coming, None)
        if following is None:
            samples.over = True
            all_sent.set_result(None)
        else:
            number, (when, request) = following
            # After the other callbacks of that moment: engines are sampled before the arrivals of the same moment.
            loop.call_later(when - loop.time(), loop.call_soon, arrive, request, number >= warm_up)

    def arrive(request: Request, measured: bool) -> None:
        running.add(loop.create_task(_converse(built, request, outcome, measured, follow_ups, running.discard)))
        await_next()

    async with alongside(samples.take()):
        await_next()
        await all_sent
    outcome.imbalance = samples.summary()
    while running:
        await asyncio.wait(running)


async def _converse(
    built: _Fleet,
    request: Request,
    outcome: Outcome,
    measured: bool,
    follow_ups: FollowUps | None,
    on_end: Callable[[asyncio.Task[Any] | None], object],
) -> None:
    """Run a request and its follow-ups, one after the other. Call ``on_end`` with the current task at the end."""
    try:
        while True:
            sequence = await _serve(built, request, outcome, measured)
            if follow_ups is None:
                return
            if sequence is None:
                now = asyncio.get_running_loop().time()
                for _ in range(follow_ups.unsent(request) if measured else 0):
                    outcome.failures["unsent"] += 1
                    outcome.add(now, math.nan, now, request, 0)
                return
            following = follow_ups.after(request, sequence.tokens)
            if built.service.sessions is not None:
                built.service.sessions.answered(request, calls_tool=following is not None and following.is_after_tool)
            if following is None:
                return
            if outcome.objectives.classes:  # all requests of a conversation have the same class
                headers = {**following.request.headers, **request.headers}
                following = following._replace(request=msgspec.structs.replace(following.request, headers=headers))
            request = following.request
            await asyncio.sleep(following.pause)
    finally:
        on_end(asyncio.current_task())


async def _serve(built: _Fleet, request: Request, outcome: Outcome, measured: bool) -> RunningSequence | None:
    """Serve one request to its end, as the router does. Return its sequence, or None after a failure.

    Raise the errors of the program itself: a simulation must show them.
    """
    loop, trace, begun = asyncio.get_running_loop(), Trace(), list[RunningSequence]()
    sent, error = loop.time(), None
    if built.router:
        await asyncio.sleep(built.router)
    try:
        await built.service.run(request, trace, on_sequence=begun.append).run(_drop)
    except TercetError as failure:
        error = _cause_of(failure)
        outcome.first_error = outcome.first_error or error
        if measured:
            outcome.failures[error.code] += 1
    outcome.count_attempts(trace)
    sequence = begun[0] if begun else None
    if measured:
        ttft = None if error is not None or sequence is None else sequence.ttft
        first = math.nan if sequence is None or ttft is None else sequence.began + ttft
        outcome.add(sent, first, loop.time(), request, len(sequence.tokens) if sequence is not None else 0)
    return sequence if error is None else None


def _drop(_: Output) -> None:
    """Ignore an output: the sequence has already recorded it."""


def _cause_of(error: TercetError) -> TercetError:
    """Return the error of a failed request. Raise the exception that the program itself raised, if there is one."""
    cause = error.__cause__
    if not isinstance(error, ProgramFailed) or cause is None or isinstance(cause, ProgramFault):
        return error
    if isinstance(cause, TercetError):
        return cause
    raise cause


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
    sessions = built.service.metrics.sessions.counts
    outcome.counts = {**totals, "kv_bytes_sent": built.network.bytes_sent, **dict(sorted(sessions.items()))}
    outcome.moves = built.service.metrics.totals()
    outcome.flips = built.moving.roles.flips if built.moving.roles is not None else []
