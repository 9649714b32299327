"""Bounds for the grammars of structured outputs: what one client asks for must not occupy an engine's core.

vLLM compiles in threads of its core, where nothing can end it, and asks a grammar for the allowed tokens on the core's
main thread, once for each token. Both may take minutes and gigabytes, for a text of thirty letters. So:

- A grammar is first compiled, and followed for some tokens, by a process that the kernel ends at its limits
  (:mod:`.grammar_process`), in an order in which cheap grammars do not wait for expensive ones
  (:class:`GrammarQueue`). Only what was fine is compiled in the core, in the same order. Verdicts are kept by digest.
- What is only text, such as a few choices, is compiled at once: it takes as long as its letters.
- A request waits for its grammar for a bounded time, and a bounded number of grammars wait. A request whose grammar
  could not be tried for such a reason fails as one that may be sent again, never as one that is wrong.
- A grammar that all the same becomes slow while it is followed ends its own request, and all that have the same.
- A grammar that allows no first token is refused, as for a rule that begins with itself (``root ::= root "a"``): vLLM
  would sample a random token, and end the request as if the engine had failed.

The last output of a request that ends for one of these reasons has it as its stop reason, for the engine's API server
(:mod:`..edge.llm_requests`).

Relies on ``StructuredOutputManager.grammar_init`` putting a future into the request's ``structured_output_request``,
whose failure ends only that request, in the next ``Scheduler.update_from_output``, without the reason; on
``_create_grammar``, which compiles for any thread; on a grammar's ``fill_bitmask``, which leaves zeros for tokens that
may not follow; on the scheduler ending a request whose ``accept_tokens`` returns false; and on ``Executor.__init__``
running in the core before it has a device.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import re
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.executor.abstract import Executor
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

from tercet.vllm_plugin.core.grammar_process import (
    LONG_SECONDS,
    MOST_LONG,
    NO_TEXT,
    TOO_SLOW,
    GrammarProcess,
    TryJob,
    TryOutcome,
    compile_without_own_timeout,
)
from tercet.vllm_plugin.hooks import Method, wrap

LIMITS = (0.1, 1.0, 8.0)
"""CPU seconds of a grammar's first, second and third try."""
PLACES = 2
MOST_VERDICTS = 4096
MOST_WAITING = 256
"""Grammars that may wait: as many first tries take about 13 s."""


@dataclass(frozen=True)
class Try:
    """One try of the grammar ``key``, with ``limit`` CPU seconds; ``level`` counts the shorter tries before it."""

    key: Hashable
    level: int

    @property
    def limit(self) -> float:
        return LIMITS[self.level]


@dataclass
class _WaitingGrammar:
    size: float
    arrived: int
    level: int = 0
    losses: int = 0

    @property
    def order(self) -> tuple[int, float, int]:
        return self.level, self.size, self.arrived


