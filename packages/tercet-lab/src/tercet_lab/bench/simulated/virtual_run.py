"""One simulated run of a program on a fleet under a workload, from the first arrival to the last token.

A run's timeline, for the web page, has the frames of a router's stream in virtual time.
"""

from __future__ import annotations

import asyncio
import gc
import math
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from traceback import extract_tb
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from tercet.decisions.scheduling import Scheduling
from tercet.fleet import Member, RunningSequence, Trace
from tercet.programs import Program
from tercet.protocol import Output, ProgramFailed, Request, TercetError
from tercet.protocol.spans import FALLBACK, RETRY
from tercet.router.page.records import Frame
from tercet.router.page.watch import FleetWatch, about_service
from tercet.router.serve.service import ProgramFault, Service
from tercet.settings.fleet_settings import ObjectiveClass, Objectives
from tercet_lab.bench.simulated.moving_fleet import (
    MoveTotals,
    MovingSettings,
    VirtualFleet,
    VirtualFlip,
    alongside,
    build_fleet,
    plan_fault,
)
from tercet_lab.bench.simulated.scenario import (
    ClassedSamples,
    FleetSpec,
    FollowUp,
    PlannedTraffic,
    PlannedWorkload,
    SyntheticWorkload,
    classed,
    requests_of,
    weights_of,
)
from tercet_lab.sim import EngineOptions, SimEngine, run_virtual
from tercet_lab.sim.kv_usage import KVImbalance, UsageLog


class PlannedChange(msgspec.Struct, frozen=True):
    """One change by a planner, ``at`` a time of the run in seconds: the new plan, its effects and its reason.

    ``flipped``, ``started`` and ``stopped`` are numbers of engines.
    """

    at: float
    plan: str
    flipped: int
    started: int
    stopped: int
    reason: str


class FleetSample(msgspec.Struct, frozen=True):
    """The state of the fleet ``at`` a time of the run, in seconds.

    ``rate`` is arrivals per second, ``waiting_s`` the seconds of prefill that wait. ``ended`` requests ended in the
    second before; ``met`` of them met the objectives.
    """

    at: float
    prefill: int
    decode: int
    starting: int
    rate: float
    waiting_s: float
    running: int
    ended: int
    met: int


class PlannedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a planner in a run.

    ``engine_seconds`` is the cost of the engines, from the order to start each one to its end. For its ``decisions``,
    the planner ran ``simulations`` with ``simulated_requests`` requests in total.
    """

    changes: tuple[PlannedChange, ...] = ()
    samples: tuple[FleetSample, ...] = ()
    engine_seconds: float = 0.0
    decisions: int = 0
    simulations: int = 0
    simulated_requests: int = 0

    @property
    def flips(self) -> int:
        """Number of changes in which engines changed their roles."""
        return sum(each.flipped > 0 for each in self.changes)

    def flat(self, met: int) -> dict[str, float]:
        """Return the values by name, for a report. ``met`` is the number of requests that met the objectives."""
        hours = self.engine_seconds / 3600
        return {
            "planner_changes": len(self.changes),
            "planner_flips": self.flips,
            "engines_flipped": sum(each.flipped for each in self.changes),
            "engines_started": sum(each.started for each in self.changes),
            "engines_stopped": sum(each.stopped for each in self.changes),
            "planner_decisions": self.decisions,
            "planner_simulations": self.simulations,
            "engine_hours": hours,
            "goodput_per_engine_hour": met / hours if hours else 0.0,
        }


class PaidTime:
    """The time for which each engine costs something: a planner's engines only from the order to start to their end.

    Shares and means of a run are over this time: engines that a planner never started would dilute them.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._since = dict.fromkeys(names, 0.0)
        self._seconds = 0.0
        self.before_change: Callable[[], object] = lambda: None

    def begin(self, name: str, now: float) -> None:
        """Pay for an engine from the second ``now``."""
        self.before_change()
        self._since[name] = now

    def end(self, name: str, now: float) -> None:
        """Pay for an engine no longer, from the second ``now``."""
        self.before_change()
        self._seconds += now - self._since.pop(name)

    def __contains__(self, name: str) -> bool:
        return name in self._since

    def seconds(self, now: float) -> float:
        """Return the paid engine-seconds until the second ``now``."""
        return self._seconds + sum(now - since for since in self._since.values())


