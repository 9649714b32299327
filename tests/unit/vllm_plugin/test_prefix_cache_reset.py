"""vLLM's reset of the prefix cache while blocks are held for others: it is refused, and nothing is lost."""

from __future__ import annotations

import pytest

from .tiny_engine import BLOCK, TinyEngine, send_of, tokens_of

LEASE = "a" * 32


def test_a_reset_is_refused_while_a_lease_is_open(engine: TinyEngine) -> None:
    before = tokens_of(2 * BLOCK + 1, start=500)
    engine.run(engine.add("before", before, max_tokens=1))
    tokens = tokens_of(2 * BLOCK)
    engine.reserve(LEASE, tokens)
    assert engine.scheduler.reset_prefix_cache() is False
    assert engine.cached(before) == 2 * BLOCK
    assert engine.status()["leases"] == 1
    engine.agent.received[LEASE] = 2 * BLOCK  # what arrives afterwards is taken as ever
    engine.commit(LEASE, 2 * BLOCK)
    assert engine.release(LEASE) == 2 * BLOCK
    assert engine.cached(tokens) == 2 * BLOCK
    assert engine.scheduler.reset_prefix_cache() is True
    assert engine.cached(tokens) == engine.cached(before) == 0


def test_a_reset_is_refused_while_a_send_is_under_way(engine: TinyEngine) -> None:
    tokens = tokens_of(2 * BLOCK)
    engine.run(engine.add("before", [*tokens, 1], max_tokens=1))
    assert engine.push_cached(tokens, send_of("s", 0, 2 * BLOCK))
    assert engine.scheduler.reset_prefix_cache() is False
    assert engine.cached(tokens) == 2 * BLOCK
    engine.end_send("s")
    assert engine.scheduler.reset_prefix_cache() is True
    assert engine.cached(tokens) == 0


def test_a_reset_that_preempts_requests_says_that_leases_are_in_the_way(engine: TinyEngine) -> None:
    engine.reserve(LEASE, tokens_of(BLOCK))
    request = engine.add("r", tokens_of(20, start=700), max_tokens=3)
    engine.step()
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert engine.status()["leases"] == 1
    engine.release(LEASE)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True) is True
    assert len(engine.run(request)) == 3


def test_a_reset_with_the_connector_is_refused_as_well(engine: TinyEngine) -> None:
    engine.reserve(LEASE, tokens_of(BLOCK))
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is False
    engine.release(LEASE)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is True
