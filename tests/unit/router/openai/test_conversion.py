"""Log probabilities on their way from an engine to a client keep their tokens, values and ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.logprobs import append_logprobs_for_next_position
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.outputs import LogprobsLists

from tercet.protocol import BadRequest, Output, TokenLogprob
from tercet.router.openai.program_client import to_core_output, to_request
from tercet.vllm_plugin.edge.llm_requests import reasoning_of, to_vllm

VOCABULARY = 40


def as_an_engine_says_it(sampled_rank: int, num_logprobs: int) -> tuple[TokenLogprob, ...]:
    """The sampled token and the top ones, each once; the token of rank r is called 1000 + r."""
    ranks = dict.fromkeys([sampled_rank, *range(1, num_logprobs + 1)])
    return tuple(TokenLogprob(1000 + rank, -float(rank), rank) for rank in ranks)


def as_vllm_reads_it(found: LogprobsLists, row: int, num_logprobs: int) -> dict[int, tuple[float, int | None]]:
    read: list[dict[int, object]] = []
    token_ids = found.logprob_token_ids[row].tolist()
    append_logprobs_for_next_position(
        read,  # type: ignore[arg-type]
        token_ids, found.logprobs[row].tolist(), ["?"] * len(token_ids), int(found.sampled_token_ranks[row]),
        num_logprobs,
    )  # fmt: skip
    return {token: (item.logprob, item.rank) for token, item in read[0].items()}  # type: ignore[attr-defined]


@given(st.lists(st.integers(1, VOCABULARY), min_size=1, max_size=6), st.integers(0, 8))
def test_logprobs(sampled_ranks: list[int], num_logprobs: int) -> None:
    positions = tuple(as_an_engine_says_it(rank, num_logprobs) for rank in sampled_ranks)
    output = to_core_output("s", 1, Output(tuple(p[0].token_id for p in positions), logprobs=positions), None)
    assert output.new_logprobs is not None
    for row, position in enumerate(positions):
        expected = {found.token_id: (found.logprob, found.rank) for found in position}
        read = as_vllm_reads_it(output.new_logprobs, row, num_logprobs)
        assert read == expected
        assert next(iter(read)) == position[0].token_id


@pytest.mark.parametrize("num_logprobs", [0, 1, 5])
def test_prompt_logprobs_have_none_for_the_first_token(num_logprobs: int) -> None:
    positions = (None, *(as_an_engine_says_it(rank, num_logprobs) for rank in (1, 3, 30)))
    tensors = to_core_output("s", 4, Output((7,), prompt_logprobs=positions), None).new_prompt_logprobs_tensors
    assert tensors is not None
    lists = LogprobsLists(
        tensors.logprob_token_ids.numpy(), tensors.logprobs.numpy(), tensors.selected_token_ranks.numpy()
    )
    for row, position in enumerate(positions[1:]):
        assert position is not None
        expected = {found.token_id: (found.logprob, found.rank) for found in position}
        assert as_vllm_reads_it(lists, row, num_logprobs) == expected


# ---- where the structure of the output starts ----------------------------------------------------------------------


def asked(params: SamplingParams) -> EngineCoreRequest:
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    return EngineCoreRequest(
        request_id="r", prompt_token_ids=[1], mm_features=None, sampling_params=params, pooling_params=None,
        arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None, reasoning_ended=False,
        reasoning_parser_kwargs=kwargs,
    )  # fmt: skip


def test_engines_hear_of_the_reasoning_before_a_structure() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="x"))
    told = to_request(asked(params), {}).sampling_params
    said = {"reasoning_ended": False, "reasoning_parser_kwargs": {"chat_template_kwargs": {"enable_thinking": False}}}
    assert reasoning_of(told) == said
    assert to_vllm(told, {}, 0).structured_outputs is not None


def test_without_a_structure_nothing_is_said_of_the_reasoning() -> None:
    assert reasoning_of(to_request(asked(SamplingParams()), {}).sampling_params) == {}


def test_nonsense_about_the_reasoning_is_refused() -> None:
    with pytest.raises(BadRequest, match="reasoning_ended"):
        reasoning_of({"reasoning_ended": "perhaps"})