@dataclass
class GrammarQueue:
    """The order in which grammars are tried, ``places`` at a time: a state machine without clocks or processes.

    A grammar is tried by a process with a limit of CPU time: first a short one, and, each time the limit ends the
    process, later with the next longer one. So a usual grammar never waits for more than a few short tries of others,
    no matter how many expensive ones arrive with it. Among grammars with the same limit, the smallest one is first,
    then the oldest. The longest tries never occupy the last free place. A full queue gives up the grammar that would be
    tried last, so expensive ones cannot keep others out.
    """

    places: int = PLACES
    _waiting: dict[Hashable, _WaitingGrammar] = field(default_factory=dict[Hashable, _WaitingGrammar])
    _running: dict[Hashable, tuple[Try, _WaitingGrammar]] = field(
        default_factory=dict[Hashable, tuple[Try, _WaitingGrammar]]
    )
    _verdicts: OrderedDict[Hashable, str] = field(default_factory=OrderedDict[Hashable, str])
    _arrived: int = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def verdict(self, key: Hashable) -> str | None:
        """Return why the grammar is refused, "" if it is known to be fine, None if it is not known."""
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
        return self._verdicts.get(key)

    def add(self, key: Hashable, size: float) -> Hashable | None:
        """Let a grammar wait for its tries, unless it does so already; return the one that is given up for it.

        None is given up while there is room. The new grammar itself is given up if it would be tried last.
        """
        if key in self._waiting or key in self._running:
            return None
        self._arrived += 1
        self._waiting[key] = _WaitingGrammar(size, self._arrived)
        if len(self._waiting) <= MOST_WAITING:
            return None
        # By the order of tries, not of arrival: a client with many expensive grammars gives up its own.
        last = max(self._waiting, key=lambda each: self._waiting[each].order)
        del self._waiting[last]
        return last

    def drop(self, key: Hashable) -> bool:
        """Forget a grammar that no request needs any more; return False if it is not waiting but tried now."""
        return self._waiting.pop(key, None) is not None

    def next_try(self) -> Try | None:
        """Return the next try, which begins now, or None if all places are taken or no grammar waits."""
        if len(self._running) >= self.places:
            return None
        last = len(LIMITS) - 1
        # One place is always left for short tries, unless there is only one.
        longest = sum(each.level == last for each, _ in self._running.values())
        may_be_long = longest < max(1, self.places - 1)
        able = [key for key, each in self._waiting.items() if each.level < last or may_be_long]
        if not able:
            return None
        key = min(able, key=lambda each: self._waiting[each].order)
        found = Try(key, self._waiting[key].level)
        self._running[key] = found, self._waiting.pop(key)
        return found

    def ended(self, tried: Try, outcome: TryOutcome, why: str = "") -> bool:
        """Record what a try came to. Return True if that is the grammar's end: its verdict is known, or it is lost.

        A grammar that was lost twice has no verdict: it may be fine, and a later request may try it again.
        """
        _, waiting = self._running.pop(tried.key)
        # Lost once may be chance: something else has ended the process. Twice ends it, since its requests wait.
        if outcome is TryOutcome.LOST:
            waiting.losses += 1
            if waiting.losses > 1:
                return True
            self._waiting[tried.key] = waiting
            return False
        if outcome is TryOutcome.OVER_LIMIT:
            if tried.level < len(LIMITS) - 1:
                waiting.level += 1
                self._waiting[tried.key] = waiting
                return False
            why = f"takes more than {tried.limit:g} s of CPU time to compile"
        self.decide(tried.key, "" if outcome is TryOutcome.FINE else why)
        return True

    def decide(self, key: Hashable, why: str) -> None:
        """Record a verdict: why the grammar is refused, or "" if it is fine. The oldest verdicts are forgotten."""
        self._verdicts[key] = why
        self._verdicts.move_to_end(key)
        while len(self._verdicts) > MOST_VERDICTS:
            self._verdicts.popitem(last=False)


logger = logging.getLogger(__name__)
# A grammar may take this long for a token, and owe as much as the second number, both in CPU seconds.
FREE_SECONDS, MOST_OWED_SECONDS = 0.02, 2.0
# MOST_LONG long tokens (LONG_SECONDS) within this time make a grammar too slow, for all requests that have it.
LONG_WITHIN_SECONDS = 60.0
LONGEST_WAIT_SECONDS = 30.0
"""Seconds that a request waits for the tries of its grammar."""
LONGEST_REASON = 400
REFUSED, UNTRIED = "tercet: refused: ", "tercet: untried: "
"""Beginnings of stop reasons: the request is wrong; it may be sent again."""
_ALWAYS = "structured_outputs: this structure could not be tried: "
BUSY = _ALWAYS + "others are before it; send the request again later"
LOST = _ALWAYS + "the engine's process for structures was lost; send the request again later"
# Letters of a structure of texts alone that is compiled at once.
MOST_PLAIN = 2000
_PLAIN = {
    StructuredOutputOptions.GRAMMAR: re.compile(r'root ::= "[^"\\\n]*+"(?: \| "[^"\\\n]*+")*+\s*+'),
    StructuredOutputOptions.REGEX: re.compile(r"[\w ,:;/-]*+"),
    StructuredOutputOptions.JSON_OBJECT: re.compile(""),
}