@dataclass
class Outcome:
    """The results of one run: columns with one entry per measured request, and the engines' counters.

    Times are in seconds of virtual time; ``first`` is NaN for a failed request. ``busy`` is the share of the
    engines' paid time in which a step ran. ``timeline`` is empty unless it was requested.
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


MOST_FRAMES, FEWEST_FRAMES, MOST_ROWS = 600, 60, 300_000
"""Limits of the frames that are kept, and of the rows of engines in them; larger fleets get fewer frames."""
OFTEN_S = 0.1
"""Default interval between frames, in virtual seconds. It is doubled whenever there are too many frames."""


class EngineLoads:
    """The present loads of simulated engines. Reading them does not inform the simulated router."""

    def __init__(self, engines: Mapping[str, SimEngine]) -> None:
        self._engines = engines

    def begin(self) -> None: ...

    def table(self, members: Sequence[Member]) -> NDArray[np.float64]:
        return np.array([_row(self._engines[member.name]) for member in members]).reshape(len(members), 4)


def _row(engine: SimEngine) -> tuple[float, float, float, float]:
    if engine.down:
        return math.nan, math.nan, math.nan, math.nan
    load = engine.load()
    return load.kv_usage, load.running, load.waiting, math.nan if load.step_time is None else load.step_time


def merged(first: Frame, second: Frame) -> Frame:
    """Return one frame with the changes of ``first`` and then ``second``."""
    if second.whole:
        return second
    rows = {} if second.engines is not None else {row[0]: row for row in first.loads}
    rows |= {row[0]: row for row in second.loads}
    moves = {move.number: move for move in (*first.moves, *second.moves)}
    return Frame(
        t=second.t, whole=first.whole, about=second.about or first.about, engines=second.engines or first.engines,
        loads=[rows[index] for index in sorted(rows)], unseen=second.unseen, points=[*first.points, *second.points],
        lanes=[*first.lanes, *second.lanes], spans=[*first.spans, *second.spans], ends=[*first.ends, *second.ends],
        moves=[moves[number] for number in sorted(moves)],
    )  # fmt: skip


def halved(frames: Sequence[Frame]) -> list[Frame]:
    """Return half as many frames with the same result: pairs are merged, and an odd last frame stays."""
    pairs = zip(frames[::2], frames[1::2], strict=False)
    return list(chain((merged(*pair) for pair in pairs), frames[len(frames) // 2 * 2 :]))


class TimelineRecorder:
    """The recorder of a run's ``frames``: one every ``interval_s`` virtual seconds, fewer if the run is long."""

    def __init__(self, service: Service, engines: Mapping[str, SimEngine], model: str, interval_s: float) -> None:
        self._sequences = service.sequences
        self._watch = FleetWatch(service, EngineLoads(engines), lambda: about_service(service, model))
        self._most = max(FEWEST_FRAMES, min(MOST_FRAMES, MOST_ROWS // max(1, len(engines))))
        self._interval = interval_s
        self.frames: list[Frame] = []

    async def run(self) -> None:
        """Record until cancelled."""
        while True:
            self._take()
            await asyncio.sleep(self._interval)

    def close(self) -> None:
        """Record the last frame, and stop observing."""
        self._take()
        self._watch.close()

    def _take(self) -> None:
        for sequence in self._sequences:  # simulated engines deliver the tokens of a run of steps only on request
            if sequence.generation is not None and sequence.generation.stream is not None:
                sequence.generation.stream.catch_up()
        self.frames.append(self._watch.frame())
        if len(self.frames) > self._most:
            self.frames = halved(self.frames)
            self._interval *= 2


MOVING = MovingSettings()


class FollowUps(Protocol):
    """The source of the requests that follow an answer: later turns of conversations."""

    def after(self, request: Request, output: Sequence[int]) -> FollowUp | None:
        """Return the next turn after the answer to a request, or None at the end."""
        ...

    def unsent(self, request: Request) -> int:
        """Return the number of later requests that are not sent because this request failed."""
        ...


Companion = Callable[[Service, Mapping[str, SimEngine], PaidTime], Coroutine[Any, Any, None]]
"""A function that returns a coroutine, which runs until the end of the simulated run and may change the fleet.

It keeps record of the engines that it switches off and on in the run's :class:`PaidTime`.
"""


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
    built = build_fleet(program, spec, profile, options, seed, moving)
    if scheduling is not None:
        built.service.fleet.scheduling = scheduling
    outcome, paid = Outcome(objectives=moving.objectives), PaidTime(built.engines)
    if moving.objectives.classes:
        weights = weights_of(moving.class_traffic, moving.objectives)
        arrivals = classed(arrivals, weights, moving.objectives.header, seed)
    for fault in spec.faults:
        plan_fault(fault, built.engines[fault.engine], built.service.fleet)
    recorder = None if record_s is None else TimelineRecorder(built.service, built.engines, profile, record_s)
    others: list[Coroutine[Any, Any, None]] = [] if recorder is None else [recorder.run()]
    if companion is not None:
        others.append(companion(built.service, built.engines, paid))
    async with built.moving.running(), alongside(*others):
        await _serve_all(built, arrivals, warm_up, outcome, follow_ups, paid)
    if recorder is not None:
        recorder.close()
        outcome.timeline = recorder.frames
    _collect(built, outcome, paid)
    built.network.close()
    return outcome


async def _serve_all(
    built: VirtualFleet,
    arrivals: Iterable[tuple[float, Request]],
    warm_up: int,
    outcome: Outcome,
    follow_ups: FollowUps | None,
    paid: PaidTime,
) -> None:
    loop, coming = asyncio.get_running_loop(), enumerate(arrivals)
    usage: UsageLog | None = None
    all_sent: asyncio.Future[None] = loop.create_future()
    all_ended: asyncio.Future[None] = loop.create_future()
    # Not a TaskSet: it would log an error of a program, but an unhandled exception must end the simulation.
    running: set[asyncio.Task[None]] = set()
    broken: list[Exception] = []

    def on_end(task: asyncio.Task[Any] | None, error: Exception | None) -> None:
        running.discard(task)  # pyright: ignore[reportArgumentType]
        if error is not None:
            broken.append(error)
            if not all_sent.done():
                all_sent.set_exception(error)
        # One future, as asyncio.wait() would ask each running task again whenever one of them ends.
        if all_sent.done() and not all_ended.done() and (broken or not running):
            all_ended.set_result(None)

    def await_next() -> None:
        for number, (when, request) in coming:
            if when > loop.time():
                # After the other callbacks of that moment.
                loop.call_later(when - loop.time(), loop.call_soon, arrive, request, number >= warm_up)
                return
            begin(request, number >= warm_up)
        if usage is not None:
            outcome.imbalance, paid.before_change = usage.end(), lambda: None
        if not all_sent.done():
            all_sent.set_result(None)

    def arrive(request: Request, measured: bool) -> None:
        if not all_sent.done():  # else the simulation is broken
            begin(request, measured)
            await_next()

    def begin(request: Request, measured: bool) -> None:
        nonlocal usage
        if usage is None:
            usage = UsageLog(built.engines, paid)
            paid.before_change = usage.settle
        running.add(loop.create_task(_converse(built, request, outcome, measured, follow_ups, on_end)))

    await_next()
    await all_sent
    if running and not broken:
        await all_ended
    if broken:
        raise broken[0]


async def _converse(
    built: VirtualFleet,
    request: Request,
    outcome: Outcome,
    measured: bool,
    follow_ups: FollowUps | None,
    on_end: Callable[[asyncio.Task[Any] | None, Exception | None], object],
) -> None:
    """Run a request and its follow-ups, one after the other.

    Call ``on_end`` at the end, with the current task and the error of the program, if there was one.
    """
    broken: Exception | None = None
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
    except Exception as error:
        broken = error
    finally:
        on_end(asyncio.current_task(), broken)


async def _serve(built: VirtualFleet, request: Request, outcome: Outcome, measured: bool) -> RunningSequence | None:
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
    """Return the error of a failed request. Raise an error with the program's own exception, if there is one."""
    cause = error.__cause__
    if not isinstance(error, ProgramFailed) or cause is None or isinstance(cause, ProgramFault):
        return error
    if isinstance(cause, TercetError):
        return cause
    place = extract_tb(cause.__traceback__)[-1]
    what = f"{type(cause).__name__}: {cause} ({place.filename}, line {place.lineno})"
    raise ProgramFailed(f"the program failed: {what}") from cause


def _collect(built: VirtualFleet, outcome: Outcome, paid: PaidTime) -> None:
    totals, paid_s = Counter[str](), paid.seconds(asyncio.get_running_loop().time())
    for engine in built.engines.values():
        counters = engine.all_counters
        outcome.busy += counters.busy / paid_s
        totals["steps"] += counters.steps
        totals["prefill_tokens"] += counters.prefill_tokens
        totals["decode_tokens"] += counters.decode_tokens
        totals["preemptions"] += counters.preemptions
        totals["evicted_blocks"] += counters.evicted
    sessions = built.metrics.sessions.counts
    outcome.counts = {**totals, "kv_bytes_sent": built.network.bytes_sent, **dict(sorted(sessions.items()))}
    outcome.moves = built.metrics.totals()
    outcome.flips = built.moving.roles.flips if built.moving.roles is not None else []
