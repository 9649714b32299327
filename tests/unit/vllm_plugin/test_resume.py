"""Requests that go on after output of another engine, on vLLM's own scheduler."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import Request as VLLMRequest

from tercet.vllm_plugin.core.scheduler_side import start_grammar_after

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
def test_output_is_prefilled_too(engine: TinyEngine, cached_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert seen == [(len(tokens), cached_blocks * BLOCK)]
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

THINK, DONE = 900, 901


class Tokenizer:
    """As much of one as a reasoning parser needs."""

    def get_vocab(self) -> dict[str, int]:
        return {"<think>": THINK, "</think>": DONE}


class Thinking(BaseThinkingReasoningParser):
    """vLLM's reasoning parser for models that think between two tokens."""

    @property
    def start_token(self) -> str:
        return "<think>"

    @property
    def end_token(self) -> str:
        return "</think>"


class Grammar:
    def __init__(self, takes: bool = True) -> None:
        self.accepted: list[int] = []
        self._takes = takes

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.accepted += tokens
        return self._takes


class Structured:
    """A request with a structure on vLLM's own manager, which goes on after ``output``."""

    def __init__(
        self, engine: TinyEngine, output: list[int], grammar: object, *, prompt: list[int] | None = None,
        parser: bool = False, ended: bool | None = None, in_reasoning: bool = False,
    ) -> None:  # fmt: skip
        self.manager = engine.scheduler.structured_output_manager
        self.manager.enable_in_reasoning = in_reasoning
        if parser:
            self.manager.reasoner_cls = Thinking
            self.manager.tokenizer = Tokenizer()  # type: ignore[assignment]
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="x"))
        self.request = VLLMRequest("r", prompt or [1, 2], params, None, reasoning_ended=ended)
        self.request.append_output_token_ids(output)
        structured = self.request.structured_output_request
        assert structured is not None
        self.structured = structured
        structured.grammar = grammar  # type: ignore[assignment]
        start_grammar_after(self.manager, self.request, output)

    def goes_on(self, *tokens: int) -> None:
        """This engine generates more."""
        for token in tokens:
            self.request.append_output_token_ids(token)
            assert self.manager.accept_tokens(self.request, [token])

    def is_constrained(self) -> bool:
        manager: Any = self.manager
        if hasattr(manager, "_get_constraint_start"):  # vLLM 0.31
            return manager._get_constraint_start(self.request, ()) == 0
        return manager._get_constraint_bounds(self.request, ()).constraint_start == 0


def test_a_grammar_starts_behind_the_output(engine: TinyEngine) -> None:
    grammar = Grammar()
    found = Structured(engine, [1, 2], grammar)
    assert found.structured.grammar is grammar
    assert grammar.accepted == [1, 2]


def test_a_grammar_that_is_still_compiled_starts_behind_it_too(engine: TinyEngine) -> None:
    compiling: Future[Any] = Future()
    found = Structured(engine, [1], compiling)
    assert not found.structured.is_grammar_ready
    grammar = Grammar()
    compiling.set_result(grammar)
    assert found.structured.grammar is grammar
    assert grammar.accepted == [1]


def test_output_that_breaks_the_structure_fails_the_request(engine: TinyEngine) -> None:
    failure = Structured(engine, [1], Grammar(takes=False)).structured.grammar
    assert isinstance(failure, ValueError)
    assert "do not follow the requested structure" in str(failure)


def test_a_grammar_that_does_not_compile_fails_the_request(engine: TinyEngine) -> None:
    compiling: Future[Any] = Future()
    compiling.set_exception(ValueError("no grammar"))
    assert "no grammar" in str(Structured(engine, [1], compiling).structured.grammar)


def test_without_structure_there_is_nothing_to_do(engine: TinyEngine) -> None:
    request: Any = SimpleNamespace(request_id="r", structured_output_request=None)
    start_grammar_after(engine.scheduler.structured_output_manager, request, [1])


WAYS = {
    "reasoning is over": ([THINK, 5, 6, DONE, 10, 11], [10, 11], True),
    "its end is the last token": ([THINK, 5, DONE], [], True),
    "it goes on": ([THINK, 5, 6], [], False),
    "it has two ends": ([5, DONE, 10, DONE], [10, DONE], True),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_grammar_starts_behind_the_reasoning(engine: TinyEngine, way: str) -> None:
    output, structure, over = WAYS[way]
    grammar = Grammar()
    found = Structured(engine, output, grammar, parser=True)
    assert found.structured.grammar is grammar
    assert grammar.accepted == structure
    assert found.is_constrained() is over
    if not over:  # the reasoning is split between engines
        found.goes_on(7, DONE)
        assert grammar.accepted == []
        assert found.is_constrained()
    found.goes_on(20, 21)
    assert grammar.accepted == [*structure, 20, 21]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", range(7))
def test_wherever_a_sequence_moves_its_grammar_is_where_it_would_be(engine: TinyEngine, way: str, cut: int) -> None:
    whole = [*WAYS[way][0], 8, DONE, 20, 21]
    stayed, moved = Grammar(), Grammar()
    Structured(engine, [], stayed, parser=True).goes_on(*whole)
    found = Structured(engine, whole[:cut], moved, parser=True)
    assert found.structured.grammar is moved
    found.goes_on(*whole[cut:])
    assert moved.accepted == stayed.accepted


@pytest.mark.parametrize(
    "says",
    [{"prompt": [1, THINK, 3, DONE]}, {"ended": True}, {"in_reasoning": True}],
    ids=lambda says: next(iter(says)),
)
def test_without_reasoning_all_of_the_output_is_the_grammars(engine: TinyEngine, says: dict[str, Any]) -> None:
    grammar = Grammar()
    found = Structured(engine, [10, 11], grammar, parser=True, **says)
    assert found.structured.grammar is grammar
    assert grammar.accepted == [10, 11]
    assert found.is_constrained()