def bound_grammar_time() -> None:
    """Add the bounds to the cores of this process."""

    def init(original: Method, manager: Any, request: Any) -> None:
        if request.structured_output_request is None:
            original(manager, request)
            return
        if not manager._use_async_grammar_compilation:  # all ranks must have the grammar in the same step
            original(manager, request)
            wanted = request.structured_output_request
            wanted.grammar = checked(wanted._grammar, manager.backend)
            return
        backend = request.sampling_params.structured_outputs._backend
        # From 0.33 on vLLM refuses a request for another backend than the first one.
        if manager.backend is None or getattr(manager, "backend_name", None) not in (None, backend):
            # vLLM makes the backend for the first structure: here the simplest one, and the request's is tried first.
            first, structured = copy.copy(request), copy.copy(request.structured_output_request)
            structured.structured_output_key = (StructuredOutputOptions.REGEX, "a")
            first.structured_output_request = structured
            original(manager, first)
        found = _bounded.get(manager)
        if found is None:
            compile_without_own_timeout()
            process = _process_of(manager.vllm_config)
            # Otherwise the first try would pay for imports and the tokenizer, within its limit of CPU time.
            process.warm(backend)
            found = _bounded[manager] = BoundedGrammars(manager, process.attempt)
        request.structured_output_request.grammar = found.grammar(request)

    def begin(original: Method, executor: Any, vllm_config: Any, *args: Any, **more: Any) -> None:
        if not vllm_config.model_config.skip_tokenizer_init:
            _process_of(vllm_config).fork()
            from vllm.v1.core.sched.scheduler import Scheduler  # no other process needs it

            wrap(Scheduler, "update_from_output", with_reasons)
        original(executor, vllm_config, *args, **more)

    wrap(StructuredOutputManager, "grammar_init", init)
    wrap(Executor, "__init__", begin)


def with_reasons(original: Method, scheduler: Any, *args: Any, **more: Any) -> Any:
    """Give outputs of failed grammars the reason as their stop reason; vLLM 0.33's blames the client for all."""
    # Before the original method, which empties the list.
    failed = scheduler.grammar_compile_error_reqs
    if not failed:
        return original(scheduler, *args, **more)
    requests = [request for each in failed if (request := scheduler.requests.get(each)) is not None]
    reasons = {each.request_id: reason_of(each.structured_output_request.grammar) for each in requests}
    found = original(scheduler, *args, **more)
    for outputs in found.values():
        for output in outputs.outputs:
            if output.finished and (reason := reasons.get(output.request_id)) is not None:
                output.stop_reason = reason
                if getattr(output, "error", None) is not None:
                    output.error = None
    return found


class GrammarRefused(ValueError):
    """Raised for a grammar that is wrong or takes too much; the text says why."""


class GrammarUntried(Exception):
    """Raised for a grammar about which nothing is known, since it was not tried."""


def reason_of(error: object) -> str:
    """Return a grammar's failure as a stop reason."""
    if isinstance(error, GrammarUntried):
        return UNTRIED + str(error)
    said = str(error) if isinstance(error, GrammarRefused) else f"cannot be compiled: {error}"
    return f"{REFUSED}structured_outputs: {said}"[:LONGEST_REASON]


_bounded: weakref.WeakKeyDictionary[StructuredOutputManager, BoundedGrammars] = weakref.WeakKeyDictionary()
_process: GrammarProcess | None = None


def _process_of(vllm_config: Any) -> GrammarProcess:
    global _process
    if _process is None:
        _process = GrammarProcess(vllm_config)
    return _process


def checked(compiled: Any, backend: Any) -> Any:
    """Return a compiled grammar, or the failure, as vLLM keeps it; a grammar that allows no token is a failure."""
    if not isinstance(compiled, Future):
        try:
            require_beginning(backend, compiled)
        except ValueError as error:
            return _failed(error)
    return compiled


def _failed(error: Exception) -> Future[Any]:
    failed: Future[Any] = Future()
    failed.set_exception(error)
    return failed


def require_beginning(backend: Any, grammar: Any) -> None:
    """Raise :class:`GrammarRefused` for a grammar that has not begun and allows no token."""
    mask = backend.allocate_token_bitmask(1)
    grammar.fill_bitmask(mask, 0)
    if not mask.any():
        raise GrammarRefused(NO_TEXT)


@dataclass(eq=False)
class _WaitingRequest:
    """A request, the future of its grammar, and the time until which it waits."""

    request: Any
    grammar: Future[Any]
    until: float

    def fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):  # it has waited too long, and failed already
            self.grammar.set_exception(error)


