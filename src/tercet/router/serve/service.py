"""The service, which runs a program for each sequence; if it fails, one engine continues after the client's tokens.

:meth:`Service._serve` is the life of a sequence, in one function: choose a program, attempt, retry. Simulations read
its outputs by :meth:`Service.run`, HTTP layers by :class:`RequestRun`. :class:`Attempts` takes the outputs of the
programs that run for one sequence. :class:`Routing`, a state machine without I/O, decides which program serves a
request, and when the router returns from a failing one.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import random
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Literal, Protocol, Self, cast

import msgspec

from tercet import logs
from tercet.aio.tasks import is_cancelled, run_in_thread
from tercet.decisions.objectives import Attainments
from tercet.fleet import EngineFleet, FleetView, Retry, RunningSequence, RunningSequences, Trace
from tercet.fleet.policy_views import SeenRequests
from tercet.programs import BUILT_IN, Answer, Program, load_program, run_program
from tercet.programs.patterns import one_engine
from tercet.protocol import (
    BadRequest,
    DeadlineExceeded,
    EngineError,
    EngineNotReached,
    EngineUnreachable,
    Output,
    OutputStream,
    ProgramFailed,
    Request,
    RoleUnavailable,
    TercetError,
    Usage,
)
from tercet.protocol.headers import PROGRAM_HEADER
from tercet.protocol.json_text import unwritable_field
from tercet.protocol.names import chosen_by_weight, sequence_id
from tercet.protocol.spans import FALLBACK, RETRY, TraceEvent, current_span, working_in
from tercet.protocol.wire import LEAST_PRIORITY, LONGEST_SALT, MOST_PRIORITY
from tercet.router.observe.metrics import Metrics
from tercet.router.serve.context_copies import HotContexts
from tercet.router.serve.moves import Moves, Proposals
from tercet.router.serve.plans import Arm, Plan, load_anywhere
from tercet.router.serve.sessions import Sessions
from tercet.settings import MoveSettings, RetryBudget
from tercet.settings.fleet_settings import Objectives
from tercet.wire.serving.server_access import RequestContext

# The end of a sequence: ``left`` if its client left or caused the error.
Outcome = Literal["served", "failed", "left"]


class SequenceObserver(Protocol):
    """A receiver of the start and the end of each sequence; for a sequence that began earlier, only of the end."""

    def begins(self, sequence: RunningSequence, trace: Trace) -> None:
        """Record a sequence that begins; its trace is still empty."""
        ...

    def ends(self, sequence: RunningSequence, trace: Trace, outcome: Outcome) -> None:
        """Record a sequence that has ended."""
        ...


POLL_INTERVAL_S = 0.1
# The program that continues a sequence whose program failed.
ONE_ENGINE = "data_parallel"


class ProgramFault(Exception):
    """Raised if a program breaks the rules for programs."""


class BrokenOff(EngineError):
    """Raised if an engine ended a sequence too early, without a request of this process.

    ``begun`` has the tokens of the last output, and ``output`` its finish reason.
    """

    def __init__(self, output: Output, engine: str) -> None:
        super().__init__(f"{engine or 'the program'} ended the sequence: {output.finish_reason}")
        self.begun = msgspec.structs.replace(output, finish_reason=None, stop_reason=None)
        self.output = Output((), output.finish_reason, output.stop_reason)


class Attempts:
    """One sequence while it is served: programs run one after another, and their outputs go to ``stream``.

    The observers of its service learn of its beginning, and once of its end: at the latest at the exit of this context.
    """

    def __init__(
        self, service: Service, chosen: Chosen, sequence: RunningSequence, view: FleetView, stream: OutputStream
    ) -> None:
        self._service, self._chosen, self._view = service, chosen, view
        self._sequence, self._trace, self._stream = sequence, view.trace, stream
        self._clock = service.fleet.costs.clock
        # The span of the request. The last tokens may come from a connection's task, which belongs to no request.
        self._place = current_span()
        self._fault: ProgramFault | BrokenOff | None = None
        self._is_over = False
        for observer in service.observers:
            observer.begins(sequence, view.trace)

    def __enter__(self) -> Self:
        self._service.streams[self._stream] = self._sequence  # so that the end of the router ends it
        return self

    def __exit__(self, *error: object) -> None:
        self._service.streams.pop(self._stream, None)
        self._view.close()
        self.ends("left")  # without effect after another end
        if self._service.sessions is not None:
            self._service.sessions.ends(self._sequence)

    async def run(self, program: Callable[[], Answer]) -> BaseException | None:
        """Run one program to its end; return its failure if another attempt may serve the sequence, otherwise None."""
        self._fault = None
        try:
            await run_program(program(), self)
            failure: BaseException = self._fault or ProgramFault("the program ended before its sequence")
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            failure = ProgramFault("the program was cancelled, but not because its client left")
            failure.__cause__ = error
        except (Exception, SystemExit) as error:  # a user's program may raise anything
            failure = self._fault or first_cause(error)
        # A sequence that has ended is served, whatever its program raises while it cleans up.
        if self._stream.over:
            return None
        if is_cancelled():  # the program ended, or replaced its cancellation by another error
            raise asyncio.CancelledError from failure
        return failure

    @property
    def over(self) -> bool:
        """True if the running program must stop."""
        return self._fault is not None or self._stream.over

    def put(self, output: Any) -> None:
        """Take an output that the program yields, or that a stream of its engines has."""
        if not isinstance(output, Output):
            self._fault = ProgramFault(f"the program yielded a {type(output).__name__} instead of an Output")
        elif output.finish_reason is None:
            self._sequence.record(output, self._clock())
            self._stream.put(output)
        elif output.broken_off:
            # Its tokens are the client's, its end is not: another attempt continues after them.
            self._fault = BrokenOff(output, self._sequence.engine)
            if self._sequence.generation is not None:
                self._sequence.generation.engine.failed(self._fault)
            if output.token_ids:
                self.put(self._fault.begun)
        else:
            self.finish(output)

    async def until_asked(self) -> None:
        await self._stream.until_asked()

    def finish(self, output: Output) -> None:
        """End the sequence with this output, and count it as served."""
        if self._stream.over:
            return
        service, sequence, trace = self._service, self._sequence, self._trace
        sequence.record(output, self._clock())
        if not sequence.attempt:  # a later attempt ran on one engine, and says nothing about the chosen program
            service.routing.succeeded(self._chosen)
        if not sequence.request.background:  # no client waits for one of those
            trace.ttft, trace.tpot = sequence.ttft, sequence.tpot
        with working_in(self._place):  # exemplars name the request's trace
            service.metrics.finished(trace)
        self.ends("served")
        attainment = service.attainments.of(sequence.request)
        if attainment is not None:
            service.metrics.objectives(attainment.name, attainment.ended_with(trace.ttft, trace.tpot))
        self._stream.put(output)

    def ends(self, outcome: Outcome) -> None:
        """Notify the observers that the sequence has ended; later calls have no effect."""
        if not self._is_over:
            self._is_over = True
            for observer in tuple(self._service.observers):
                observer.ends(self._sequence, self._trace, outcome)


def first_cause(error: BaseException) -> BaseException:
    """Return the error to report for a group of tasks: an error of the program if there is one, else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast("BaseExceptionGroup[BaseException]", error)
    causes = [first_cause(each) for each in group.exceptions]
    return next((cause for cause in causes if not isinstance(cause, TercetError)), causes[0])


