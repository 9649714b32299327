"""One simulated run of a program on a fleet under a workload, from the first arrival to the last token."""

from __future__ import annotations

import asyncio
import gc
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from traceback import extract_tb
from typing import Any, NamedTuple

import msgspec

from tercet.decisions.scheduling import Scheduling
from tercet.fleet import RunningSequence, Trace
from tercet.programs import Program
from tercet.protocol import Output, ProgramFailed, Request, TercetError
from tercet.protocol.spans import FALLBACK, RETRY
from tercet.router.page.records import Frame
from tercet.router.serve.service import ProgramFault, Service, entering
from tercet.settings.fleet_settings import DEFAULT_CLASS, Objectives
from tercet_lab.bench.simulated.moving_fleet import (
    MOVE_COLUMNS,
    MoveTotals,
    VirtualFleet,
    VirtualFlip,
    alongside,
    build_fleet,
    plan_fault,
)
from tercet_lab.bench.simulated.recording import ENGINE_COLUMNS, EngineLoads, EngineSamples, Record, TimelineRecorder
from tercet_lab.bench.simulated.scenario import (
    LATER,
    FleetSpec,
    PlannedTraffic,
    PlannedWorkload,
    SyntheticWorkload,
    classed,
    predicted_tokens,
    requests_of,
    slo_of_class,
    turn_of,
    with_prediction,
)
from tercet_lab.planner_settings import MovingSettings, weights_of
from tercet_lab.sim import EngineOptions, SimEngine, options_from, run_virtual
from tercet_lab.sim.kv_usage import KVImbalance, UsageLog
from tercet_lab.tables import Requests, Table


