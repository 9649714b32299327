"""Bounds for the grammars of structured outputs: what one client asks for must not occupy an engine's core.

vLLM compiles in threads of its core, where nothing can end it, and asks a grammar for the allowed tokens on the core's
main thread, once for each token. Both may take minutes and gigabytes, for a text of thirty letters. So:

- A grammar is first compiled, and followed for some tokens, by a process that the kernel ends at its limits
  (:mod:`.grammar_process`), in an order in which cheap grammars do not wait for expensive ones
  (:mod:`.grammar_queue`). Only what was fine is compiled in the core, in the same order. Verdicts are kept by digest.
- What is only text, such as a few choices, is compiled at once: it takes as long as its letters.
- A grammar that all the same becomes slow while it is followed ends its own request.
- A grammar that allows no first token is refused, as for a rule that begins with itself (``root ::= root "a"``): vLLM
  would sample a random token, and end the request as if the engine had failed.

Relies on ``StructuredOutputManager.grammar_init`` putting a future into the request's ``structured_output_request``,
whose failure ends only that request; on ``_create_grammar``, which compiles for any thread; on a grammar's
``fill_bitmask``, which leaves zeros for tokens that may not follow; on the scheduler ending a request whose
``accept_tokens`` returns false; and on ``Executor.__init__`` running in the core before it has a device.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.executor.abstract import Executor
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

from tercet.protocol.grammar_bounds import price
from tercet.vllm_plugin.core.grammar_process import (
    NO_TEXT,
    TOO_SLOW,
    GrammarProcess,
    TryJob,
    compile_without_own_timeout,
)
from tercet.vllm_plugin.core.grammar_queue import GrammarQueue, Try, TryOutcome
from tercet.vllm_plugin.start.patching import Method, wrap

logger = logging.getLogger(__name__)
# A grammar may take this long for a token, and owe as much as the second number, both in CPU seconds.
FREE_SECONDS, MOST_OWED_SECONDS = 0.02, 2.0
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
        if manager.backend is None:
            original(manager, _of_backend(request))
        found = _bounded.get(manager)
        if found is None:
            compile_without_own_timeout()
            process = _process_of(manager.vllm_config)
            process.warm(request.sampling_params.structured_outputs._backend)
            found = _bounded[manager] = BoundedGrammars(manager, process.attempt)
        request.structured_output_request.grammar = found.grammar(request)

    def begin(original: Method, executor: Any, vllm_config: Any, *args: Any, **more: Any) -> None:
        if not vllm_config.model_config.skip_tokenizer_init:
            _process_of(vllm_config).fork()
        original(executor, vllm_config, *args, **more)

    wrap(StructuredOutputManager, "grammar_init", init)
    wrap(Executor, "__init__", begin)


_bounded: weakref.WeakKeyDictionary[StructuredOutputManager, BoundedGrammars] = weakref.WeakKeyDictionary()
_process: GrammarProcess | None = None


def _process_of(vllm_config: Any) -> GrammarProcess:
    global _process
    if _process is None:
        _process = GrammarProcess(vllm_config)
    return _process


def _of_backend(request: Any) -> Any:
    """Return a request with the same backend and the simplest structure: vLLM makes the backend for the first one."""
    found, structured = copy.copy(request), copy.copy(request.structured_output_request)
    structured.structured_output_key = (StructuredOutputOptions.REGEX, "a")
    found.structured_output_request = structured
    return found


def checked(compiled: Any, backend: Any) -> Any:
    """Return a compiled grammar, or the failure, as vLLM keeps it; a grammar that allows no token is a failure."""
    if isinstance(compiled, Future):
        return compiled
    try:
        require_beginning(backend, compiled)
    except ValueError as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed
    return compiled


def require_beginning(backend: Any, grammar: Any) -> None:
    """Raise ``ValueError`` for a grammar that has not begun and allows no token."""
    mask = backend.allocate_token_bitmask(1)
    grammar.fill_bitmask(mask, 0)
    if not mask.any():
        raise ValueError(NO_TEXT)


@dataclass(eq=False)
class _Wanted:
    """A grammar that requests wait for: each with the future that its grammar comes to."""

    kind: StructuredOutputOptions
    text: str
    backend: str
    requests: list[tuple[Any, Future[Any]]] = field(default_factory=list[tuple[Any, "Future[Any]"]])


class BoundedGrammars:
    """The grammars of one manager. ``attempt`` tries one for a backend and waits for its outcome."""

    def __init__(self, manager: Any, attempt: Callable[[str, TryJob], tuple[TryOutcome, str]]) -> None:
        self._manager, self._attempt = manager, attempt
        self._queue = GrammarQueue()
        self._wanted = dict[Hashable, _Wanted]()
        self._changed = threading.Condition()
        self._threads = 0
        self._backend: tuple[Any, str] = (None, "")

    def grammar(self, request: Any) -> Future[Any]:
        """Return the future of the request's grammar; it fails with ``ValueError`` for a grammar that is refused."""
        kind, text = request.structured_output_request.structured_output_key
        if self._backend[0] is not self._manager.backend:  # the first structured output decides for all
            self._backend = self._manager.backend, request.sampling_params.structured_outputs._backend
        backend = self._backend[1]
        key = (backend, kind.name, hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
        plain = _PLAIN.get(kind)
        with self._changed:
            verdict = self._queue.verdict(key)
            if verdict:
                refused: Future[Any] = Future()
                refused.set_exception(ValueError(verdict))
                return refused
            if verdict == "" or (plain is not None and len(text) <= MOST_PLAIN and plain.fullmatch(text)):
                return self._manager.executor.submit(self._compiled, key, request)
            grammar: Future[Any] = Future()
            wanted = self._wanted.setdefault(key, _Wanted(kind, text, backend))
            wanted.requests.append((request, grammar))
            self._queue.add(key, price({kind.name.lower(): text}))
            if self._threads < self._queue.places:
                self._threads += 1
                threading.Thread(target=self._work, name=f"grammars {self._threads}", daemon=True).start()
            self._changed.notify()
        return grammar

    def too_slow(self, key: Hashable) -> None:
        """Refuse a grammar from now on, since it was too slow for a request."""
        logger.warning("a structured output ends its request: it %s", TOO_SLOW)
        with self._changed:
            self._queue.decide(key, TOO_SLOW)

    def _compiled(self, key: Hashable, request: Any) -> WatchedGrammar:
        grammar = self._manager._create_grammar(request)
        require_beginning(self._manager.backend, grammar)
        return WatchedGrammar(grammar, lambda: self.too_slow(key))

    def _work(self) -> None:
        while True:
            with self._changed:
                while (tried := self._next()) is None:
                    self._changed.wait()
                wanted = self._wanted[tried.key]
            try:
                self._work_on(tried, wanted)
            except Exception as error:  # the thread goes on with other grammars
                logger.exception("a grammar could not be tried")
                self._finish(tried, TryOutcome.REFUSED, str(error))

    def _next(self) -> Try | None:
        for key in [key for key, wanted in self._wanted.items() if all(map(_is_over, wanted.requests))]:
            if self._queue.drop(key):
                for _, grammar in self._wanted.pop(key).requests:
                    grammar.cancel()
        return self._queue.next_try()

    def _work_on(self, tried: Try, wanted: _Wanted) -> None:
        outcome, why = self._attempt(wanted.backend, TryJob(wanted.kind.name, wanted.text, tried.limit, tried.level))
        if outcome is TryOutcome.FINE:
            # In this place of the queue, so that expensive grammars do not occupy the core together.
            with self._changed:
                first, *_ = wanted.requests
            self._keep(tried.key, first)
        self._finish(tried, outcome, why)

    def _finish(self, tried: Try, outcome: TryOutcome, why: str = "") -> None:
        with self._changed:
            if not self._queue.ended(tried, outcome, why):
                self._changed.notify_all()
                return
            verdict = self._queue.verdict(tried.key)
            waiting = self._wanted.pop(tried.key).requests
            self._changed.notify_all()
        if verdict is None:
            logger.warning("a structured output could not be tried: it is compiled without limits")
        for request, grammar in waiting:
            if grammar.done():
                continue
            if verdict:
                grammar.set_exception(ValueError(verdict))
            else:
                self._keep(tried.key, (request, grammar))

    def _keep(self, key: Hashable, waiting: tuple[Any, Future[Any]]) -> None:
        request, grammar = waiting
        try:
            found = self._compiled(key, request)
        except Exception as error:
            grammar.set_exception(error)
        else:
            grammar.set_result(found)


def _is_over(waiting: tuple[Any, Future[Any]]) -> bool:
    return waiting[0].is_finished()


class WatchedGrammar:
    """A grammar that rejects its request's tokens, which ends the request, once it has been slow for too long."""

    def __init__(self, grammar: Any, on_slow: Callable[[], None]) -> None:
        self._grammar, self._on_slow = grammar, on_slow
        self._owed = 0.0
        self._is_slow = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grammar, name)

    def fill_bitmask(self, bitmask: Any, idx: int) -> None:
        if self._is_slow:
            bitmask[idx].fill_(-1)  # its next token is rejected
            return
        began = time.thread_time()
        self._grammar.fill_bitmask(bitmask, idx)
        self._spent(time.thread_time() - began)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        if self._is_slow:
            return False
        began = time.thread_time()
        accepted = self._grammar.accept_tokens(request_id, tokens)
        self._spent(time.thread_time() - began)
        return accepted

    def _spent(self, seconds: float) -> None:
        self._owed = max(0.0, self._owed + seconds - FREE_SECONDS)
        if self._owed > MOST_OWED_SECONDS and not self._is_slow:
            self._is_slow = True
            self._on_slow()
