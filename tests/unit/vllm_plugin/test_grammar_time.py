"""A grammar that takes too long fails; one that does not is what it came to."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import xgrammar

from tercet.vllm_plugin.core.grammar_time import require_beginning, within


def test_a_grammar_that_takes_too_long_fails_and_what_it_comes_to_later_is_dropped() -> None:
    compiling: Future[str] = Future()
    bounded = within(compiling, 0.01)
    with pytest.raises(TimeoutError, match="more than"):
        bounded.result(20)
    compiling.set_result("late")
    assert isinstance(bounded.exception(), TimeoutError)


@pytest.mark.parametrize("fails", [False, True])
def test_a_grammar_in_time_is_what_it_came_to(fails: bool) -> None:
    compiling: Future[str] = Future()
    bounded = within(compiling, 60)
    assert not bounded.done()
    if fails:
        compiling.set_exception(ValueError("no grammar"))
        with pytest.raises(ValueError, match="no grammar"):
            bounded.result(20)
    else:
        compiling.set_result("compiled")
        assert bounded.result(20) == "compiled"


VOCABULARY = [b"\x00", *(bytes([letter]) for letter in range(32, 127)), b"</s>"]


class Backend:
    """xgrammar, as vLLM's backend has it."""

    def __init__(self) -> None:
        info = xgrammar.TokenizerInfo(VOCABULARY, stop_token_ids=[len(VOCABULARY) - 1])
        self._compiler = xgrammar.GrammarCompiler(info)

    def grammar(self, text: str) -> Grammar:
        return Grammar(xgrammar.GrammarMatcher(self._compiler.compile_grammar(text)))

    def allocate_token_bitmask(self, count: int) -> Any:
        return xgrammar.allocate_token_bitmask(count, len(VOCABULARY))


class Grammar:
    """One of its grammars."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher

    def fill_bitmask(self, bitmask: Any, at: int) -> None:
        self.matcher.fill_next_token_bitmask(bitmask, at)


@pytest.mark.parametrize(
    ("text", "has_beginning"),
    [
        ('root ::= root "a"', False), ("root ::= root", False), ('root ::= x\nx ::= y "b"\ny ::= x', False),
        ('root ::= root "a" | "a"', True), ('root ::= "a" root', True), ('root ::= ""', True),
        ("root ::= root?", True), ("root ::= [a-z]+", True),
    ],
)  # fmt: skip
def test_a_structure_that_no_text_has_fails_before_anything_is_generated(text: str, has_beginning: bool) -> None:
    backend, compiling = Backend(), Future[Grammar]()
    bounded = within(compiling, 60, partial(require_beginning, backend))
    compiling.set_result(backend.grammar(text))
    assert isinstance(bounded.exception(20), type(None) if has_beginning else ValueError)
