"""Engines that split a model over stages or ranks, or guess tokens ahead, beside one that does none of it."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tercet.protocol import LayoutMismatch
from tercet.wire.client import HttpEngine
from tests.engines.commands import counted
from tests.engines.conftest import settled
from tests.engines.prompts import complete, prompt_of, tokens_of
from tests.engines.unlike import engines_with, hand_over

from .checkpoints import checkpoint
from .drafters import Drafter
from .families import NGRAM

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

WHOLE = ("0",)
STAGES, RANKS = ("0|1", "--pipeline-parallel-size", "2"), ("0|1", "--tensor-parallel-size", "2")
BOTH = ("0|1|0|1", *STAGES[1:], *RANKS[1:])
LENGTHS = (5, 128, 129, 300)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
async def test_stages_and_one_engine_without_hand_over_to_each_other(family: str, tmp_path: Path) -> None:
    """Layers of several groups are cut between the two stages."""
    await _hand_over_to_each_other(family, WHOLE, STAGES, tmp_path)


async def test_ranks_that_hold_the_same_head_and_one_that_holds_it_alone_hand_over_to_each_other(
    tmp_path: Path,
) -> None:
    """One KV head on two ranks: each of them has all of it."""
    await _hand_over_to_each_other("llama_one_head", WHOLE, RANKS, tmp_path)


@pytest.mark.parametrize(("one", "other"), [(STAGES, RANKS), (WHOLE, BOTH)], ids=["unlike", "both"])
async def test_stages_and_ranks_hand_over_to_each_other(
    one: tuple[str, ...], other: tuple[str, ...], tmp_path: Path
) -> None:
    """All heads of some layers on one side, some heads of all layers on the other; or a part of both."""
    await _hand_over_to_each_other("llama", one, other, tmp_path)


async def _hand_over_to_each_other(
    family: str, one: tuple[str, ...], other: tuple[str, ...], tmp_path: Path
) -> None:  # fmt: skip
    with engines_with({"one": one, "other": other}, str(checkpoint(family)), tmp_path) as urls:
        async with HttpEngine("one", urls["one"]) as first, HttpEngine("other", urls["other"]) as second:
            for length in LENGTHS:
                prompt = prompt_of(length, seed=length)
                alone = await complete(urls["one"], prompt, cache_salt=uuid.uuid4().hex, ignore_eos=True)
                own = await complete(urls["other"], prompt, cache_salt=uuid.uuid4().hex, ignore_eos=True)
                assert tokens_of(own) == tokens_of(alone)
                for source, target in ((first, second), (second, first)):
                    tokens, received = await hand_over(source, target, prompt, uuid.uuid4().hex)
                    assert (tokens, received) == (tokens_of(alone), length)
            await settled(first)
            await settled(second)


async def test_guessed_tokens_are_handed_over_only_once_they_are_accepted(tmp_path: Path) -> None:
    """Prompts that repeat themselves, so that guesses are made; some are accepted, and some are not."""
    flags = {"whole": ("0",), "guessing": ("1", "--speculative-config", NGRAM)}
    with engines_with(flags, str(checkpoint("llama")), tmp_path) as urls:
        async with HttpEngine("whole", urls["whole"]) as whole, HttpEngine("guessing", urls["guessing"]) as guessing:
            for length in LENGTHS:
                prompt = prompt_of(length, seed=length) * 2
                alone = await complete(
                    urls["whole"], prompt, max_tokens=60, cache_salt=uuid.uuid4().hex, ignore_eos=True
                )  # fmt: skip
                for source, target in ((whole, guessing), (guessing, whole)):
                    tokens, received = await hand_over(source, target, prompt, uuid.uuid4().hex, num_tokens=60)
                    assert (tokens, received) == (tokens_of(alone), len(prompt))
            await settled(whole)
            await settled(guessing)


async def test_what_a_drafter_remembers_goes_along_with_what_the_model_does(tmp_path: Path) -> None:
    """The drafter is the model itself, so that it guesses right wherever it has the KV of all tokens before.

    An engine without it has other layers, and refuses.
    """
    guessing = ("--speculative-config", Drafter("draft_model", "llama").speculative_config(checkpoint))
    flags = {"source": ("0", *guessing), "target": ("1", *guessing), "plain": ("0|1",)}
    with engines_with(flags, str(checkpoint("llama")), tmp_path) as urls:
        async with (
            HttpEngine("source", urls["source"]) as source,
            HttpEngine("target", urls["target"]) as target,
            HttpEngine("plain", urls["plain"]) as plain,
        ):
            for length in LENGTHS:
                prompt = prompt_of(length, seed=length)
                alone = await complete(
                    urls["plain"], prompt, max_tokens=60, cache_salt=uuid.uuid4().hex, ignore_eos=True
                )  # fmt: skip
                before = _guesses(urls["target"])
                tokens, received = await hand_over(source, target, prompt, uuid.uuid4().hex, num_tokens=60)
                assert (tokens, received) == (tokens_of(alone), length)
                made, right = (now - then for now, then in zip(_guesses(urls["target"]), before, strict=True))
                # Of the last step more is guessed than there is room for.
                assert made > 30
                assert made - right <= 3, (length, made, right)
            with pytest.raises(LayoutMismatch, match="drafter"):
                await hand_over(plain, target, prompt_of(300), uuid.uuid4().hex)
            for engine in (source, target, plain):
                await settled(engine)


def _guesses(url: str) -> tuple[float, float]:
    """How many tokens an engine has guessed so far, and how many of them were right."""
    made, right = (counted(url, f"vllm:spec_decode_num_{name}_tokens_total") for name in ("draft", "accepted"))
    return made, right