# ---- which program serves a request --------------------------------------------------------------------------

# Number of previous versions to which the router can return.
REMEMBERED = 16


@dataclass(frozen=True, eq=False)
class Version:
    """A plan whose programs are loaded, one for each name in it. It serves to their end the requests that it began."""

    number: int
    plan: Plan
    programs: Mapping[str, Program]


@dataclass(frozen=True)
class Chosen:
    """The program of one request, and the version that it belongs to."""

    version: int
    name: str
    program: Program


@dataclass(frozen=True)
class Return:
    """A return of the router to an earlier version, after ``program`` had ``failures`` in a row."""

    from_version: int
    to_version: int
    program: str
    failures: int
    error: str


class Routing:
    """The version in use, the versions before it, and the consecutive ``failures`` of each program in use.

    After ``return_after`` consecutive failures of a program the previous version is used, if there is one; 0 means
    never.
    """

    def __init__(self, first: Version, return_after: int) -> None:
        self.current = first
        self.returned: Return | None = None
        self._return_after = return_after
        self._before: list[Version] = []
        self.failures: Counter[str] = Counter()
        self._chosen_by_name: dict[str, Chosen] = {}

    @property
    def previous(self) -> Version | None:
        """The version to which the router returns from a failing one; None without one."""
        return self._before[-1] if self._before else None

    def choose(self, headers: Mapping[str, str], model: str, draw: float) -> Chosen:
        """Return the program of a request; ``draw`` is a random number from ``[0, 1)``."""
        plan = self.current.plan
        if plan.program is not None and not plan.rules:
            return self._chosen(plan.name or plan.program)
        rule = next((rule for rule in plan.rules if rule.covers(headers, model)), None)
        if rule is not None:
            return self._chosen(rule.label)
        value = headers.get(plan.sticky.lower()) if plan.sticky is not None else None
        if value is not None:  # a digest, so that every process and every start chooses the same arm
            draw = int.from_bytes(hashlib.sha256(value.encode()).digest()[:6], "big") / 2**48
        share = plan.shares[chosen_by_weight([share.weight for share in plan.shares], draw)]
        return self._chosen(share.label)

    def called(self, name: str) -> Chosen | None:
        return self._chosen(name) if name in self.current.programs else None

    def swap(self, version: Version) -> None:
        """Use another version from now on; the router returns to the present one after failures."""
        self._before = [*self._before, self.current][-REMEMBERED:]
        self._use(version)
        self.returned = None

    def forget(self) -> None:
        """Drop the previous versions, so that the router does not return to them."""
        self._before = []

    def succeeded(self, chosen: Chosen) -> None:
        # One success is enough: only failures in a row show that a program is broken, and not the requests.
        if chosen.version == self.current.number:
            self.failures.pop(chosen.name, None)

    def failed(self, chosen: Chosen, error: str) -> Return | None:
        """Record that a program failed by its own fault; return the return to an earlier version, or None.

        A failure of an earlier version counts for nothing.
        """
        if chosen.version != self.current.number:
            return None
        self.failures[chosen.name] += 1
        failures = self.failures[chosen.name]
        if not self._before or not self._return_after or failures < self._return_after:
            return None
        # The failing version does not become the previous one: a second return goes further back, never to and fro.
        *self._before, previous = self._before
        self.returned = Return(self.current.number, previous.number, chosen.name, failures, error)
        self._use(previous)
        return self.returned

    def _use(self, version: Version) -> None:
        self.current = version
        self.failures = Counter()
        self._chosen_by_name = {}

    def _chosen(self, name: str) -> Chosen:
        chosen = self._chosen_by_name.get(name)
        if chosen is None:
            chosen = Chosen(self.current.number, name, self.current.programs[name])
            self._chosen_by_name[name] = chosen
        return chosen


