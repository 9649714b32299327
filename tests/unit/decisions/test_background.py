"""How many tokens of background requests an engine's steps have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tercet.decisions.background import IDLE_S, PROBE, SLACK, StepShare

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
