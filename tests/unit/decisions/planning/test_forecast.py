"""Forecasts: level, trend and season of made loads, and none from too little."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tercet.decisions.planning import ObservedRequest, answers_completed
from tercet_planner.forecast import Forecast, Forecaster, is_enough


def poisson(
    rate_at: Callable[[float], float], seconds: float, seed: int = 0, prompt: int = 500, output: int = 50
) -> list[ObservedRequest]:
    chance, at, found = random.Random(seed), 0.0, list[ObservedRequest]()
    while True:
        at += chance.expovariate(max(0.01, rate_at(at)))
        if at >= seconds:
            return found
        found.append(ObservedRequest(at, prompt, output, True))


def looked(arrivals: list[ObservedRequest], until: float, ahead: float = 30.0, window: float = 60.0) -> list[Forecast]:
    forecaster, found = Forecaster(), list[Forecast]()
    for step in range(1, int(until / 15) + 1):
        now = step * 15.0
        seen = [each for each in arrivals if now - window < each.at <= now]
        forecast = forecaster.look(now, 0.0, seen, ahead)
        assert forecast is not None
        found.append(forecast)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_level_of_a_steady_load(seed: int) -> None:
    found = looked(poisson(lambda _: 20.0, 600, seed), 600)
    assert all(14 < each.rate < 28 for each in found[2:])


def test_a_trend_reaches_ahead() -> None:
    found = looked(poisson(lambda at: 5 + at / 10, 300), 300)
    level = len(found[-1].sample) / 60
    assert "trend +" in found[-1].why
    assert found[-1].rate > 1.05 * level


@pytest.mark.slow
def test_a_season_is_seen_after_two_of_them() -> None:
    period = 600.0
    found = looked(poisson(lambda at: 30 - 25 * math.cos(2 * math.pi * at / period), 2400), 2400, ahead=120.0)
    assert any("season" in each.why for each in found[120:])
    errors = [
        abs(each.rate / (30 - 25 * math.cos(2 * math.pi * ((step + 1) * 15.0 + 60) / period)) - 1)
        for step, each in enumerate(found)
        if step >= 120 and "season" in each.why
    ]
    assert sorted(errors)[len(errors) // 2] < 0.35


def test_a_change_of_the_mix_makes_the_rest_history() -> None:
    before = poisson(lambda _: 45.0, 100, prompt=3000, output=80)
    after = [ObservedRequest(each.at + 100, 200, 1000, True) for each in poisson(lambda _: 45.0, 20, seed=1)]
    forecast = Forecaster().look(120.0, 0.0, [each for each in before + after if each.at > 60], 30.0)
    assert forecast is not None
    assert {each.prompt_tokens for each in forecast.sample} == {200}
    assert forecast.rate == pytest.approx(45, rel=0.3)


@pytest.mark.parametrize("seed", range(4))
def test_a_lull_of_a_few_long_requests_is_no_change(seed: int) -> None:
    """Three requests a second of lengths from a few tokens to tens of thousands, as people's conversations have."""
    chance = random.Random(seed)
    steady = [
        ObservedRequest(each.at, round(chance.lognormvariate(8.5, 1.3)), round(chance.lognormvariate(5.5, 0.8)), True)
        for each in poisson(lambda _: 3.0, 1800, seed)
    ]
    found = looked(steady, 1800, window=180.0)
    assert min(len(each.sample) for each in found[12:]) > 150
    assert all(2.0 < each.rate < 4.5 for each in found[12:])


@pytest.mark.slow
def test_errors_that_chance_explains_teach_little() -> None:
    forecaster, steady = Forecaster(), poisson(lambda _: 3.0, 3600)
    corrections = list[float]()
    for step in range(1, 240):
        now = 15.0 * step
        forecaster.look(now, 0.0, [each for each in steady if now - 180 < each.at <= now], 30.0)
        corrections.append(forecaster.correction)
    assert 0.9 < min(corrections) < max(corrections) < 1.12


def test_too_little_is_no_forecast_and_no_traffic_is_one() -> None:
    assert Forecaster().look(3.0, 0.0, [ObservedRequest(1.0, 10, 10, True)], 30.0) is None
    assert Forecaster().look(3.0, 0.0, [], 30.0) is None
    for over in ([], [ObservedRequest(each / 10, 10, 10, True) for each in range(200)]):
        found = Forecaster().look(80.0, 0.0, over, 30.0)
        assert found is not None
        assert found.rate == 0


def test_answers_that_have_not_ended_are_as_long_as_longer_ones_of_like_prompts() -> None:
    ended = [ObservedRequest(float(at), 200, length, True) for at, length in enumerate([100, 300, 500, 700] * 5)]
    others = [ObservedRequest(30.0, 3000, 10, True) for _ in range(50)]
    running = [
        ObservedRequest(40.0, 210, 400, False),
        ObservedRequest(41.0, 200, 900, False),
        ObservedRequest(42.0, 200, 0, False),
    ]
    first, beyond, new = answers_completed([*ended, *others, *running])[-3:]
    assert first.output_tokens in (500, 700)
    assert beyond.output_tokens == 1800
    assert new.output_tokens in (100, 300, 500, 700)
    assert all(each.ended for each in (first, beyond, new))


@pytest.mark.parametrize(
    ("rate", "ended", "now", "enough"),
    [(60, True, 5.0, True), (10, True, 5.0, False), (60, False, 5.0, False), (0.1, False, 15.0, True)],
)
def test_the_first_seconds_tell_enough_if_many_came_and_their_answers_ended(
    rate: float, ended: bool, now: float, enough: bool
) -> None:
    came = [replace(each, ended=ended or each.at > now / 2) for each in poisson(lambda _: rate, now)]
    assert is_enough(now, 0.0, came) is enough