# The version of programs outside any plan: a client named them in a header, or the request needs them.
NO_VERSION = 0
LoadArm = Callable[[Arm], Program]
RETURN_AFTER = 5
ON_FAILURE, MOVES, OBJECTIVES = RetryBudget(), MoveSettings(), Objectives()
_NO_DEADLINE = nullcontext()


class Service:
    """The service of a router: it runs programs over ``fleet``."""

    def __init__(
        self,
        fleet: EngineFleet,
        program: str,
        program_args: Mapping[str, str],
        metrics: Metrics,
        # Failures in a row after which the previous version is used again.
        return_after: int = RETURN_AFTER,
        # The budget of a sequence whose engine or program fails.
        retries: RetryBudget = ON_FAILURE,
        # Seconds from the request to the end of its last sequence.
        request_timeout: float | None = None,
        # Seconds that a sequence waits for an engine before a retry, while none answers. Attempts in this time that no
        # engine took do not count.
        wait_for_engine: float = 0.0,
        moves: MoveSettings = MOVES,
        # True if traces, which clients get, contain the errors that programs raise; otherwise only the log does.
        tells_faults: bool = False,
        # True if one engine continues a sequence also after a fault of its program; otherwise ProgramFailed ends it.
        retries_faults: bool = True,
        # Loads the first program.
        load_arm: LoadArm = load_anywhere,
        objectives: Objectives = OBJECTIVES,
    ) -> None:
        self.fleet = fleet
        self._clock = fleet.costs.clock
        self.sequences = RunningSequences()
        # The sequences that ended, and those that met the objectives.
        self.attainments = Attainments(objectives)
        # The requests of the last minutes; set at a planner's first call.
        self.seen: SeenRequests | None = None
        self.moves = Moves(fleet, metrics, moves)
        fleet.on_proposal = Proposals(self.sequences, self.moves).heard
        self._retries = retries
        self._request_timeout = request_timeout
        self._wait_for_engine = wait_for_engine
        self._tells_faults = tells_faults
        self._retries_faults = retries_faults
        # The plan that was set last; the plan in use differs from it after an automatic return.
        self.wanted = Plan(program=program, args=program_args)
        self.routing = Routing(Version(NO_VERSION + 1, self.wanted, _load(self.wanted, load_arm)), return_after)
        self.metrics = metrics
        self.observers: list[SequenceObserver] = []
        self.streams: dict[OutputStream, RunningSequence] = {}
        # None if sessions are not used.
        self.sessions: Sessions | None = None
        # None without warm start.
        self.hot_contexts: HotContexts | None = None
        self._given_up_by: TercetError | None = None
        metrics.program_version.set(self.routing.current.number)

    # ---- changing programs -----------------------------------------------------------------------------------

    async def load(self, plan: Plan, load_arm: LoadArm = load_anywhere) -> Mapping[str, Program]:
        """Load the programs of a plan; raise :class:`~tercet.protocol.TercetError` for the first that does not load."""
        return await run_in_thread(_load, plan, load_arm)  # it runs the user's module, which may take long

    def use(self, number: int, plan: Plan, programs: Mapping[str, Program]) -> None:
        """Serve new requests by ``plan``; running requests end with the programs with which they began."""
        self.routing.swap(Version(number, plan, programs))
        self.wanted = plan
        self.metrics.program_version.set(number)

    def program_called(self, name: str) -> Chosen:
        """Return the program that a client names: one of the plan's, or a built-in one.

        Raises :class:`~tercet.protocol.BadRequest` for any other.
        """
        chosen = self.routing.called(name)
        if chosen is not None:
            return chosen
        if name not in BUILT_IN:
            known = ", ".join(sorted({*BUILT_IN, *self.routing.current.programs}))
            raise BadRequest(f"{PROGRAM_HEADER}: there is no program {name!r}; choose {known}", PROGRAM_HEADER)
        return Chosen(NO_VERSION, name, load_program(name))

    # ---- serving ---------------------------------------------------------------------------------------------

    def run(
        self, request: Request, trace: Trace, model: str = "", began: float | None = None,
        on_sequence: Callable[[RunningSequence], object] = lambda _: None,
    ) -> OutputStream:  # fmt: skip
        """Return the outputs of a request's program, which starts when they are read; ``trace`` gets its events.

        ``model`` is the name of the model in the request, for rules; ``began`` is the start of the request's timeout
        (:func:`time.monotonic`), None for now. ``on_sequence`` gets the sequence when it begins. The stream raises the
        program's :class:`~tercet.protocol.TercetError` once the budget for retries is spent, and
        :class:`~tercet.protocol.DeadlineExceeded`. The request has passed :func:`entering`.
        """
        began = time.monotonic() if began is None else began
        return OutputStream(partial(self._serve, request, trace, model, began, on_sequence))

    def remember(self, seen: SeenRequests) -> SeenRequests:
        """Record requests in ``seen`` from now on, for a planner; return ``seen``."""
        self.seen = seen
        self.observers.append(seen)
        return seen

    def give_up(self, error: TercetError) -> None:
        """End all running sequences, and all later ones, with ``error``."""
        # First the error, then the streams: a sequence that begins in between ends by itself.
        self._given_up_by = error
        for stream in tuple(self.streams):
            stream.give_up(error)

    def break_off(self, error: TercetError) -> None:
        """End sequences that have tokens with ``error``: another model must not continue them."""
        # A sequence without tokens may begin on either model: its client has seen nothing yet.
        for stream, sequence in tuple(self.streams.items()):
            if sequence.tokens:
                stream.give_up(error)

    async def _serve(
        self, request: Request, trace: Trace, model: str, began: float,
        on_sequence: Callable[[RunningSequence], object], stream: OutputStream,
    ) -> None:  # fmt: skip
        """Choose a program, attempt, retry: a sequence from its request to its end."""
        # Choose. The program that is in use now serves the sequence, whatever operators change meanwhile.
        chosen = self._choose(request, model)
        trace.program = chosen.name
        tried_at, request = self._clock(), self.fleet.adapters.pinned(request)
        sequence = RunningSequence(request, chosen.name, self._retries, tried_at, self._wait_for_engine)
        on_sequence(sequence)
        fleet = FleetView(self.fleet, trace, sequence.generates, request)
        program = partial(chosen.program, request, fleet)
        if self._given_up_by is not None:  # the router is ending; its streams were ended before this one began
            raise self._given_up_by
        # What engines leave to the background may be nothing for long; a batch ends with its window.
        timeout = None if request.background else self._request_timeout
        deadline = _NO_DEADLINE if timeout is None else _deadline(stream, began + timeout, timeout)
        # What learns of the sequence here (metrics, deadline, observers, sessions) learns of its end on every exit.
        attempts = Attempts(self, chosen, sequence, fleet, stream)
        with attempts, self.sequences.running(sequence), self.metrics.sequence(), deadline:
            if self.sessions is not None:
                await self.sessions.begins(request)
            # Attempt. Without a failure the sequence has ended. Every attempt writes to the same stream and sequence,
            # which is why one engine can continue after the client's tokens, and no token is sent twice.
            while (failure := await attempts.run(program)) is not None:
                # Retry or end. There are three cases:
                # 1. The program is at fault. Its first fault in a sequence counts against its version, and one engine
                #    continues, unless the settings forbid that.
                # 2. The client's request is at fault: another attempt would fail again.
                # 3. The fleet is at fault: one engine continues within the budget.
                is_own_fault = not isinstance(failure, TercetError)
                if isinstance(failure, BadRequest):
                    # It concerns the client's request, unless it names one of the program's own parameters, or an
                    # argument of a verb that the program chose: the picker, or the bounds of a range.
                    verb_arguments = {"pick", "begin", "end"}
                    is_own_fault = failure.param in {*verb_arguments, *inspect.signature(chosen.program).parameters}
                is_refused = isinstance(failure, BadRequest) and not is_own_fault
                retry: Retry | None = None
                if self._retries_faults or not is_own_fault:
                    if is_own_fault and not sequence.attempt:
                        self._failed(chosen, failure, request.seq_id)
                    # Without an engine for a role, a client who has no token yet gets that error at once.
                    if not is_refused and (sequence.answered or not isinstance(failure, RoleUnavailable)):
                        # Attempts that no engine took do not count. An engine without progress since the attempt began
                        # has not taken it.
                        taken = not isinstance(failure, EngineNotReached)
                        if isinstance(failure, EngineUnreachable) and failure.blames is not None:
                            taken = self.fleet.liveness.progressed_since(failure.blames, tried_at)
                        retry = sequence.next_attempt(self._clock(), taken)
                if retry is None:
                    attempts.ends("left" if is_refused else "failed")
                    attainment = self.attainments.of(request)
                    if attainment is not None and not is_refused:  # a refusal says nothing about the objectives
                        attainment.failed()
                        self.metrics.objectives(attainment.name, met=False)
                    if isinstance(failure, BrokenOff):  # its client gets the engine's last output
                        attempts.finish(failure.output)
                        return
                    if is_own_fault:
                        why = f"the program {chosen.name} failed at {request.seq_id}: {_words_to_clients(failure)}"
                        raise ProgramFailed(why) from failure
                    raise failure
                event = self._tell_next_attempt(chosen, failure, is_own_fault, sequence, fleet)
                event.at = self._clock() - sequence.began
                trace.events.append(event)
                await asyncio.sleep(retry.pause)
                # Without an engine the attempt would fail at once and use up the budget.
                for _ in range(int(self._wait_for_engine / POLL_INTERVAL_S)):
                    if self.fleet.health.answers:
                        break
                    await asyncio.sleep(POLL_INTERVAL_S)
                tried_at = self._clock()
                trace.program = sequence.program
                program = partial(one_engine, retry.request, fleet, retry.output)

    def _tell_next_attempt(
        self, chosen: Chosen, error: BaseException, is_own_fault: bool, sequence: RunningSequence, fleet: FleetView
    ) -> TraceEvent:
        """Count and log a retry or a fallback of a sequence; return the event for its trace."""
        # The engine that the view recorded for this very error; an error of the program or of a pick has none.
        engine = next((name for name, failure in fleet.failed.items() if failure is error), "")
        tokens = len(sequence.tokens)
        code = error.code if isinstance(error, TercetError) and not is_own_fault else ProgramFailed.code
        traced = _words(error) if self._tells_faults or not is_own_fault else _words_to_clients(error)
        stage = "after_first_token" if sequence.answered else "before_first_token"
        self.metrics.retries.labels(code, stage).inc()
        said = {
            "seq_id": sequence.request.seq_id, "engine": engine, "code": code, "tokens": tokens, "reason": _words(error)
        }  # fmt: skip
        if sequence.attempt > 1 or chosen.name == ONE_ENGINE:  # one engine served it before, too
            logs.RETRY.tell(program=ONE_ENGINE, **said)
            return TraceEvent(RETRY, engine, end=tokens, code=code, reason=f"{ONE_ENGINE} again: {traced}")
        sequence.program = f"{chosen.name} -> {ONE_ENGINE}"
        self.metrics.fallbacks.labels(chosen.name, code).inc()
        logs.FALLBACK.tell(program=chosen.name, to=ONE_ENGINE, **said)
        return TraceEvent(FALLBACK, engine, end=tokens, code=code, reason=f"{sequence.program}: {traced}")

    def _choose(self, request: Request, model: str) -> Chosen:
        if request.sampling_params.get("prompt_logprobs") is not None:
            # Every prompt position must be computed on the engine that answers.
            return Chosen(NO_VERSION, ONE_ENGINE, one_engine)
        wanted = request.headers.get(PROGRAM_HEADER)
        if wanted is not None:
            return self.program_called(wanted)
        return self.routing.choose(request.headers, model, random.random())

    def _failed(self, chosen: Chosen, error: BaseException, seq_id: str) -> None:
        """Count a fault of a program, and return to an earlier version after too many.

        Only the first of consecutive failures is logged with a traceback; for others the log has their retries.
        """
        self.metrics.program_failures.labels(chosen.name).inc()
        if not self.routing.failures.get(chosen.name):
            logs.PROGRAM_FAILED.tell(error, program=chosen.name, seq_id=seq_id, reason=_words(error))
        returned = self.routing.failed(chosen, _words(error))
        if returned is not None:
            self.metrics.program_returns.labels(chosen.name).inc()
            self.metrics.program_version.set(returned.to_version)
            why = f"it failed {returned.failures} times in a row, the last time: {returned.error}"
            logs.PROGRAM_RETURNED.tell(
                version=returned.from_version, to_version=returned.to_version, program=returned.program, reason=why
            )


