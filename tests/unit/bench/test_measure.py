"""Measuring engines whose profile is known: simulated ones, in virtual time, so that there is no noise."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from msgspec.structs import replace

from tercet.bench.profiles.measure import Measured, Meter, Plan, profile_from
from tercet.protocol import BadRequest, Request
from tercet.sim import EngineOptions, Network, Profile, SimEngine, StepModel, load_profile, parse_profile, run_virtual
from tercet.sim.profile import Transfer, pairs_of

KNOWN = load_profile("smollm2-135m-cpu")
PLAN = Plan(name="mine", device="paper", repeats=1)
ASSUMED = Transfer(bytes_per_second=5.0, latency=6.0)
# As CPU engines are started: a step of more tokens would be two.
OPTIONS = EngineOptions(stream_every=1, max_num_batched_tokens=512)


def measured_on(profile: Profile, engines: int = 2, plan: Plan = PLAN) -> Measured:
    async def main() -> Measured:
        network = Network()
        first, *others = (SimEngine(f"e{index}", profile, network, OPTIONS) for index in range(engines))
        return await Meter(first, others[0] if others else None, plan, lambda _: None).measure()

    return run_virtual(main())


def test_a_known_profile_is_found_again() -> None:
    found = profile_from(measured_on(KNOWN), PLAN, "command", ASSUMED)
    assert all(error < 0.02 for error in found.provenance.fit_error.values())
    ours, theirs = StepModel(found.steps), StepModel(KNOWN.steps)
    # None of these was measured.
    for tokens, cached in ((100, 0), (300, 700), (512, 1500)):
        pairs = pairs_of(cached, cached + tokens)
        assert ours.step(tokens, pairs, 0, 0) == pytest.approx(theirs.step(tokens, pairs, 0, 0), rel=0.05)
    for batch, context in ((3, 300), (12, 900), (16, 2000)):
        assert ours.step(0, 0, batch, batch * context) == pytest.approx(
            theirs.step(0, 0, batch, batch * context), rel=0.05
        )
    assert found.transfer.bytes_per_second == pytest.approx(KNOWN.transfer.bytes_per_second, rel=0.05)
    assert found.call == pytest.approx(KNOWN.call, rel=0.01)
    assert found.model.kv_bytes_per_token == KNOWN.model.kv_bytes_per_token
    assert (found.block_size, found.total_blocks) == (KNOWN.block_size, KNOWN.total_blocks)


def test_what_was_not_measured_is_assumed_and_said() -> None:
    found = profile_from(measured_on(KNOWN, engines=1), PLAN, "command", ASSUMED)
    assert found.transfer == ASSUMED
    assert "Not measured: transfer" in found.provenance.note
    assert "max_num_batched_tokens=512" in found.provenance.note


def test_steps_are_single_ones_and_fit_into_the_engine() -> None:
    measured = measured_on(KNOWN)
    assert {point.tokens for point in measured.prefills} == {16, 64, 128, 256, 512}
    assert {point.cached for point in measured.prefills} == {0, 512, 1024}
    assert {point.batch for point in measured.decodes} == {1, 2, 4, 8, 16}


def test_an_engine_that_serves_others_is_refused() -> None:
    async def main() -> None:
        engine = SimEngine("a", KNOWN, Network(), OPTIONS)
        stream = engine.start_generate(Request(seq_id="s", prompt=(1, 2, 3), sampling_params={"max_tokens": 100}))
        await anext(stream)
        with pytest.raises(BadRequest, match="serving others"):
            await Meter(engine, None, PLAN, lambda _: None).measure()
        await stream.aclose()
        await asyncio.sleep(1)

    run_virtual(main())


def test_plans_that_make_no_sense() -> None:
    for plan, field in ((replace(PLAN, max_step_tokens=64), "max_step_tokens"), (replace(PLAN, repeats=0), "repeats")):
        with pytest.raises(BadRequest, match=field):
            plan.check()


def test_a_measured_profile_can_be_read_again() -> None:
    found = profile_from(measured_on(KNOWN), PLAN, "command", ASSUMED)
    assert parse_profile(msgspec.json.encode(found), "mine.json") == found
