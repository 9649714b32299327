"""Grammars of a manager: refused ones fail their own requests, others' requests get theirs, slow ones end theirs."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
import xgrammar
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

from tercet.vllm_plugin.core import grammar_time
from tercet.vllm_plugin.core.grammar_process import NO_TEXT, TOO_SLOW, TryJob
from tercet.vllm_plugin.core.grammar_queue import LIMITS, TryOutcome
from tercet.vllm_plugin.core.grammar_time import BoundedGrammars, WatchedGrammar, require_beginning
from tests.longest_wait import LONGEST_WAIT_S

pytestmark = pytest.mark.vllm
VOCABULARY = [b"\x00", *(bytes([letter]) for letter in range(32, 127)), b"</s>"]


class Backend:
    """xgrammar, as vLLM's backend has it."""

    def __init__(self) -> None:
        info = xgrammar.TokenizerInfo(VOCABULARY, stop_token_ids=[len(VOCABULARY) - 1])
        self._compiler = xgrammar.GrammarCompiler(info)

    def grammar(self, kind: StructuredOutputOptions, text: str) -> Grammar:
        compiler = self._compiler
        compiled = compiler.compile_regex if kind is StructuredOutputOptions.REGEX else compiler.compile_grammar
        return Grammar(xgrammar.GrammarMatcher(compiled(text)))

    def allocate_token_bitmask(self, count: int) -> Any:
        return xgrammar.allocate_token_bitmask(count, len(VOCABULARY))


class Grammar:
    """One of its grammars."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher

    def fill_bitmask(self, bitmask: Any, at: int) -> None:
        self.matcher.fill_next_token_bitmask(bitmask, at)


class Manager:
    """vLLM's manager of structured outputs, as far as it compiles."""

    def __init__(self) -> None:
        self.backend = Backend()
        self.executor = ThreadPoolExecutor(1)
        self.compiled: list[str] = []

    def _create_grammar(self, request: Request) -> Grammar:
        kind, text = request.structured_output_request.structured_output_key
        self.compiled.append(text)
        return self.backend.grammar(kind, text)


class Request:
    """A request with a structured output."""

    def __init__(self, text: str, kind: StructuredOutputOptions = StructuredOutputOptions.REGEX) -> None:
        self.structured_output_key = kind, text
        self.structured_output_request = self.sampling_params = self.structured_outputs = self
        self._backend = "xgrammar"
        self.over = False

    def is_finished(self) -> bool:
        return self.over


class Process:
    """The process that tries grammars: what ``costs`` says is over the limit until it is not; others are fine."""

    def __init__(self, costs: dict[str, float | TryOutcome] | None = None) -> None:
        self.costs = costs or {}
        self.jobs: list[TryJob] = []
        self.goes_on = threading.Event()
        self.goes_on.set()

    def attempt(self, backend: str, job: TryJob) -> tuple[TryOutcome, str]:
        assert backend == "xgrammar"
        self.jobs.append(job)
        self.goes_on.wait(LONGEST_WAIT_S)
        cost = self.costs.get(job.text, 0.0)
        if isinstance(cost, TryOutcome):
            return cost, NO_TEXT if cost is TryOutcome.REFUSED else ""
        return (TryOutcome.FINE if cost <= job.limit else TryOutcome.OVER_LIMIT), ""


def bounded(costs: dict[str, float | TryOutcome] | None = None) -> tuple[BoundedGrammars, Manager, Process]:
    manager, process = Manager(), Process(costs)
    return BoundedGrammars(manager, process.attempt), manager, process


def failure(future: Future[Any]) -> str:
    return str(future.exception(LONGEST_WAIT_S))


def test_a_grammar_is_compiled_after_it_was_tried_and_tried_once() -> None:
    grammars, manager, process = bounded()
    assert isinstance(grammars.grammar(Request("[a-z]+")).result(LONGEST_WAIT_S), WatchedGrammar)
    assert isinstance(grammars.grammar(Request("[a-z]+")).result(LONGEST_WAIT_S), WatchedGrammar)
    assert len(process.jobs) == 1
    assert manager.compiled == ["[a-z]+"] * 2


@pytest.mark.parametrize("cost", [100.0, TryOutcome.REFUSED])
def test_one_that_is_refused_is_never_compiled_here_nor_tried_again(cost: float | TryOutcome) -> None:
    grammars, manager, process = bounded({"(a|b)*": cost})
    first = failure(grammars.grammar(Request("(a|b)*")))
    tries = len(process.jobs)
    assert failure(grammars.grammar(Request("(a|b)*"))) == first
    assert first == (
        NO_TEXT if cost is TryOutcome.REFUSED else f"takes more than {LIMITS[-1]:g} s of CPU time to compile"
    )
    assert (manager.compiled, len(process.jobs)) == ([], tries)