# Beginning of the names of sampling parameters in engines' refusals.
OF_SAMPLING = "sampling_params."


class RequestRun:
    """One sequence of an HTTP request; ``stream`` has its outputs, which run its program while they are read.

    The request's context keeps its trace. Raises :class:`~tercet.protocol.BadRequest` as :func:`entering` does.
    """

    def __init__(self, service: Service, request: Request, context: RequestContext) -> None:
        context.prepared()
        self._trace = Trace()
        self._service, self._context = service, context
        request = entering(request)
        self._seq_id = request.seq_id

        def begins(sequence: RunningSequence) -> None:
            context.sequences.append(sequence)
            if (sessions := service.sessions) is not None:
                # The context knows only at its end whether the answer calls a tool.
                context.when_ended.append(lambda it: sessions.answered(sequence.request, calls_tool=it.calls_tool))

        self.stream = service.run(request, self._trace, context.asked.model or "", context.began, begins)
        context.traces.append(self._trace)

    def failed(self, error: TercetError) -> TercetError:
        """Count a sequence that ended in an error, log the error unless the client caused it; return it for clients.

        An engine's refusal of a sampling parameter then names the field that the client sent, as
        :class:`~tercet.wire.serving.server_access.Asked` has them by parameter.
        """
        self._service.metrics.errors.labels(error.code).inc()
        if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            cause = error.__cause__ if isinstance(error, ProgramFailed) else None  # clients do not get it
            reason = error.message if cause is None else f"{error.message} ({type(cause).__name__}: {cause})"
            logs.REQUEST_FAILED.tell(seq_id=self._seq_id, code=error.code, reason=reason)
        if not isinstance(error, BadRequest) or error.param is None or not error.param.startswith(OF_SAMPLING):
            return error
        parameter = error.param.removeprefix(OF_SAMPLING)
        first, _, rest = parameter.partition(".")
        field = self._context.asked.parameters.get(first, "")
        # A part of a structure has its place in the client's own field only.
        own = f"{field}.{rest}" if rest and field.endswith(first) else field or parameter
        return BadRequest(error.message.replace(error.param, own, 1), own)

    def prompt_usage(self, usage: Usage | None) -> Usage:
        """Return the usage with the cached tokens of the engine that prefilled; KV that was sent counts as computed."""
        sent = self._trace.filled()
        if sent is None:
            return usage or Usage()
        # An engine that generates without KV that it received has prefilled itself: its own count is true then.
        reserved = next((event.cached for event in reversed(self._trace.events) if event.verb == "prep_recv"), 0)
        if usage is not None and not usage.received and usage.cached <= reserved:
            return usage
        return Usage(cached=sent.cached)