class PlannedChange(msgspec.Struct, frozen=True):
    """One plan of a planner, ``at`` a time of the run in seconds: the wanted fleet, what was done, and the reason.

    ``flipped``, ``started`` and ``stopped`` are numbers of engines. ``expected`` is the share of requests that the
    planner expected within the objectives, ``came`` the share that ended within them until the next plan; None if the
    planner did not tell, no request ended, or another plan came between.
    """

    at: float
    plan: str
    flipped: int
    started: int
    stopped: int
    reason: str
    expected: float | None = None
    came: float | None = None


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
    """The results of a planner in a run: its ``plans``, those that changed nothing included.

    ``engine_seconds`` is the cost of the engines, from the order to start each one to its end. For its ``decisions``,
    the planner ran ``simulations`` with ``simulated_requests`` requests in total.
    """

    plans: tuple[PlannedChange, ...] = ()
    samples: tuple[FleetSample, ...] = ()
    engine_seconds: float = 0.0
    decisions: int = 0
    simulations: int = 0
    simulated_requests: int = 0

    @property
    def changes(self) -> list[PlannedChange]:
        """The plans that changed the fleet."""
        return [each for each in self.plans if each.flipped or each.started or each.stopped]

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
    """The results of one run: a row for each measured request, and the engines' counters.

    ``busy`` is the share of the engines' paid time in which a step ran, and ``paid_s`` that time. ``timeline`` and
    ``engines`` are empty unless they were requested.
    """

    requests: Requests = field(default_factory=Requests)
    first_error: TercetError | None = None
    fallbacks: int = 0
    retries: int = 0
    first_retried: str | None = None
    busy: float = 0.0
    paid_s: float = 0.0
    counts: dict[str, int] = field(default_factory=dict[str, int])
    moves: MoveTotals = field(default_factory=MoveTotals)
    move_rows: Table = field(default_factory=lambda: Table(MOVE_COLUMNS))
    imbalance: KVImbalance | None = None
    flips: list[VirtualFlip] = field(default_factory=list[VirtualFlip])
    timeline: list[Frame] = field(default_factory=list[Frame])
    engines: Table = field(default_factory=lambda: Table(ENGINE_COLUMNS))
    objectives: Objectives = field(default_factory=Objectives)

    @property
    def failures(self) -> Counter[str]:
        """Number of failed requests by the code of their error."""
        return self.requests.failures

    def unsent(self, request: Request, now: float, turns: int) -> None:
        """Record later turns of a conversation, which are not sent because ``request`` failed."""
        turn = turn_of(request.seq_id)
        for later in range(1, turns + 1):
            self.requests.append(
                request.seq_id + LATER * later, request.session or "", turn + later, self._class_of(request), 0,
                now, now, math.nan, math.nan, now, request.num_tokens, math.nan, 0, math.nan, math.nan, "", "", "",
                math.nan, math.nan, False, math.nan, math.nan, math.nan, math.nan, False, "unsent", None, None,
            )  # fmt: skip

    def add(self, served: Served, phase: int) -> None:
        request, sequence, trace = served.request, served.sequence, served.trace
        cached, sent, prefill, pause = request.num_tokens, 0, "", 0.0
        generated = retries = fallbacks = 0
        for event in trace.events:
            sent += event.bytes
            pause += event.pause or 0.0
            fallbacks += event.verb == FALLBACK
            retries += event.verb == RETRY
            if not generated and event.verb in ("remote_send", "start_generate"):
                # What follows the prompt is output: the first token, or that of an earlier attempt.
                of_prompt = event.computed - max(0, event.end - request.num_tokens)
                cached -= max(0, of_prompt)
                prefill = event.engine if of_prompt > 1 or not prefill else prefill
                generated = event.verb == "start_generate"
        ttft = None if served.error is not None or sequence is None else sequence.ttft
        ok = ttft is not None
        first = math.nan if sequence is None or ttft is None else sequence.began + ttft
        tokens = 0 if sequence is None else len(sequence.tokens)
        wanted = request.sampling_params.get("max_tokens", math.nan)
        self.requests.append(
            request.seq_id, request.session or "", turn_of(request.seq_id), self._class_of(request), phase,
            served.sent, served.sent, first, sequence.last_at if sequence is not None and ok else math.nan,
            served.ended, request.num_tokens, max(0, cached) if generated else math.nan, tokens, wanted,
            math.nan if (tokens := predicted_tokens(request)) is None else tokens,
            prefill, "" if sequence is None else sequence.engine, trace.program,
            0 if sequence is None else sequence.attempt, retries + fallbacks, fallbacks > 0,
            0 if sequence is None else sequence.moves, pause, served.preempted, sent,
            ok, "" if served.error is None else served.error.code, None, served.token_times,
        )  # fmt: skip

    def _class_of(self, request: Request) -> str:
        if not self.objectives.classes:
            return ""
        found = self.objectives.class_of(request.headers)
        return DEFAULT_CLASS if found is None else found.name


class Served(NamedTuple):
    """A request that has ended at ``ended``; ``sent`` and ``ended`` are seconds of the run.

    ``sequence`` is None if the request was refused before it began; ``token_times`` are None unless they were asked.
    """

    request: Request
    sent: float
    ended: float
    sequence: RunningSequence | None
    trace: Trace
    error: TercetError | None
    preempted: int
    token_times: tuple[float, ...] | None


MOVING = MovingSettings()
RECORD = Record()


def _ignore(_: object) -> None:
    """Do nothing with a row, which is kept until the end, or with an output, which its sequence has recorded."""


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
    record: Record = RECORD,
    companion: Companion | None = None,
    on_row: Callable[[Outcome], object] = _ignore,
    predict_error: float | None = None,
) -> Outcome:
    """Simulate one run. The outcome depends only on the arguments.

    ``scheduling`` has the profiles for the program's picks, loaded for this run (None: the built-in ones). ``moving``
    has the settings and policies of moves. ``record`` says what is recorded. ``companion`` is that of
    :func:`run_requests`. ``predict_error`` is that of an experiment.
    """
    if isinstance(workload, SyntheticWorkload):
        arrivals, follow_ups = requests_of(workload, seed), None
    else:
        follow_ups = PlannedTraffic(workload, seed)
        arrivals = follow_ups.arrivals()
    return run_requests(
        program, spec, profile, options, arrivals, workload.warm_up, seed, scheduling, follow_ups, moving, record,
        companion, on_row, predict_error,
    )  # fmt: skip


