"""Requests that go on after output of another engine, on vLLM's own scheduler."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from tercet.vllm_plugin.engine.resume import start_grammar_after

from .tiny_engine import BLOCK, NEXT_TOKEN, TinyEngine, tokens_of

A = "a" * 32


def test_output_counts_as_output(engine: TinyEngine) -> None:
    request = engine.add("r", tokens_of(20), max_tokens=5, output=[1, 2, 3])
    assert engine.run(request) == [1, 2, 3, NEXT_TOKEN, NEXT_TOKEN]


def test_the_workers_are_told_once_with_the_first_step(engine: TinyEngine) -> None:
    engine.add("r", tokens_of(100), max_tokens=5, output=[1, 2])
    engine.add("plain", tokens_of(10, start=500), max_tokens=5)
    steps = [engine.step()[1].resumed for _ in range(4)]
    assert steps[0] == {"r": [1, 2]}
    assert steps[1:] == [{}, {}, {}]
    engine.abort("r")
    engine.abort("plain")


def test_prompt_and_output_are_computed_together(engine: TinyEngine) -> None:
    engine.add("r", tokens_of(20), max_tokens=9, output=[1, 2, 3])
    output, _ = engine.step()
    assert output.num_scheduled_tokens == {"r": 23}
    engine.abort("r")


def test_more_than_the_prompt_may_be_cached(engine: TinyEngine) -> None:
    tokens = tokens_of(3 * BLOCK + 1)
    engine.run(engine.add("before", tokens, max_tokens=1))
    request = engine.add("r", tokens[:BLOCK], max_tokens=100, output=tokens[BLOCK:])
    output, _ = engine.step()
    assert output.num_scheduled_tokens == {"r": 1}
    engine.abort("r")
    assert request.num_computed_tokens > BLOCK


@pytest.mark.parametrize("cached_blocks", [0, 1, 3])
def test_usage_counts_the_prompt_alone(engine: TinyEngine, cached_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokens_of(4 * BLOCK)
    if cached_blocks:
        engine.run(engine.add("before", tokens[: cached_blocks * BLOCK + 1], max_tokens=1))
    request = engine.add("r", tokens[: 2 * BLOCK], max_tokens=100, output=tokens[2 * BLOCK :])
    assert request.prefill_stats is None, "vLLM takes it for granted that no more than the prompt is cached"
    seen: list[tuple[int, int]] = []
    schedule = engine.scheduler.schedule

    def watched() -> Any:
        output = schedule()
        stats = request.prefill_stats
        if stats is not None:
            seen.append((stats.num_prompt_tokens, stats.num_cached_tokens))
        return output

    monkeypatch.setattr(engine.scheduler, "schedule", watched)
    engine.step()
    assert seen == [(2 * BLOCK, min(cached_blocks, 2) * BLOCK)]
    engine.abort("r")


def test_a_reservation_may_cover_the_output_too(engine: TinyEngine) -> None:
    tokens = tokens_of(2 * BLOCK + 9)
    engine.reserve(A, tokens[:-1])
    engine.agent.received[A] = len(tokens) - 1
    engine.add("r", tokens[:20], max_tokens=100, lease=A, output=tokens[20:])
    output, metadata = engine.step()
    assert output.num_scheduled_tokens == {"r": 1}
    assert metadata.resumed == {"r": tokens[20:]}
    engine.abort("r")


def test_a_request_that_ends_before_its_first_step_is_forgotten(engine: TinyEngine) -> None:
    engine.add("r", tokens_of(20), output=[1, 2])
    engine.abort("r")


# ---- the grammar of a structured output ----------------------------------------------------------------------------


class Grammar:
    def __init__(self, takes: bool = True) -> None:
        self.accepted: list[int] = []
        self._takes = takes

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.accepted += tokens
        return self._takes


def request_with(grammar: object) -> Any:
    return SimpleNamespace(request_id="r", structured_output_request=SimpleNamespace(_grammar=grammar))


def test_a_grammar_starts_behind_the_output() -> None:
    grammar = Grammar()
    request = request_with(grammar)
    start_grammar_after(request, [1, 2])
    assert request.structured_output_request._grammar.result(0) is grammar
    assert grammar.accepted == [1, 2]


def test_a_grammar_that_is_still_compiled_starts_behind_it_too() -> None:
    compiling: Future[Any] = Future()
    request = request_with(compiling)
    start_grammar_after(request, [1])
    advanced = request.structured_output_request._grammar
    assert not advanced.done()
    compiling.set_result(Grammar())
    assert advanced.result(0).accepted == [1]


def test_output_that_breaks_the_structure_fails_the_request() -> None:
    request = request_with(Grammar(takes=False))
    start_grammar_after(request, [1])
    with pytest.raises(ValueError, match="do not follow the requested structure"):
        request.structured_output_request._grammar.result(0)


def test_a_grammar_that_does_not_compile_fails_the_request() -> None:
    compiling: Future[Any] = Future()
    compiling.set_exception(ValueError("no grammar"))
    request = request_with(compiling)
    start_grammar_after(request, [1])
    with pytest.raises(ValueError, match="no grammar"):
        request.structured_output_request._grammar.result(0)


def test_without_structure_there_is_nothing_to_do() -> None:
    request: Any = SimpleNamespace(request_id="r", structured_output_request=None)
    start_grammar_after(request, [1])
