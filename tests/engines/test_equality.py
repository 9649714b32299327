"""Greedy output through `disaggregated` is what one engine alone gives, token for token."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from tercet.protocol import Request
from tercet.wire.client import HttpEngine

from .conftest import MAX_BATCHED, Fleet
from .prompts import BLOCK, alone, calls_of, complete, prompt_of, tokens_of

pytestmark = pytest.mark.verifies("a pair gives one engine's tokens")

TRACE = {"x-tercet-trace": "1"}


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 17, 2 * MAX_BATCHED + 40])
async def test_same_tokens_as_one_engine(fleet: Fleet, nothing_leaks: None, length: int) -> None:
    prompt = prompt_of(length)
    expected = await alone(fleet.engine_url("prefill"), prompt)
    answer = await complete(fleet.url, prompt, TRACE, cache_salt=uuid.uuid4().hex)
    assert tokens_of(answer) == expected
    assert calls_of(answer) == ["prep_recv", "remote_send", "start_generate"]


async def test_bytes_are_what_the_missing_range_needs(fleet: Fleet, decode: HttpEngine, nothing_leaks: None) -> None:
    salt, prompt = uuid.uuid4().hex, prompt_of(3 * BLOCK + 50, seed=1)
    async with decode.prep_recv(_request(prompt, salt)) as probe:
        layout = probe.kv_addr_info.layout
    first = await complete(fleet.url, prompt, TRACE, cache_salt=salt)
    send = _event(first, "remote_send")
    assert (send["begin"], send["end"]) == (0, len(prompt))
    assert send["bytes"] == 4 * layout.num_layers * layout.block_bytes

    again = await complete(fleet.url, prompt, TRACE, cache_salt=salt)
    assert tokens_of(again) == tokens_of(first)
    send = _event(again, "remote_send")
    assert send["begin"] == 3 * BLOCK
    assert send["bytes"] == layout.num_layers * layout.block_bytes


async def test_shared_prefix_is_neither_computed_nor_sent_again(fleet: Fleet, nothing_leaks: None) -> None:
    salt, prefix = uuid.uuid4().hex, prompt_of(2 * BLOCK, seed=2)
    await complete(fleet.url, prefix + prompt_of(60, seed=3), cache_salt=salt)
    other = prefix + prompt_of(90, seed=4)
    answer = await complete(fleet.url, other, TRACE, cache_salt=salt)
    assert tokens_of(answer) == await alone(fleet.engine_url("prefill"), other)
    send = _event(answer, "remote_send")
    assert send["begin"] == 2 * BLOCK
    assert send["cached"] == 2 * BLOCK
    assert _event(answer, "prep_recv")["cached"] == 2 * BLOCK
    assert answer["usage"]["prompt_tokens"] == len(other)


async def test_seeded_sampling_after_a_prompt_of_several_steps(fleet: Fleet, nothing_leaks: None) -> None:
    prompt = prompt_of(2 * MAX_BATCHED + 40, seed=12)
    settings: dict[str, Any] = {"temperature": 0.9, "seed": 5}
    salt, engine = uuid.uuid4().hex, fleet.engine_url("prefill")
    expected = tokens_of(await complete(engine, prompt, cache_salt=salt, **settings))
    # The prompt is in that cache now, so that its rest takes one step: what is sampled must not depend on that.
    assert tokens_of(await complete(engine, prompt, cache_salt=salt, **settings)) == expected
    answer = await complete(fleet.url, prompt, TRACE, cache_salt=uuid.uuid4().hex, **settings)
    assert tokens_of(answer) == expected


async def test_sixteen_at_once(fleet: Fleet, nothing_leaks: None) -> None:
    prompts = [prompt_of(40 + 37 * i, seed=5) for i in range(16)]
    expected = [await alone(fleet.engine_url("prefill"), prompt) for prompt in prompts]
    answers = await asyncio.gather(
        *(complete(fleet.url, prompt, TRACE, cache_salt=uuid.uuid4().hex) for prompt in prompts)
    )
    assert [tokens_of(answer) for answer in answers] == expected
    assert all(answer["tercet"]["program"] == "disaggregated" for answer in answers)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8, "seed": 7},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "seed": 11},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"min_tokens": 8, "max_tokens": 12},
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"ignore_eos": True, "max_tokens": 40},
    ],
    ids=lambda fields: "-".join(fields),
)
async def test_first_token_counts_as_output(fleet: Fleet, nothing_leaks: None, sampling: dict[str, float]) -> None:
    """Seeds, penalties and limits go on where the prefill engine left off."""
    prompt = prompt_of(200, seed=6)
    expected = await alone(fleet.engine_url("prefill"), prompt, **sampling)
    answer = await complete(fleet.url, prompt, TRACE, cache_salt=uuid.uuid4().hex, **sampling)
    assert tokens_of(answer) == expected
    assert _event(answer, "remote_send")["bytes"] > 0


async def test_grammar_goes_on_after_the_first_token(fleet: Fleet, nothing_leaks: None) -> None:
    fields: dict[str, Any] = {"structured_outputs": {"regex": r"(yes|no), [0-9]{4}-[0-9]{2}"}, "max_tokens": 30}
    prompt = prompt_of(150, seed=8)
    expected = await complete(fleet.engine_url("prefill"), prompt, cache_salt=uuid.uuid4().hex, **fields)
    answer = await complete(fleet.url, prompt, TRACE, cache_salt=uuid.uuid4().hex, **fields)
    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
    assert _event(answer, "remote_send")["bytes"] > 0


async def test_logprobs_are_the_same(fleet: Fleet, nothing_leaks: None) -> None:
    prompt = prompt_of(140, seed=9)
    fields: dict[str, Any] = {"logprobs": 3, "max_tokens": 6}
    expected = await complete(fleet.engine_url("prefill"), prompt, cache_salt=uuid.uuid4().hex, **fields)
    answer = await complete(fleet.url, prompt, cache_salt=uuid.uuid4().hex, **fields)
    got, want = (reply["choices"][0]["logprobs"] for reply in (answer, expected))
    assert got["tokens"] == want["tokens"]
    assert got["token_logprobs"] == pytest.approx(want["token_logprobs"], abs=1e-3)
    assert [set(top) for top in got["top_logprobs"]] == [set(top) for top in want["top_logprobs"]]


def _event(answer: dict, verb: str) -> dict:
    found = next(event for event in answer["tercet"]["events"] if event["verb"] == verb)
    defaults = {"begin": 0, "end": 0, "cached": 0, "received": 0, "computed": 0, "bytes": 0, "chunks": 0}
    return {**defaults, **found}


def _request(prompt: list[int], salt: str) -> Request:
    return Request(seq_id=uuid.uuid4().hex, prompt=tuple(prompt), cache_salt=salt)