def run_requests(
    program: Program,
    spec: FleetSpec,
    profile: str,
    options: EngineOptions,
    arrivals: Iterable[tuple[float, Request]],
    warm_up: int = 0,
    seed: int = 0,
    scheduling: Scheduling | None = None,
    follow_ups: PlannedTraffic | None = None,
    moving: MovingSettings = MOVING,
    record: Record = RECORD,
    companion: Companion | None = None,
    on_row: Callable[[Outcome], object] = _ignore,
    predict_error: float | None = None,
) -> Outcome:
    """Simulate requests at given times (seconds), in order.

    The first ``warm_up`` requests and their follow-ups are not measured. ``companion`` is called with the service and
    the engines; its coroutine runs until the end of the run. ``on_row`` is called after each row of a request, and may
    take the rows away.
    """
    engine_options = options_from(options, {"stream_every": 1}) if record.tokens else options

    async def run() -> Outcome:
        built = build_fleet(program, spec, profile, engine_options, seed, moving)
        if scheduling is not None:
            built.service.fleet.scheduling = scheduling
        if predict_error is not None:
            built.predict = partial(with_prediction, error=predict_error, seed=seed)
            built.service.fleet.costs.known_length = predicted_tokens
        coming, outcome, paid = arrivals, Outcome(objectives=moving.objectives), PaidTime(built.engines)
        outcome.requests.limits = {each.name: slo_of_class(each) for each in moving.objectives.classes}
        if moving.objectives.classes and (follow_ups is None or not follow_ups.has_classes):
            weights = weights_of(moving.class_traffic, moving.objectives)
            coming = classed(arrivals, weights, moving.objectives.header, seed)
        for fault in spec.faults:
            plan_fault(fault, built.engines.get(fault.engine) or built.stores[fault.engine], built.service.fleet)
        everything = {**built.engines, **built.stores}
        recorder, others = None, list[Coroutine[Any, Any, None]]()
        if record.frames_every is not None:
            recorder = TimelineRecorder(built.service, everything, profile, record.frames_every)
            others.append(recorder.run())
        if record.engines_every is not None:
            loads = EngineLoads(everything)
            others.append(EngineSamples(outcome.engines, built.service.fleet, loads, paid, record.engines_every).run())
        if companion is not None:
            others.append(companion(built.service, built.engines, paid))
        async with alongside(*built.moving.work, *others):
            await _serve_all(_Course(built, outcome, follow_ups, paid, record, on_row), coming, warm_up)
        if recorder is not None:
            recorder.close()
            outcome.timeline = recorder.frames
        _collect(built, outcome, paid)
        built.network.close()
        return outcome

    with _young_garbage_only():
        return run_virtual(run())