def entering(request: Request) -> Request:
    """Return the request as programs and engines get it: with an id that engines accept.

    Raises :class:`~tercet.protocol.BadRequest`, which names the field, for values that no engine accepts. Every layer
    that reads clients' requests relies on this check: what passes here is never the fault of a program.
    """
    if not request.prompt:
        raise BadRequest("prompt: is empty; send at least one token", "prompt")
    if not LEAST_PRIORITY <= request.priority <= MOST_PRIORITY:
        raise BadRequest(
            f"priority: must be an integer from {LEAST_PRIORITY} to {MOST_PRIORITY}, which is 64 bits", "priority"
        )
    most, salt = request.sampling_params.get("max_tokens"), request.cache_salt
    if most is not None and (type(most) is not int or most < 1):
        raise BadRequest(f"max_tokens: must be an integer of at least 1, is {most!r:.100}", "max_tokens")
    if salt is not None and not 0 < len(salt) <= LONGEST_SALT:
        raise BadRequest(f"cache_salt: must have 1 to {LONGEST_SALT} characters, has {len(salt)}", "cache_salt")
    fields = {**request.sampling_params, "cache_salt": salt, "user": request.user, "session_id": request.session}
    found = unwritable_field(fields)
    if found is not None:
        raise BadRequest(f"{found}: has text or a number that cannot be sent to an engine", found)
    seq_id = sequence_id(request.seq_id)
    return request if seq_id == request.seq_id else msgspec.structs.replace(request, seq_id=seq_id)


