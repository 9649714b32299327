"""The capacity of an engine by a router's own fits."""

from __future__ import annotations

import pytest

from tercet.decisions.planning import MOST_DECODES, LearnedCapacity


def capacity(kv_tokens: int = 0) -> LearnedCapacity:
    return LearnedCapacity(
        lambda tokens: tokens * 2e-5, lambda n, contexts: 5e-3 + 4e-5 * n + 5e-8 * contexts, kv_tokens
    )


@pytest.mark.parametrize(("context", "tpot", "most"), [(1000.0, 0.0142, 102), (0.0, 0.0091, 102), (1000.0, 0.001, 1)])
def test_as_many_decode_as_a_step_allows(context: float, tpot: float, most: int) -> None:
    assert capacity().decodes(context, tpot) == most


def test_no_more_decode_than_the_cache_holds() -> None:
    assert capacity(kv_tokens=20_000).decodes(1000.0, 0.0142) == 20
    assert capacity(kv_tokens=500).decodes(1000.0, 0.0142) == 1
    assert capacity().decodes(1.0, 100.0) == MOST_DECODES


def test_prompts_cost_what_was_learned() -> None:
    assert capacity().prefill_s(3000) == pytest.approx(0.06)