def test_the_requests_behind_twenty_expensive_ones_get_theirs() -> None:
    poisons = {f"([^{number}]*b)*": 100.0 for number in range(20)}
    grammars, _, process = bounded(dict(poisons))
    refused = [grammars.grammar(Request(text)) for text in poisons]
    innocent = [grammars.grammar(Request(text)) for text in ("yes", "[0-9]+", "a|b")]
    assert [type(each.result(LONGEST_WAIT_S)) for each in innocent] == [WatchedGrammar] * 3
    assert all("CPU time" in failure(each) for each in refused)
    assert len(process.jobs) == 20 * len(LIMITS) + 2


@pytest.mark.parametrize(
    ("kind", "text", "is_plain"),
    [
        (StructuredOutputOptions.GRAMMAR, 'root ::= "yes" | "no"', True),
        (StructuredOutputOptions.GRAMMAR, 'root ::= ("yes" | "no")*', False),
        (StructuredOutputOptions.GRAMMAR, 'root ::= "' + "x" * 3000 + '"', False),
        (StructuredOutputOptions.REGEX, "hello 1", True),
        (StructuredOutputOptions.REGEX, "hel{2}o", False),
    ],
)
def test_only_texts_are_compiled_untried(kind: StructuredOutputOptions, text: str, is_plain: bool) -> None:
    grammars, manager, process = bounded()
    grammars.grammar(Request(text, kind)).result(LONGEST_WAIT_S)
    assert manager.compiled == [text]
    assert len(process.jobs) == (not is_plain)


def test_without_a_process_requests_are_served_all_the_same() -> None:
    grammars, manager, _ = bounded({"[a-z]": TryOutcome.LOST})
    grammars.grammar(Request("[a-z]")).result(LONGEST_WAIT_S)
    assert manager.compiled == ["[a-z]"]


def test_grammars_that_no_request_needs_any_more_are_not_tried() -> None:
    grammars, _, process = bounded()
    process.goes_on.clear()
    requests = [Request(f"[a-{letter}]") for letter in "bcdefgh"]
    futures = [grammars.grammar(request) for request in requests]
    until = time.monotonic() + LONGEST_WAIT_S
    while len(process.jobs) < 2:
        assert time.monotonic() < until
    for request in requests[:-1]:
        request.over = True
    process.goes_on.set()
    assert isinstance(futures[-1].result(LONGEST_WAIT_S), WatchedGrammar)
    assert len(process.jobs) == 3
    assert sum(future.cancelled() for future in futures) == 4


def test_one_whose_compiling_fails_fails_its_requests_only() -> None:
    grammars, _, _ = bounded()
    wrong = grammars.grammar(Request("root ::= other", StructuredOutputOptions.GRAMMAR))
    assert isinstance(wrong.exception(LONGEST_WAIT_S), Exception)
    assert isinstance(grammars.grammar(Request("[a-c]")).result(LONGEST_WAIT_S), WatchedGrammar)


@pytest.mark.parametrize(
    ("text", "has_beginning"),
    [
        ('root ::= root "a"', False), ("root ::= root", False), ('root ::= x\nx ::= y "b"\ny ::= x', False),
        ('root ::= root "a" | "a"', True), ('root ::= "a" root', True), ('root ::= ""', True),
        ("root ::= root?", True), ("root ::= [a-z]+", True),
    ],
)  # fmt: skip
def test_a_structure_that_no_text_has_is_refused(text: str, has_beginning: bool) -> None:
    backend = Backend()
    grammar = backend.grammar(StructuredOutputOptions.GRAMMAR, text)
    if has_beginning:
        require_beginning(backend, grammar)
    else:
        with pytest.raises(ValueError, match=NO_TEXT):
            require_beginning(backend, grammar)


class Slow:
    """A grammar that takes its time, in CPU seconds of a clock that the test moves."""

    def __init__(self) -> None:
        self.now, self.seconds, self.fills = 0.0, 0.0, 0

    def fill_bitmask(self, bitmask: Any, idx: int) -> None:
        self.now += self.seconds
        self.fills += 1

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.now += self.seconds
        return True

    def is_terminated(self) -> bool:
        return False


def test_a_grammar_that_becomes_slow_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, told = Slow(), list[str]()
    monkeypatch.setattr(grammar_time.time, "thread_time", lambda: slow.now)
    watched, mask = WatchedGrammar(slow, lambda: told.append(TOO_SLOW)), torch.zeros(1, 2, dtype=torch.int32)
    for _ in range(10_000):
        slow.seconds = 0.005
        watched.fill_bitmask(mask, 0)
        assert watched.accept_tokens("r", [1])
    slow.seconds, before = 0.3, slow.now
    while watched.accept_tokens("r", [1]):
        watched.fill_bitmask(mask, 0)
    assert slow.now - before < 3
    fills = slow.fills
    watched.fill_bitmask(mask, 0)
    assert (slow.fills, told, mask.tolist()) == (fills, [TOO_SLOW], [[-1, -1]])
    assert not watched.is_terminated()


def test_after_it_was_slow_for_one_request_it_is_refused() -> None:
    grammars, _, _ = bounded()
    watched = grammars.grammar(Request("([^a]*b)*")).result(LONGEST_WAIT_S)
    watched._on_slow()
    assert failure(grammars.grammar(Request("([^a]*b)*"))) == TOO_SLOW
