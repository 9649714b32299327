"""Grammars of a manager: refused ones fail their own requests, others' requests get theirs, slow ones end theirs."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xgrammar
from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

from tercet.protocol import BadRequest, GrammarsBusy
from tercet.vllm_plugin.core import grammar_time
from tercet.vllm_plugin.core.grammar_process import LONG_SECONDS, MOST_LONG, NO_TEXT, TOO_SLOW, TryJob
from tercet.vllm_plugin.core.grammar_time import (
    BUSY,
    LIMITS,
    LONGEST_REASON,
    LONGEST_WAIT_SECONDS,
    LOST,
    MOST_VERDICTS,
    MOST_WAITING,
    REFUSED,
    UNTRIED,
    BoundedGrammars,
    GrammarQueue,
    GrammarRefused,
    GrammarUntried,
    StructurePace,
    Try,
    TryOutcome,
    WatchedGrammar,
    reason_of,
    require_beginning,
    with_reasons,
)
from tercet.vllm_plugin.edge import llm_requests
from tercet.vllm_plugin.edge.llm_requests import StructureRefused, StructureUntried, _as_ours, failure_of
from tests.longest_wait import LONGEST_WAIT_S, wait_until

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
        self.stop_reason: str | None = None

    def is_finished(self) -> bool:
        return self.over


class Process:
    """The process that tries grammars: what ``costs`` says is over the limit until it is not; others are fine."""

    def __init__(self, costs: Mapping[str, float | TryOutcome | Exception] | None = None) -> None:
        self.costs = costs or {}
        self.jobs: list[TryJob] = []
        self.goes_on = threading.Event()
        self.goes_on.set()

    def attempt(self, backend: str, job: TryJob) -> tuple[TryOutcome, str]:
        assert backend == "xgrammar"
        self.jobs.append(job)
        self.goes_on.wait(LONGEST_WAIT_S)
        cost = self.costs.get(job.text, 0.0)
        if isinstance(cost, Exception):
            raise cost
        if isinstance(cost, TryOutcome):
            return cost, NO_TEXT if cost is TryOutcome.REFUSED else ""
        return (TryOutcome.FINE if cost <= job.limit else TryOutcome.OVER_LIMIT), ""


def bounded(
    costs: Mapping[str, float | TryOutcome | Exception] | None = None,
) -> tuple[BoundedGrammars, Manager, Process]:
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


@pytest.mark.parametrize("lost", [TryOutcome.LOST, RuntimeError("no such file")])
def test_one_that_cannot_be_tried_is_not_compiled_here_and_may_be_sent_again(
    lost: TryOutcome | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    costs = {"[a-z]": lost}
    grammars, manager, process = bounded(costs)
    untried = grammars.grammar(Request("[a-z]")).exception(LONGEST_WAIT_S)
    assert (type(untried), str(untried)) == (GrammarUntried, LOST)
    assert (manager.compiled, len(process.jobs)) == ([], 2)
    assert "was lost twice" in caplog.text
    costs.clear()
    assert isinstance(grammars.grammar(Request("[a-z]")).result(LONGEST_WAIT_S), WatchedGrammar)


def test_a_request_waits_for_a_bounded_time_and_one_whose_structure_is_known_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    grammars, manager, process = bounded()
    grammars.grammar(Request("[a-c]")).result(LONGEST_WAIT_S)
    process.goes_on.clear()
    held = [grammars.grammar(Request(f"[a-{letter}]")) for letter in "xyz"]
    wait_until(lambda: len(process.jobs) == 3)  # both places are taken, and one structure waits
    assert isinstance(grammars.grammar(Request("[a-c]")).result(LONGEST_WAIT_S), WatchedGrammar)
    assert not any(each.done() for each in held)
    with grammars._changed:
        for wanted in grammars._wanted.values():
            for each in wanted.requests:
                assert 0 < each.until - time.monotonic() <= LONGEST_WAIT_SECONDS
                each.until = time.monotonic()
        grammars._waits.notify()
    failures = [each.exception(LONGEST_WAIT_S) for each in held]
    assert [(type(each), str(each)) for each in failures] == [(GrammarUntried, BUSY)] * 3
    assert "refused with 503" in caplog.text
    later = grammars.grammar(Request("[a-x]"))  # while it is tried for the one that has left
    process.goes_on.set()
    assert isinstance(later.result(LONGEST_WAIT_S), WatchedGrammar)
    assert isinstance(grammars.grammar(Request("[a-z]")).result(LONGEST_WAIT_S), WatchedGrammar)
    assert manager.compiled.count("[a-z]") == 1


def test_a_full_queue_gives_up_the_most_expensive_one_not_the_newest() -> None:
    grammars, _, process = bounded()
    process.goes_on.clear()
    running = [grammars.grammar(Request("[a-b]")), grammars.grammar(Request("[a-c]"))]
    wait_until(lambda: len(process.jobs) == 2)
    dear = [grammars.grammar(Request(f"[^a]*{number}")) for number in range(MOST_WAITING)]
    assert not any(each.done() for each in dear)
    innocent = grammars.grammar(Request("[a-d]"))
    (given_up,) = [each for each in dear if each.done()]
    assert isinstance(given_up.exception(), GrammarUntried)
    process.goes_on.set()
    for each in (*running, innocent):
        assert isinstance(each.result(LONGEST_WAIT_S), WatchedGrammar)


def test_grammars_that_no_request_needs_any_more_are_not_tried() -> None:
    grammars, _, process = bounded()
    process.goes_on.clear()
    requests = [Request(f"[a-{letter}]") for letter in "bcdefgh"]
    futures = [grammars.grammar(request) for request in requests]
    wait_until(lambda: len(process.jobs) == 2)
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


def slow_one(monkeypatch: pytest.MonkeyPatch) -> tuple[Slow, list[str], StructurePace, Any]:
    slow, told = Slow(), list[str]()
    monkeypatch.setattr(grammar_time.time, "thread_time", lambda: slow.now)
    return slow, told, StructurePace(lambda: told.append(TOO_SLOW)), torch.zeros(1, 2, dtype=torch.int32)


def test_a_grammar_that_becomes_slow_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, told, pace, mask = slow_one(monkeypatch)
    request = Request("a")
    watched = WatchedGrammar(slow, pace, request)
    for _ in range(10_000):
        slow.seconds = 0.005
        watched.fill_bitmask(mask, 0)
        assert watched.accept_tokens("r", [1])
    slow.seconds, before = 0.9 * LONG_SECONDS, slow.now
    while watched.accept_tokens("r", [1]):
        assert request.stop_reason is None
        watched.fill_bitmask(mask, 0)
    assert 2 < slow.now - before < 3
    fills = slow.fills
    watched.fill_bitmask(mask, 0)
    assert (slow.fills, told, mask.tolist()) == (fills, [TOO_SLOW], [[-1, -1]])
    assert request.stop_reason == f"{REFUSED}structured_outputs: {TOO_SLOW}"
    assert not watched.is_terminated()


def test_others_wait_for_few_long_tokens_of_all_requests_with_a_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, told, pace, mask = slow_one(monkeypatch)
    same = [WatchedGrammar(slow, pace, Request("a")) for _ in range(50)]
    slow.seconds = 0.3
    for each in same:  # one step of the engine
        each.fill_bitmask(mask, 0)
    assert (slow.fills, told) == (MOST_LONG, [TOO_SLOW])
    assert not any(each.accept_tokens("r", [1]) for each in same)


def test_long_tokens_that_are_far_apart_do_not_end_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, told, pace, mask = slow_one(monkeypatch)
    monkeypatch.setattr(grammar_time.time, "monotonic", lambda: slow.now * 1000)
    watched = WatchedGrammar(slow, pace, Request("a"))
    for _ in range(10):
        slow.seconds = 0.15
        watched.fill_bitmask(mask, 0)
        slow.seconds = 0.0
        for _ in range(20):
            assert watched.accept_tokens("r", [1])
    assert told == []


def test_after_it_was_slow_for_one_request_it_is_refused() -> None:
    grammars, _, _ = bounded()
    first, second = (grammars.grammar(Request("([^a]*b)*")).result(LONGEST_WAIT_S) for _ in range(2))
    first._pace.end()
    assert failure(grammars.grammar(Request("([^a]*b)*"))) == TOO_SLOW
    assert not second.accept_tokens("r", [1])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (GrammarRefused(NO_TEXT), f"{REFUSED}structured_outputs: {NO_TEXT}"),
        (RuntimeError("no rule x"), f"{REFUSED}structured_outputs: cannot be compiled: no rule x"),
        (GrammarUntried(BUSY), UNTRIED + BUSY),
    ],
)
@pytest.mark.parametrize("own", [False, True])
def test_the_output_of_a_request_whose_grammar_failed_has_the_reason(error: Exception, reason: str, own: bool) -> None:
    """vLLM 0.33 has an error of its own, which says that the request is wrong."""
    ended = SimpleNamespace(request_id="r", finished=True, stop_reason=None, error="the client's" if own else None)
    others = [
        SimpleNamespace(request_id="r", finished=False, stop_reason=None),
        SimpleNamespace(request_id="other", finished=True, stop_reason="."),
    ]
    request = SimpleNamespace(request_id="r", structured_output_request=SimpleNamespace(grammar=error))
    failed: Any = {"r": "the client's", "gone": ""} if own else {"r", "gone"}
    scheduler = SimpleNamespace(grammar_compile_error_reqs=failed, requests={"r": request})

    def update(scheduler: Any, step: int) -> Any:
        assert step == 1
        scheduler.requests.clear()
        failed.clear()
        return {0: SimpleNamespace(outputs=[*others, ended])}

    assert with_reasons(update, scheduler, 1)[0].outputs[-1] is ended
    assert (ended.stop_reason, ended.error) == (reason, None)
    assert [each.stop_reason for each in others] == [None, "."]


def test_a_reason_is_bounded() -> None:
    assert len(reason_of(RuntimeError("x" * 100_000))) == LONGEST_REASON


# Failures of structured outputs in the API server: a request's queue gets them, and nothing after them.


def ended(reason: FinishReason | None, stop_reason: int | str | None) -> EngineCoreOutput:
    return EngineCoreOutput("r", [], finish_reason=reason, stop_reason=stop_reason)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (ended(FinishReason.ERROR, REFUSED + "structured_outputs: too slow"), StructureRefused),
        (ended(FinishReason.ERROR, UNTRIED + "structured_outputs: later"), StructureUntried),
        (ended(FinishReason.ERROR, None), type(None)),
        (ended(FinishReason.ERROR, "else"), type(None)),
        (ended(FinishReason.STOP, REFUSED), type(None)),  # a client's stop text
        (ended(FinishReason.STOP, 7), type(None)),
        (ended(None, None), type(None)),
    ],
)
def test_only_an_error_with_the_cores_reason_is_a_failure(output: EngineCoreOutput, expected: type) -> None:
    assert isinstance(failure_of(output), expected)


async def test_the_queue_has_the_failure_and_not_the_output_behind_it() -> None:
    queue = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    processor = SimpleNamespace(request_states={"r": SimpleNamespace(queue=queue)})

    def process(processor: Any, outputs: list[Any], more: int) -> int:
        queue.put(SimpleNamespace())  # type: ignore[arg-type]
        return more

    output = ended(FinishReason.ERROR, REFUSED + "structured_outputs: too slow")
    gone = EngineCoreOutput("gone", [], finish_reason=FinishReason.ERROR, stop_reason=UNTRIED)
    assert llm_requests._process(process, processor, [gone, output], 3) == 3
    with pytest.raises(StructureRefused, match="structured_outputs: too slow"):
        await queue.get()


def test_verbs_get_them_as_their_own_errors() -> None:
    refused, untried = _as_ours(StructureRefused("no")), _as_ours(StructureUntried("later"))
    assert (type(refused), refused.message, refused.param) == (BadRequest, "no", "structured_outputs")
    assert (type(untried), untried.message, untried.status) == (GrammarsBusy, "later", 503)
    assert untried.retry_after


# The order in which grammars are tried: cheap ones do not wait for expensive ones.

LAST = len(LIMITS) - 1


def run(queue: GrammarQueue, costs: dict[str, float]) -> dict[str, float]:
    """Run all tries in virtual time, each with the CPU seconds that the grammar costs; return when each ended."""
    now, ended = 0.0, dict[str, float]()
    running: list[tuple[float, int, Try]] = []
    count = 0
    while len(queue):
        while (tried := queue.next_try()) is not None:
            count += 1
            heapq.heappush(running, (now + min(costs[str(tried.key)], tried.limit), count, tried))
        assert len(running) <= queue.places
        assert sum(each.level == LAST for _, _, each in running) <= max(1, queue.places - 1)
        now, _, tried = heapq.heappop(running)
        outcome = TryOutcome.FINE if costs[str(tried.key)] <= tried.limit else TryOutcome.OVER_LIMIT
        if queue.ended(tried, outcome):
            ended[str(tried.key)] = now
    return ended


def test_a_usual_grammar_does_not_wait_for_twenty_expensive_ones() -> None:
    queue = GrammarQueue()
    for number in range(20):
        queue.add(f"poison {number}", 1.0)
    queue.add("usual", 2.0)
    queue.add("large", 300.0)
    costs = {f"poison {number}": 100.0 for number in range(20)} | {"usual": 0.05, "large": 0.9}
    ended = run(queue, costs)
    assert ended["usual"] < 20 * LIMITS[0]
    assert ended["large"] < 20 * sum(LIMITS[:2])
    assert queue.verdict("usual") == queue.verdict("large") == ""
    assert all(queue.verdict(f"poison {number}") for number in range(20))


@given(
    st.dictionaries(st.text("abc", max_size=3), st.tuples(st.floats(0, 20), st.floats(0, 9)), max_size=12),
    st.integers(1, 4),
)
def test_each_grammar_has_the_verdict_of_its_own_cost(grammars: dict[str, tuple[float, float]], places: int) -> None:
    queue = GrammarQueue(places)
    for key, (_, price) in grammars.items():
        queue.add(key, price)
    assert run(queue, {key: cost for key, (cost, _) in grammars.items()}).keys() == grammars.keys()
    assert {key: queue.verdict(key) == "" for key in grammars} == {k: c <= LIMITS[-1] for k, (c, _) in grammars.items()}


def test_the_cheaper_one_is_first() -> None:
    queue = GrammarQueue(places=1)
    queue.add("dear", 9.0)
    queue.add("cheap", 1.0)
    tried = queue.next_try()
    assert tried == Try("cheap", 0)
    assert queue.next_try() is None
    assert tried is not None
    assert queue.ended(tried, TryOutcome.REFUSED, "no text matches")
    assert queue.verdict("cheap") == "no text matches"


def test_a_grammar_that_is_lost_is_tried_once_more_and_has_no_verdict_then() -> None:
    queue = GrammarQueue()
    queue.add("a", 0)
    assert not queue.ended(queue.next_try(), TryOutcome.LOST)  # pyright: ignore[reportArgumentType]
    assert queue.ended(queue.next_try(), TryOutcome.LOST)  # pyright: ignore[reportArgumentType]
    assert queue.verdict("a") is None
    assert len(queue) == 0


def test_a_full_queue_gives_up_what_it_would_try_last() -> None:
    queue = GrammarQueue(places=1)
    queue.add("tried twice", 0.0)
    tried = queue.next_try()
    assert tried is not None
    assert [queue.add(number, 1.0 + number) for number in range(MOST_WAITING - 1)] == [None] * (MOST_WAITING - 1)
    assert not queue.ended(tried, TryOutcome.OVER_LIMIT)
    assert queue.add("tried twice", 0.0) is None
    assert queue.add("usual", 5.0) == "tried twice"
    assert queue.add("usual", 5.0) is None
    assert queue.add("dearest", 1e9) == "dearest"
    assert queue.add("cheap", 1.0) == MOST_WAITING - 2
    assert len(queue) == MOST_WAITING


def test_what_no_request_needs_any_more_is_dropped_unless_it_is_tried_now() -> None:
    queue = GrammarQueue(places=1)
    queue.add("a", 0)
    queue.add("b", 1)
    assert queue.next_try() == Try("a", 0)
    assert (queue.drop("a"), queue.drop("b"), queue.drop("b")) == (False, True, False)
    assert len(queue) == 1


@pytest.mark.parametrize("more", [0, 3])
def test_the_oldest_verdicts_are_forgotten(more: int) -> None:
    queue = GrammarQueue()
    for number in range(MOST_VERDICTS + more):
        queue.decide(number, "")
    assert [queue.verdict(number) for number in range(more)] == [None] * more
    assert queue.verdict(more) == ""