def _load(plan: Plan, load_arm: LoadArm = load_anywhere) -> dict[str, Program]:
    """Load a plan's programs by name; raise :class:`~tercet.protocol.TercetError` for the first that does not load."""
    return {arm.label: load_arm(arm) for arm in plan.arms}


def _words_to_clients(error: BaseException) -> str:
    """Return the text about a program's fault for clients, who must not see errors that the program raised."""
    return str(error) if isinstance(error, ProgramFault) else "the router's log says why"


def _words(error: BaseException) -> str:
    """Return the text of an error for the log."""
    if isinstance(error, ProgramFault):
        return str(error)
    return error.message if isinstance(error, TercetError) else f"{type(error).__name__}: {error}"


@contextmanager
def _deadline(stream: OutputStream, at: float, timeout: float) -> Generator[None]:
    """Fail the stream and cancel its task at a time of :func:`time.monotonic`, unless the context ends before."""
    task, expired = asyncio.current_task(), False
    assert task is not None

    def expire() -> None:
        nonlocal expired
        if not stream.over:
            stream.fail(DeadlineExceeded(f"the request did not end within {timeout:g} s"))
            expired = task.cancel()

    timer = asyncio.get_running_loop().call_later(at - time.monotonic(), expire)
    try:
        yield
    finally:
        timer.cancel()
        if expired:
            task.uncancel()
