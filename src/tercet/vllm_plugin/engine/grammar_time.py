"""Timeout for compiling a structured output: its request ends, and others continue.

vLLM compiles in threads of its core, and a request waits for its grammar as long as that takes. The thread itself
cannot be ended; :mod:`tercet.vllm_plugin.grammar_bounds` refuses grammars that would occupy it for long. xgrammar
caches what it has compiled.

Relies on ``StructuredOutputManager.grammar_init`` putting a future into the request's ``structured_output_request``,
whose failure ends that request alone.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from vllm.v1.structured_output import StructuredOutputManager

from tercet.vllm_plugin.engine.patching import Method, wrap

SECONDS = 20.0


def bound_grammar_time() -> None:
    """Add the timeout to the managers of this process."""

    def init(original: Method, manager: Any, request: Any) -> None:
        original(manager, request)
        wanted: Any = request.structured_output_request
        if wanted is None:
            return
        compiling: Any = wanted._grammar
        if isinstance(compiling, Future) and not compiling.done():
            wanted.grammar = within(compiling, SECONDS)

    wrap(StructuredOutputManager, "grammar_init", init)


def within(compiling: Future[Any], seconds: float) -> Future[Any]:
    """The result of ``compiling``, or a ``TimeoutError`` after ``seconds``."""
    bounded: Future[Any] = Future()
    timer = threading.Timer(seconds, lambda: _fail(bounded, TimeoutError(f"a grammar took more than {seconds:g} s")))
    timer.daemon = True

    def compiled(done: Future[Any]) -> None:
        timer.cancel()
        with suppress(InvalidStateError):  # its time was over
            if (error := done.exception()) is not None:
                bounded.set_exception(error)
            else:
                bounded.set_result(done.result())

    timer.start()
    compiling.add_done_callback(compiled)
    return bounded


def _fail(bounded: Future[Any], error: Exception) -> None:
    with suppress(InvalidStateError):
        bounded.set_exception(error)
