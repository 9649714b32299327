"""The kept parts of vLLM's parsers, beside what vLLM makes each time."""

from __future__ import annotations

from typing import Any

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.parser import metrics
from vllm.parser.engine import streaming_parser_engine
from vllm.parser.engine.token_id_scanner import TokenIDScanner
from vllm.parser.qwen3 import qwen3_config

from tercet.router.openai.fast_path.parsed_text import MOST_KEPT, Scanners, SpecialTokenTerminals, ToolParserCalls
from tercet.router.openai.fast_path.sse_chunks import delta_json

vllms: Any = streaming_parser_engine._build_drop_info
LABELS = ["model_name", "mode", "outcome", "request_type"]
CHAT = ChatCompletionRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}]})


class OwnChat(ChatCompletionRequest):
    """A subclass, as requests of batches are."""


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    """A registry with vLLM's counter alone."""
    registry = prometheus_client.CollectorRegistry()
    found = prometheus_client.Counter("vllm:tool_call_parser_invocations", "", LABELS, registry=registry)
    monkeypatch.setattr(metrics, "_tool_call_parser_invocations", found)
    monkeypatch.setattr(metrics, "_model_name", "m")
    return registry


def counts(registry: prometheus_client.CollectorRegistry) -> dict[Any, float]:
    return {
        tuple(sample.labels.items()): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("called", [True, False, ValueError("unreadable")])
@pytest.mark.parametrize(
    "request_",
    [CHAT, OwnChat(**CHAT.model_dump()), ResponsesRequest.model_validate({"input": "x"}), object()],
    ids=["chat", "own", "responses", "other"],
)
def test_calls_are_counted_as_vllm_does(counter: Any, called: Any, is_streaming: bool, request_: object) -> None:
    told: dict[str, Any] = {"is_tool_called": called, "is_streaming": is_streaming, "request": request_}
    metrics.record_tool_parser_invocation(**told)
    (labels,) = counts(counter)
    count = ToolParserCalls()
    count(**told)
    count(**told)
    assert counts(counter) == {labels: 3.0}


def test_a_new_counter_gets_the_calls_from_then_on(counter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    count = ToolParserCalls()
    count(is_tool_called=True, is_streaming=True, request=CHAT)
    registry = prometheus_client.CollectorRegistry()
    later = prometheus_client.Counter("vllm:tool_call_parser_invocations", "", LABELS, registry=registry)
    monkeypatch.setattr(metrics, "_tool_call_parser_invocations", later)
    count(is_tool_called=True, is_streaming=True, request=CHAT)
    assert [*counts(counter).values()] == [*counts(registry).values()] == [1.0]
    monkeypatch.setattr(metrics, "_tool_call_parser_invocations", None)
    count(is_tool_called=True, is_streaming=True, request=CHAT)
    assert [*counts(registry).values()] == [1.0]


class Specials:
    """A tokenizer, as far as special tokens go."""

    def __init__(self, *texts: str) -> None:
        self.all_special_tokens = texts
        self.all_special_ids = range(len(texts))


def test_terminals_of_special_tokens_are_made_once_for_each_tokenizer_and_configuration() -> None:
    made: list[Any] = []

    def make(config: Any, tokenizer: Any) -> Any:
        made.append(tokenizer)
        return vllms(config, tokenizer)

    kept, one, other = SpecialTokenTerminals(make), Specials("<s>", "<think>"), Specials("<t>", "<u>")
    thinking, plain = qwen3_config(thinking=True), qwen3_config(thinking=False)
    for config, tokenizer in ((thinking, one), (thinking, other), (plain, one)):
        found = kept(config, tokenizer)
        assert kept(config, tokenizer) is found
        assert found.extra_token_ids == vllms(config, tokenizer).extra_token_ids
    assert made == [one, other, one]
    for _ in range(MOST_KEPT):
        kept(thinking, Specials("<v>"))
    assert kept(thinking, one).extra_token_ids == vllms(thinking, one).extra_token_ids  # made again
    assert len(kept._kept) == MOST_KEPT


class Decoder:
    """A tokenizer that records the decoded ids."""

    def __init__(self, text: Any) -> None:
        self.text, self.decoded = text, list[int]()

    def decode(self, token_ids: list[int]) -> Any:
        self.decoded += token_ids
        return self.text


def test_a_tokens_text_is_decoded_once_for_each_tokenizer() -> None:
    scanners, one, other = Scanners(TokenIDScanner), Decoder("a"), Decoder(None)
    for tokenizer, text in ((one, "a"), (other, "")):
        for _ in range(2):
            scanner, vllms_own = scanners({7: "END"}, tokenizer), TokenIDScanner({7: "END"}, Decoder(tokenizer.text))
            assert type(scanner) is TokenIDScanner
            assert scanner.scan("aa", [1, 2]) == vllms_own.scan("aa", [1, 2])
            assert scanner._decode_tokens([1, 7]) == (text, text)
        assert tokenizer.decoded == [1, 2, 7]
    for _ in range(MOST_KEPT):
        scanners({}, Decoder("b"))
    assert scanners({}, one)._decode_tokens([1]) == ("a",)  # decoded again
    assert one.decoded == [1, 2, 7, 1]
    assert len(scanners._kept) == MOST_KEPT


TEXTS = st.text() | st.none()
FUNCTIONS = st.builds(DeltaFunctionCall, arguments=TEXTS) | st.builds(DeltaFunctionCall, name=TEXTS, arguments=TEXTS)
CALLS = st.builds(DeltaToolCall, index=st.integers(0, 9), function=FUNCTIONS) | st.builds(
    DeltaToolCall, index=st.integers(0, 9), id=TEXTS, type=st.just("function"), function=FUNCTIONS | st.none()
)
DELTAS = (
    st.builds(DeltaMessage, content=TEXTS, tool_calls=st.lists(CALLS, max_size=3))
    | st.builds(DeltaMessage, tool_calls=st.lists(CALLS, max_size=3))
    | st.builds(DeltaMessage, content=TEXTS)
    | st.builds(DeltaMessage, reasoning=TEXTS)
    | st.builds(DeltaMessage, reasoning=TEXTS, content=TEXTS, tool_calls=st.lists(CALLS, max_size=2))
)


@given(delta=DELTAS)
def test_deltas_are_written_as_vllm_does(delta: DeltaMessage) -> None:
    assert delta_json(delta) == delta.model_dump_json(exclude_unset=True).encode()
