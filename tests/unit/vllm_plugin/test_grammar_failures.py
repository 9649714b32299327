"""Failures of structured outputs in the API server: a request's queue gets them, and nothing after them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import RequestOutputCollector

from tercet.protocol import BadRequest, GrammarsBusy
from tercet.vllm_plugin.core.grammar_time import REFUSED, UNTRIED
from tercet.vllm_plugin.edge import llm_requests
from tercet.vllm_plugin.edge.llm_requests import StructureRefused, StructureUntried, _as_ours, failure_of

pytestmark = pytest.mark.vllm


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