@dataclass(eq=False)
class _Wanted:
    """A grammar that requests wait for."""

    kind: StructuredOutputOptions
    text: str
    backend: str
    requests: list[_WaitingRequest] = field(default_factory=list[_WaitingRequest])


class BoundedGrammars:
    """The grammars of one manager. ``attempt`` tries one for a backend and waits for its outcome."""

    def __init__(self, manager: Any, attempt: Callable[[str, TryJob], tuple[TryOutcome, str]]) -> None:
        self._manager, self._attempt = manager, attempt
        self._queue = GrammarQueue()
        # One lock for queue and requests: threads of tries and the core's main thread change both.
        self._wanted = dict[Hashable, _Wanted]()
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._waits = threading.Condition(lock)  # notified of the first request that waits
        self._paces = weakref.WeakValueDictionary[Hashable, StructurePace]()
        self._threads = 0
        self._timer: threading.Thread | None = None
        self._backend: tuple[Any, str] = (None, "")

    def grammar(self, request: Any) -> Future[Any]:
        """Return the request's grammar, to come; it fails with :class:`GrammarRefused` or :class:`GrammarUntried`."""
        kind, text = request.structured_output_request.structured_output_key
        if self._backend[0] is not self._manager.backend:  # the first structured output decides for all
            self._backend = self._manager.backend, request.sampling_params.structured_outputs._backend
        backend = self._backend[1]
        key = (backend, kind.name, hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
        plain = _PLAIN.get(kind)
        with self._changed:
            verdict = self._queue.verdict(key)
            if verdict:
                return _failed(GrammarRefused(verdict))
            if verdict == "" or (plain is not None and len(text) <= MOST_PLAIN and plain.fullmatch(text)):
                return self._manager.executor.submit(self._compiled, key, request)
            waiting = _WaitingRequest(request, Future(), time.monotonic() + LONGEST_WAIT_SECONDS)
            if not any(wanted.requests for wanted in self._wanted.values()):
                self._waits.notify()
            self._wanted.setdefault(key, _Wanted(kind, text, backend)).requests.append(waiting)
            # The try measures the time; for the order among equal tries the length is enough (ADR 18).
            given_up = self._queue.add(key, len(text))
            if given_up is not None:
                self._give_up(self._wanted.pop(given_up).requests)
            if self._timer is None:
                self._timer = threading.Thread(target=self._end_waits, name="grammars' waits", daemon=True)
                self._timer.start()
            if self._threads < self._queue.places:
                self._threads += 1
                threading.Thread(target=self._work, name=f"grammars {self._threads}", daemon=True).start()
            self._changed.notify()
        return waiting.grammar

    def too_slow(self, key: Hashable) -> None:
        """Refuse a grammar from now on, since it was too slow for a request."""
        logger.warning("a structured output ends its requests: it %s", TOO_SLOW)
        with self._changed:
            self._queue.decide(key, TOO_SLOW)

    def _compiled(self, key: Hashable, request: Any) -> WatchedGrammar:
        grammar = self._manager._create_grammar(request)
        require_beginning(self._manager.backend, grammar)
        with self._changed:
            pace = self._paces.get(key)
            if pace is None:
                pace = self._paces[key] = StructurePace(lambda: self.too_slow(key))
        return WatchedGrammar(grammar, pace, request)

    def _end_waits(self) -> None:
        """Fail requests that have waited for too long; a try that runs for them goes on, and its verdict is kept."""
        with self._changed:
            while True:
                soonest = min(
                    (each.until for wanted in self._wanted.values() for each in wanted.requests), default=None
                )
                self._waits.wait(None if soonest is None else max(0.0, soonest - time.monotonic()))
                now = time.monotonic()
                for key, wanted in list(self._wanted.items()):
                    late = [each for each in wanted.requests if each.until <= now]
                    wanted.requests = [each for each in wanted.requests if each.until > now]
                    self._give_up(late)
                    if not wanted.requests and self._queue.drop(key):
                        del self._wanted[key]

    def _give_up(self, requests: list[_WaitingRequest]) -> None:
        if requests:
            logger.warning(
                "%d requests are refused with 503: the structures that wait before theirs take too long; "
                "find the client that sends many expensive ones",
                len(requests),
            )
        for each in requests:
            each.fail(GrammarUntried(BUSY))

    def _work(self) -> None:
        while True:
            with self._changed:
                while (tried := self._next()) is None:
                    self._changed.wait()
                wanted = self._wanted[tried.key]
            try:
                outcome, why = self._attempt(
                    wanted.backend, TryJob(wanted.kind.name, wanted.text, tried.limit, tried.level)
                )
                if outcome is TryOutcome.FINE:
                    # In this place of the queue, so that expensive grammars do not occupy the core together.
                    with self._changed:
                        first = wanted.requests[:1]
                    for each in first:
                        self._keep(tried.key, each)
                self._finish(tried, outcome, why)
            except Exception:  # the thread goes on with other grammars
                logger.exception("a structured output could not be tried")
                self._finish(tried, TryOutcome.LOST)

    def _next(self) -> Try | None:
        for key, wanted in list(self._wanted.items()):
            if all(each.request.is_finished() for each in wanted.requests) and self._queue.drop(key):
                for each in self._wanted.pop(key).requests:
                    each.grammar.cancel()
        return self._queue.next_try()

    def _finish(self, tried: Try, outcome: TryOutcome, why: str = "") -> None:
        with self._changed:
            if not self._queue.ended(tried, outcome, why):
                self._changed.notify_all()
                return
            verdict = self._queue.verdict(tried.key)
            waiting = self._wanted.pop(tried.key).requests
            self._changed.notify_all()
        if verdict is None:
            logger.error(
                "%d requests are refused with 503: the process that tries structured outputs was lost twice with "
                "theirs; if that goes on, look for its end in the system's log, and give the engine more memory",
                len(waiting),
            )
        for each in waiting:
            if each.grammar.done():
                continue
            if verdict is None:
                each.fail(GrammarUntried(LOST))
            elif verdict:
                each.fail(GrammarRefused(verdict))
            else:
                self._keep(tried.key, each)

    def _keep(self, key: Hashable, waiting: _WaitingRequest) -> None:
        try:
            found = self._compiled(key, waiting.request)
        except Exception as error:
            waiting.fail(error)
        else:
            with suppress(InvalidStateError):  # it has waited too long, and failed already
                waiting.grammar.set_result(found)


class StructurePace:
    """How long the tokens of one structure take, for all its requests; ``on_slow`` is called once."""

    def __init__(self, on_slow: Callable[[], None]) -> None:
        self._on_slow = on_slow
        self._long = deque[float](maxlen=MOST_LONG)
        self.is_slow = False

    def spent(self, seconds: float) -> None:
        if seconds > LONG_SECONDS:
            now = time.monotonic()
            self._long.append(now)
            if len(self._long) == MOST_LONG and now - self._long[0] <= LONG_WITHIN_SECONDS:
                self.end()

    def end(self) -> None:
        if not self.is_slow:
            self.is_slow = True
            self._on_slow()


class WatchedGrammar:
    """A grammar that rejects its request's tokens, which ends the request, once its structure has been too slow."""

    def __init__(self, grammar: Any, pace: StructurePace, request: Any) -> None:
        self._grammar, self._pace, self._request = grammar, pace, request
        self._owed = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grammar, name)

    def fill_bitmask(self, bitmask: Any, idx: int) -> None:
        if self._pace.is_slow:
            bitmask[idx].fill_(-1)  # its next token is rejected
            return
        began = time.thread_time()
        self._grammar.fill_bitmask(bitmask, idx)
        self._spent(time.thread_time() - began)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        if self._pace.is_slow:
            self._request.stop_reason = reason_of(GrammarRefused(TOO_SLOW))
            return False
        began = time.thread_time()
        accepted = self._grammar.accept_tokens(request_id, tokens)
        self._spent(time.thread_time() - began)
        return accepted

    def _spent(self, seconds: float) -> None:
        # A structure is too slow in two ways: several long tokens within a time, counted over all its requests, or the
        # tokens of one request that together take more than each may. Either ends all its requests.
        self._pace.spent(seconds)
        self._owed = max(0.0, self._owed + seconds - FREE_SECONDS)
        if self._owed > MOST_OWED_SECONDS:
            self._pace.end()
