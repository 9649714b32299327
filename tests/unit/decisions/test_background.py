"""How many tokens of background requests an engine's steps have, and how many requests of batches may run next to
others.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tercet.decisions.background import IDLE_S, PROBE, SLACK, StepShare
from tercet.decisions.gaps import ENOUGH, FULL, LONG_QUEUE, PATIENCE, Gaps
from tercet.protocol import EngineLoad

MOST = 2048
moments = st.tuples(st.floats(0, 2 * IDLE_S), st.booleans(), st.integers(0, 20), st.floats(1e-6, 10))


class Device:
    """An engine whose steps take a time for the weights, and one for each token."""

    def __init__(self, weights: float, token: float, prompt: int = 500) -> None:
        self.weights, self.token, self.prompt = weights, token, prompt
        self.share, self.now = StepShare(MOST), 0.0
        self.share.resume(0.0)

    def time_of(self, tokens: int) -> float:
        return self.weights + self.token * tokens

    def steps(self, number: int, decodes: int, prompt_every: int = 20) -> list[int]:
        """Run steps with as many background tokens as are allowed; return the numbers in steps without prompts."""
        given = list[int]()
        for at in range(number):
            has_prompts = prompt_every > 0 and at % prompt_every == 0
            tokens = self.share.tokens(self.now, has_prompts, decodes)
            seconds = self.time_of(tokens + decodes + self.prompt * has_prompts)
            self.share.ended(seconds, has_prompts, decodes, tokens)
            self.now += seconds
            given += [] if has_prompts else [tokens]
        return given


@given(st.lists(moments, max_size=80), st.integers(1, 64))
def test_never_next_to_a_prompt_and_otherwise_within_the_step(
    seen: list[tuple[float, bool, int, float]], least: int
) -> None:
    share, now = StepShare(MOST, least), 0.0
    share.resume(now)
    for passed, has_prompts, decodes, seconds in seen:
        now += passed
        tokens = share.tokens(now, has_prompts, decodes)
        assert 0 <= tokens <= MOST
        assert not (has_prompts and tokens)
        if not has_prompts and not decodes:
            assert tokens >= least, "an engine that has nothing else goes on"
        share.ended(seconds, has_prompts, decodes, tokens)


@given(st.floats(0.002, 0.05), st.floats(2e-6, 2e-3), st.integers(1, 30))
def test_on_any_device_a_step_is_longer_by_at_most_the_slack_of_a_step_with_a_prompt(
    weights: float, token: float, decodes: int
) -> None:
    device = Device(weights, token)
    device.steps(1500, decodes)
    room = SLACK * device.time_of(500 + decodes)
    steps = [tokens for tokens in device.steps(400, decodes) if tokens]
    # Whole tokens, of which the number changes by a twentieth after a step.
    fits = room / token
    assert max(steps) <= 1.06 * (fits + 1)
    assert max(steps) >= min(MOST, 0.94 * fits) - 1, "what is left is used"


def test_some_steps_show_what_is_there_without_the_background() -> None:
    device = Device(0.006, 1e-5)
    assert sum(tokens == 0 for tokens in device.steps(10 * PROBE, 5, prompt_every=0)) == 10
    # An engine without other requests would be idle in such a step: it has one token.
    assert sum(tokens == 1 for tokens in device.steps(10 * PROBE, 0, prompt_every=0)) == 10


def test_an_engine_that_had_no_other_requests_for_long_is_given_to_the_background() -> None:
    share = StepShare(MOST)
    share.resume(100.0)
    assert share.tokens(100.0 + IDLE_S - 1, False, 0) < MOST
    assert share.tokens(100.0 + IDLE_S, False, 0) == MOST
    assert share.tokens(100.0 + IDLE_S + 1, True, 0) == 0
    assert share.tokens(100.0 + IDLE_S + 2, False, 0) < MOST
    share.resume(500.0)
    assert share.tokens(501.0, False, 0) < MOST


loads = st.builds(
    EngineLoad,
    waiting=st.integers(0, 3),
    running=st.integers(0, 300),
    kv_usage=st.floats(0, 1),
    step_time=st.none() | st.floats(0, 1),
)
looks = st.tuples(st.lists(st.none() | loads, max_size=5), st.booleans())


def idle(kv_usage: float = 0.1, waiting: int = 0, step_time: float = 0.01) -> EngineLoad:
    return EngineLoad(waiting=waiting, running=0, kv_usage=kv_usage, step_time=step_time)


@given(st.lists(looks, max_size=60), st.integers(1, 50))
def test_never_more_than_the_most_and_never_more_than_one_more_at_a_look(
    seen: list[tuple[list[EngineLoad | None], bool]], per_engine: int
) -> None:
    gaps, running = Gaps(per_engine), 0
    for engines, waits in seen:
        allowed = gaps.look(engines, waits, running)
        assert 0 <= allowed <= per_engine * sum(load is not None for load in engines)
        assert allowed <= running + 1
        if waits or any(load is not None and load.kv_usage >= FULL for load in engines):
            assert allowed <= running
        running = allowed


def test_it_grows_to_the_most_in_an_idle_fleet_and_stays_there() -> None:
    gaps, running = Gaps(8), 0
    for _ in range(40):
        running = gaps.look([idle(), idle()], False, running)
    assert running == 16


def test_without_a_report_nothing_runs() -> None:
    gaps = Gaps(8)
    assert [gaps.look([None], False, 0) for _ in range(5)] == [0] * 5
    assert gaps.look([], False, 3) == 0


def test_requests_that_wait_for_long_at_the_router_end_others() -> None:
    gaps, running = Gaps(64), 40
    gaps.allowed = 40
    seen = list[int]()
    for _ in range(PATIENCE + 4):
        running = gaps.look([idle()], True, running)
        seen.append(running)
    assert seen[: PATIENCE - 1] == [40] * (PATIENCE - 1)
    assert seen[PATIENCE - 1 :] == [20, 10, 5, 2, 1]


def test_a_queue_on_an_engine_halves_what_may_begin_and_ends_nothing() -> None:
    gaps = Gaps(64)
    gaps.allowed = 40
    assert [gaps.look([idle(waiting=LONG_QUEUE)], False, 40) for _ in range(4)] == [40] * 4
    assert gaps.look([idle()], False, 0) < 6


def test_none_begins_while_every_engine_has_enough_to_do() -> None:
    gaps = Gaps(64)
    gaps.allowed = 40
    assert [gaps.look([idle(waiting=ENOUGH)], False, 40) for _ in range(4)] == [40] * 4
    assert gaps.look([idle(waiting=ENOUGH), idle(waiting=ENOUGH - 1)], False, 40) == 41


def test_a_full_cache_ends_requests_and_slow_steps_let_none_begin() -> None:
    assert Gaps(64).look([idle(kv_usage=0.95)], False, 40) == 20
    gaps = Gaps(64, most_step_s=0.02)
    gaps.allowed = 8
    assert gaps.look([idle(step_time=0.03)], False, 7) == 7
    assert gaps.allowed == 3.5
    assert gaps.look([idle(step_time=0.01)], False, 2) == 3
