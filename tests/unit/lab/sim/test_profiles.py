"""Profiles: what is refused, what the fit finds, what extrapolation does."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tercet.protocol import BadRequest
from tercet_lab.sim import StepModel, load_profile, parse_profile, shipped_profiles
from tercet_lab.sim.step_times import (
    DecodePoint,
    HostSharing,
    PrefillPoint,
    StepTimes,
    fit_steps,
    non_negative_least_squares,
    pairs_of,
)

from .models import profile_of

WANTED = {
    "llama-3.1-70b-fp8-h100-tp4",
    "llama-3.1-70b-fp8-h100-tp8",
    "llama-3.1-8b-h100-tp1",
    "qwen3-32b-h100-tp2",
    "smollm2-135m-cpu",
}

SHARING = dict.fromkeys(HostSharing.__struct_fields__, 1.0)


def test_the_profiles_that_are_promised_are_there() -> None:
    assert set(shipped_profiles()) >= WANTED


@pytest.mark.parametrize("name", shipped_profiles())
def test_a_shipped_profile_is_sane(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.provenance.source
    assert profile.provenance.date
    assert max(profile.provenance.fit_error.values()) < 0.05
    assert profile.layout().block_bytes > 0
    model = StepModel(profile.steps)
    sizes = (1, 2, 16, 100, 512, 1000, 3000, 8192, 20_000, 100_000)
    prefills = [model.step(size, pairs_of(0, size), 0, 0) for size in sizes]
    decodes = [model.step(0, 0, batch, batch * 1000) for batch in (1, 2, 8, 64, 256, 1024)]
    assert prefills == sorted(prefills)
    assert decodes == sorted(decodes)
    assert model.step(512, pairs_of(4096, 4608), 0, 0) > model.step(512, pairs_of(0, 512), 0, 0)
    assert model.step(512, pairs_of(0, 512), 16, 16_000) > model.step(512, pairs_of(0, 512), 0, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"tp_size": -1}, "tp_size is -1"),
        ({"surprise": 1}, "unknown field `surprise`"),
        ({"steps": {"knots": [[1, 0.1]], "pair": 0, "context": 0}}, "knots needs at least two points"),
        ({"steps": {"knots": [[1, 0.2], [2, 0.1]], "pair": 0, "context": 0}}, "never fall"),
        ({"steps": {"knots": [[2, 0.1], [1, 0.2]], "pair": 0, "context": 0}}, "must rise"),
        ({"steps": {"knots": [[1, 0.1], [2, 0.2]], "pair": -1, "context": 0}}, "steps.pair is -1"),
        ({"transfer": {"bytes_per_second": 0, "latency": 0}}, "bytes_per_second must be positive"),
        ({"router": -0.1}, "call and router must not be negative"),
        ({"sharing": SHARING | {"prefill_beside_decode": 0.9}}, "sharing.prefill_beside_decode is 0.9"),
        ({"sharing": SHARING | {"linger": -1}}, "sharing.linger is -1"),
        ({"sharing": {"decode_beside_decode": 1.5}}, "missing required field"),
    ],
)
def test_what_is_wrong_with_a_profile_is_said(change: dict[str, object], says: str) -> None:
    data = msgspec.json.encode({**msgspec.to_builtins(profile_of()), **change})
    with pytest.raises(BadRequest, match=says) as raised:
        parse_profile(data, "mine.json")
    assert raised.value.param == "profile"


@pytest.mark.parametrize(("name", "says"), [("nonsense", "choose .*smollm2"), ("no/such.json", "does not exist")])
def test_an_unknown_profile_is_refused(name: str, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        load_profile(name)


def test_the_fit_finds_the_terms_that_made_the_points() -> None:
    knots = (1, 64, 1024, 8192)
    true = StepTimes(
        knots=((1, 0.006), (64, 0.007), (1024, 0.030), (8192, 0.21)), pair=2e-9, context=4e-8, sequence=1e-5
    )
    model = StepModel(true)
    prefills = [
        PrefillPoint(tokens, cached, model.step(tokens, pairs_of(cached, cached + tokens), 0, 0))
        for tokens in (16, 64, 256, 1024, 4096, 16384)
        for cached in (0, 4096)
    ]
    decodes = [
        DecodePoint(batch, context, model.step(0, 0, batch, batch * (context + 1)))
        for batch in (1, 8, 64, 256)
        for context in (128, 2048)
    ]
    found, errors = fit_steps(prefills, decodes, knots)
    assert max(errors.values()) < 1e-3
    assert found.pair == pytest.approx(true.pair, rel=0.01)
    assert found.context == pytest.approx(true.context, rel=0.01)
    assert [at for _, at in found.knots] == pytest.approx([at for _, at in true.knots], rel=0.02)


def test_too_few_points_are_refused() -> None:
    with pytest.raises(BadRequest, match="cannot determine"):
        fit_steps([PrefillPoint(1, 0, 0.1)], [DecodePoint(1, 1, 0.1)], (1, 2))


@pytest.mark.parametrize("seed", range(10))
def test_least_squares_is_optimal_and_never_negative(seed: int) -> None:
    chance = np.random.default_rng(seed)
    matrix, target = chance.normal(size=(30, 8)), chance.normal(size=30)
    found = non_negative_least_squares(matrix, target)
    gradient = matrix.T @ (target - matrix @ found)
    assert (found >= 0).all()
    # No coordinate that is zero wants to grow, and none that is not wants to move.
    assert (gradient <= 1e-6).all()
    assert np.abs(gradient[found > 0]).max(initial=0) < 1e-6


def test_scales_multiply_their_part() -> None:
    times = profile_of().steps
    plain, scaled = StepModel(times), StepModel(times, prefill_scale=2, decode_scale=3)
    assert scaled.step(100, 0, 0, 0) == pytest.approx(2 * plain.step(100, 0, 0, 0))
    assert scaled.step(0, 0, 4, 10) == pytest.approx(3 * plain.step(0, 0, 4, 10))
    mixed, decode = plain.step(100, 0, 4, 10), plain.step(0, 0, 4, 10)
    assert scaled.step(100, 0, 4, 10) == pytest.approx(3 * decode + 2 * (mixed - decode))


def test_host_time_is_added_once_to_each_step() -> None:
    times = profile_of().steps
    plain = StepModel(times, prefill_scale=2, decode_scale=3)
    slower = StepModel(times, prefill_scale=2, decode_scale=3, host_time=0.004)
    for step in ((100, 5050.0, 0, 0), (0, 0.0, 4, 10), (100, 5050.0, 4, 10)):
        assert slower.step(*step) == pytest.approx(plain.step(*step) + 0.004)
    assert slower.decode_base(4) == pytest.approx(plain.decode_base(4) + 0.004)