@contextmanager
def _young_garbage_only() -> Generator[None]:
    """Make the garbage collector run rarely: a run creates few reference cycles, and walking its data is useless."""
    before = gc.get_threshold()
    gc.set_threshold(1_000_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Course(NamedTuple):
    """What all requests of a run have in common; the fields are described at :func:`run_requests`."""

    built: VirtualFleet
    outcome: Outcome
    follow_ups: PlannedTraffic | None
    paid: PaidTime
    record: Record
    on_row: Callable[[Outcome], object]


async def _serve_all(course: _Course, arrivals: Iterable[tuple[float, Request]], warm_up: int) -> None:
    loop, coming, paid = asyncio.get_running_loop(), enumerate(arrivals), course.paid
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
            course.outcome.imbalance, paid.before_change = usage.end(), lambda: None
        if not all_sent.done():
            all_sent.set_result(None)

    def arrive(request: Request, measured: bool) -> None:
        if not all_sent.done():  # else the simulation is broken
            begin(request, measured)
            await_next()

    def begin(request: Request, measured: bool) -> None:
        nonlocal usage
        if usage is None:
            usage = UsageLog(course.built.engines, paid)
            paid.before_change = usage.settle
        running.add(loop.create_task(_converse(course, request, measured, on_end)))

    await_next()
    await all_sent
    if running and not broken:
        await all_ended
    if broken:
        raise broken[0]


async def _converse(
    course: _Course, request: Request, measured: bool,
    on_end: Callable[[asyncio.Task[Any] | None, Exception | None], object],
) -> None:  # fmt: skip
    """Run a request and its follow-ups, one after the other.

    Call ``on_end`` at the end, with the current task and the error of the program, if there was one.
    """
    built, outcome, follow_ups, _, record, on_row = course
    broken: Exception | None = None
    try:
        while True:
            if built.predict is not None:
                request = built.predict(request)
            served = await _serve(built, request, outcome, record.tokens)
            if measured:
                outcome.add(served, 0 if follow_ups is None else follow_ups.phase_of(request))
                on_row(outcome)
            if follow_ups is None:
                return
            sequence = served.sequence if served.error is None else None
            if sequence is None:
                turns = follow_ups.unsent(request)
                if measured:
                    outcome.unsent(request, served.ended, turns)
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
            pause = max(following.pause, following.due - asyncio.get_running_loop().time())
            await asyncio.sleep(pause)
    except Exception as error:
        broken = error
    finally:
        on_end(asyncio.current_task(), broken)


async def _serve(built: VirtualFleet, request: Request, outcome: Outcome, each_token: bool) -> Served:
    """Serve one request to its end, as the router does. With ``each_token``, record when each token came.

    Raise the errors of the program itself: a simulation must show them.
    """
    loop, trace, error = asyncio.get_running_loop(), Trace(), None
    begun: list[RunningSequence] = []
    times: list[float] = []
    sent = loop.time()

    def take(output: Output) -> None:
        times.extend([loop.time()] * len(output.token_ids))

    if built.router:
        await asyncio.sleep(built.router)
    try:
        await built.service.run(entering(request), trace, on_sequence=begun.append).run(take if each_token else _ignore)
    except TercetError as failure:
        error = _cause_of(failure)
        outcome.first_error = outcome.first_error or error
    for event in trace.events:  # attempts after failures
        if event.verb in (RETRY, FALLBACK):
            outcome.retries += 1
            outcome.fallbacks += event.verb == FALLBACK
            outcome.first_retried = outcome.first_retried or event.reason
    preempted = built.network.take_preemptions(request.seq_id)
    token_times = tuple(times) if each_token and error is None else None
    return Served(request, sent, loop.time(), begun[0] if begun else None, trace, error, preempted, token_times)


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
    totals = Counter[str]()
    outcome.paid_s = paid_s = paid.seconds(asyncio.get_running_loop().time())
    for engine in built.engines.values():
        counters = engine.all_counters
        outcome.busy += counters.busy / paid_s
        totals["steps"] += counters.steps
        totals["prefill_tokens"] += counters.prefill_tokens
        totals["decode_tokens"] += counters.decode_tokens
        totals["preemptions"] += counters.preemptions
        totals["evicted_blocks"] += counters.evicted
    sessions = built.metrics.sessions.counts
    for store in built.stores.values():
        totals.update({f"store_{name}": count for name, count in sorted(store.counts.items())})
    totals.update(built.metrics.write_behind.counts)
    outcome.counts = {**totals, "kv_bytes_sent": built.network.bytes_sent, **dict(sorted(sessions.items()))}
    outcome.moves, outcome.move_rows = built.metrics.totals(), built.metrics.move_rows
    outcome.flips = built.moving.roles.flips if built.moving.roles is not None else []
