"""A timeout for compiling the grammar of a structured output: its request ends, and others continue.

A request also ends if no text matches its grammar, as for a rule that begins with itself (``root ::= root "a"``): vLLM
would sample a random token, find that the grammar rejects it, and end the request as if the engine had failed.

vLLM compiles in threads of its core, and a request waits for its grammar as long as that takes. The thread itself
cannot be ended; :mod:`tercet.protocol.grammar_bounds` refuses grammars that would occupy it for long. xgrammar caches
compiled grammars.

Relies on ``StructuredOutputManager.grammar_init`` putting a future into the request's ``structured_output_request``,
whose failure ends only that request, and on a grammar's ``fill_bitmask``, which leaves zeros for tokens that may not
follow.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any

from vllm.v1.structured_output import StructuredOutputManager

from tercet.vllm_plugin.start.patching import Method, wrap

SECONDS = 20.0


def bound_grammar_time() -> None:
    """Add the timeout to the managers of this process."""

    def init(original: Method, manager: Any, request: Any) -> None:
        original(manager, request)
        wanted: Any = request.structured_output_request
        if wanted is None:
            return
        compiling: Any = wanted._grammar
        if not isinstance(compiling, Future):
            compiled, compiling = compiling, Future()
            compiling.set_result(compiled)
        wanted.grammar = within(compiling, SECONDS, partial(require_beginning, manager.backend))

    wrap(StructuredOutputManager, "grammar_init", init)


def require_beginning(backend: Any, grammar: Any) -> None:
    """Raise ``ValueError`` for a grammar that has not begun and allows no token."""
    mask = backend.allocate_token_bitmask(1)
    grammar.fill_bitmask(mask, 0)
    if not mask.any():
        raise ValueError("no text matches this structure")


def within(compiling: Future[Any], seconds: float, check: Callable[[Any], None] = lambda _: None) -> Future[Any]:
    """Return a future with the result of ``compiling``.

    It fails with ``TimeoutError`` after ``seconds``, and with the error that ``check`` raises for the result.
    """
    bounded: Future[Any] = Future()
    timer = threading.Timer(seconds, lambda: _fail(bounded, TimeoutError(f"compiling took more than {seconds:g} s")))
    timer.daemon = True

    def compiled(done: Future[Any]) -> None:
        timer.cancel()
        try:
            found = done.result()
            check(found)
        except Exception as error:
            _fail(bounded, error)
        else:
            with suppress(InvalidStateError):  # the timeout came first
                bounded.set_result(found)

    timer.start()
    compiling.add_done_callback(compiled)
    return bounded


def _fail(bounded: Future[Any], error: Exception) -> None:
    with suppress(InvalidStateError):
        bounded.set_exception(error)
