"""Measuring engines whose profile is known: simulated ones, in virtual time, so that there is no noise."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tercet.protocol import BadRequest, EngineError, Request, Sent, Usage
from tercet_bench.step_measurement import (
    Measured,
    MeasurementPlan,
    Meter,
    Neighbour,
    Probe,
    linger_from,
    measure_router,
    names_from,
    profile_from,
    sharing_from,
    transfer_from,
)
from tercet_lab.sim import (
    EngineOptions,
    Host,
    Network,
    Profile,
    SimEngine,
    StepModel,
    load_profile,
    parse_profile,
    run_virtual,
)
from tercet_lab.sim.step_times import HostSharing, Transfer, pairs_of
from tests.unit.bench.openai_server import FakeServer
from tests.virtual_time import in_virtual_time

pytestmark = pytest.mark.slow

KNOWN = load_profile("smollm2-135m-cpu")
PLAN = MeasurementPlan(name="mine", device="paper", repeats=1)
ASSUMED = Transfer(bytes_per_second=5.0, latency=6.0)
# As CPU engines are started: a step of more tokens would be two.
OPTIONS = EngineOptions(stream_every=1, max_num_batched_tokens=512)


def measured_on(profile: Profile, engines: int = 2, plan: MeasurementPlan = PLAN, host: bool = False) -> Measured:
    async def main() -> Measured:
        network, shared = Network(), Host() if host else None
        names = [f"e{index}" for index in range(engines)]
        first, *others = (SimEngine(name, profile, network, OPTIONS, host=shared) for name in names)
        return await Meter(first, others[0] if others else None, plan, lambda _: None).measure()

    return run_virtual(main())


@pytest.mark.parametrize("engines", [1, 2])
def test_progress_says_which_step_of_how_many_comes_next(engines: int) -> None:
    told: list[str] = []

    async def main() -> Measured:
        network = Network()
        first, *others = (SimEngine(f"e{index}", KNOWN, network, OPTIONS) for index in range(engines))
        return await Meter(first, others[0] if others else None, PLAN, told.append).measure()

    measured = run_virtual(main())
    numbers = [line.split(": ")[0] for line in told if line not in ("warming up", "calls")]
    sends = len(PLAN.sends) * (2 * PLAN.repeats + 1) if engines > 1 else 0
    total = len(measured.prefills) + len(measured.decodes) + sends
    assert numbers == [f"{number} of {total}" for number in range(1, total + 1)]


@pytest.mark.slow
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
    assert "Not measured: transfer, router" in found.provenance.note
    assert "max_num_batched_tokens=512" in found.provenance.note


def test_what_engines_of_a_host_do_to_one_another_is_found_again() -> None:
    factors = HostSharing(
        prefill_beside_prefill=1.4,
        prefill_beside_decode=1.2,
        decode_beside_prefill=1.6,
        decode_beside_decode=1.3,
        prefill_beside_linger=1.3,
        decode_beside_linger=1.8,
        linger=0.8,
    )
    shared = replace(KNOWN, sharing=factors)
    plan = replace(PLAN, same_host=True)
    found = profile_from(measured_on(shared, plan=plan, host=True), plan, "command", ASSUMED)
    assert found.sharing is not None
    for field, factor in msgspec.structs.asdict(factors).items():
        # A neighbour that prefills has small pauses, one that decodes begins with a prefill, one that lingers does so
        # after short prompts.
        assert getattr(found.sharing, field) == pytest.approx(factor, rel=0.06), field
    assert "sharing a host" not in found.provenance.note
    # The other one is idle while single steps are measured.
    assert all(error < 0.02 for error in found.provenance.fit_error.values())
    assert parse_profile(msgspec.json.encode(found), "mine.json") == found


def test_engines_with_hosts_of_their_own_do_nothing_to_one_another() -> None:
    plan = replace(PLAN, same_host=True)
    sharing = measured_on(KNOWN, plan=plan).sharing
    assert sharing is not None
    assert list(msgspec.structs.asdict(sharing).values()) == pytest.approx([1.0] * 6 + [0.0], rel=0.01)
    assert measured_on(KNOWN).sharing is None


def test_noise_makes_no_step_shorter_beside_another() -> None:
    rows: dict[Neighbour, list[tuple[float, float]]] = {
        "sleep": [(2.0, 1.0), (4.0, 3.0)],
        "prefill": [(2.0, 4.0), (3.0, 4.0)],
        "decode": [(3.0, 1.0), (6.0, 3.0)],
        "linger": [(9.0, 1.0), (9.0, 2.0)],
    }
    found = sharing_from(rows, 0.5)
    assert found == HostSharing(
        prefill_beside_prefill=1.0,
        prefill_beside_decode=1.5,
        decode_beside_prefill=2.0,
        decode_beside_decode=1.0,
        prefill_beside_linger=3.0,
        decode_beside_linger=1.0,
        linger=0.5,
    )
    # A neighbour that was poked and does not linger says nothing.
    assert sharing_from(rows, 0.0).prefill_beside_linger == 1.0


@given(st.floats(0.3, 2.5), st.randoms(use_true_random=False))
def test_how_long_a_neighbour_lingers_is_where_steps_get_shorter(linger: float, chance: random.Random) -> None:
    gaps = [(at / 30, (0.06 if at / 30 < linger else 0.03) * chance.uniform(0.8, 1.2)) for at in range(90)]
    chance.shuffle(gaps)
    assert linger_from(gaps) == pytest.approx(linger, abs=0.05)


def test_noise_is_no_lingering() -> None:
    chance = random.Random(1)
    assert linger_from([(at / 30, 0.03 * chance.uniform(0.95, 1.05)) for at in range(90)]) == 0.0
    # Nor are steps that get longer.
    assert linger_from([(at / 30, 0.03 if at < 50 else 0.06) for at in range(90)]) == 0.0


def sent_of(size: int, *seconds: float) -> list[Sent]:
    return [Sent(0, 1, size, 1, each, Usage()) for each in seconds]


def test_one_slow_send_does_not_decide_what_transfers_take() -> None:
    found = transfer_from([sent_of(1000, 0.002, 0.9, 0.002), sent_of(3000, 0.004, 0.004, 0.004)])
    assert found.bytes_per_second == pytest.approx(1e6)
    assert found.latency == pytest.approx(0.001)
    with pytest.raises(EngineError, match="a less busy machine"):
        transfer_from([sent_of(1000, 0.004), sent_of(3000, 0.002)])


@pytest.mark.slow
async def test_what_a_router_adds_is_the_time_beyond_its_engine(server: FakeServer) -> None:
    # In real time: 31 ms for a prompt of 16 tokens on the engine, at least 200 ms through the server.
    server.behave = {"gap": 0.2}
    chance = random.Random(0)
    probe = Probe(SimEngine("e", KNOWN, Network(), OPTIONS), chance, names_from(chance))
    found = await measure_router(server.url, probe, 3, lambda _: None)
    assert 0.1 < found < 2.0
    assert {headers["x-tercet-program"] for headers in server.headers} == {"data_parallel"}
    assert [len(body["prompt"]) for body in server.bodies] == [16] * 4
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 4


async def test_routers_that_do_not_answer_are_named(server: FakeServer) -> None:
    chance = random.Random(0)
    probe = Probe(SimEngine("e", KNOWN, Network(), OPTIONS), chance, names_from(chance))
    with pytest.raises(BadRequest, match=r"no router answers at http://127\.0\.0\.1:1"):
        await measure_router("http://127.0.0.1:1", probe, 1, lambda _: None)
    server.behave = {"status": 503}
    with pytest.raises(EngineError, match="HTTP 503: no room"):
        await measure_router(server.url, probe, 1, lambda _: None)


def test_steps_are_single_ones_and_fit_into_the_engine() -> None:
    measured = measured_on(KNOWN)
    assert {point.tokens for point in measured.prefills} == {16, 64, 128, 256, 512}
    assert {point.cached for point in measured.prefills} == {0, 512, 1024}
    assert {point.batch for point in measured.decodes} == {1, 2, 4, 8, 16}


@in_virtual_time
async def test_an_engine_that_serves_others_is_refused() -> None:
    engine = SimEngine("a", KNOWN, Network(), OPTIONS)
    stream = engine.start_generate(Request(seq_id="s", prompt=(1, 2, 3), sampling_params={"max_tokens": 100}))
    await anext(stream)
    with pytest.raises(BadRequest, match="is serving requests"):
        await Meter(engine, None, PLAN, lambda _: None).measure()
    await stream.aclose()
    await asyncio.sleep(1)


@pytest.mark.parametrize("wrong", [{"max_step_tokens": 64}, {"repeats": 0}])
def test_plans_that_make_no_sense(wrong: dict[str, int]) -> None:
    with pytest.raises(BadRequest, match=next(iter(wrong))):
        replace(PLAN, **wrong)


def test_a_measured_profile_can_be_read_again() -> None:
    found = profile_from(measured_on(KNOWN), PLAN, "command", ASSUMED)
    assert parse_profile(msgspec.json.encode(found), "mine.json") == found
