"""KV usage and imbalance are those of engines that are asked at short intervals: this is the oracle here."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from tercet.programs import load_program
from tercet.protocol import Request
from tercet.router.serve.service import Service
from tercet_lab.bench.simulated import parse_fleet, run_requests
from tercet_lab.bench.simulated.scenario import Fault
from tercet_lab.bench.simulated.virtual_run import PaidTime
from tercet_lab.sim import EngineOptions, SimEngine, kv_usage, load_profile
from tercet_lab.sim.kv_usage import KVImbalance
from tercet_lab.sim.step_times import HostSharing

PROFILE = "llama-3.1-8b-h100-tp1"
EVERY_S = 0.0005
FEW_BLOCKS = 90


def arrivals_of(seed: int) -> list[tuple[float, Request]]:
    chance, when, found = random.Random(seed), 0.2, list[tuple[float, Request]]()
    for number in range(60):
        when += chance.choice((0.0, chance.expovariate(25)))
        prompt = tuple(chance.randrange(9) for _ in range(chance.randrange(1, 400)))
        found.append((when, Request(seq_id=f"r{number}", prompt=prompt, sampling_params={"max_tokens": 80})))
    return found


class Sampler:
    """A companion of a run that asks each engine at short intervals from the first arrival to the last one.

    In the middle it stops to pay for an engine, and later pays again.
    """

    def __init__(self, arrivals: list[tuple[float, Request]], unpaid: str = "") -> None:
        self._begin, self._end = arrivals[0][0], arrivals[-1][0]
        self._unpaid = unpaid
        self.imbalances: list[float] = []
        self.usages: list[float] = []

    async def __call__(self, service: Service, engines: Mapping[str, SimEngine], paid: PaidTime) -> None:
        loop, length = asyncio.get_running_loop(), self._end - self._begin
        if self._unpaid:
            loop.call_at(self._begin + length / 3, lambda: paid.end(self._unpaid, loop.time()))
            loop.call_at(self._begin + length * 2 / 3, lambda: paid.begin(self._unpaid, loop.time()))
        await asyncio.sleep(self._begin + EVERY_S / 2)
        while loop.time() < self._end:
            usages = [engine.load().kv_usage for name, engine in engines.items() if name in paid]
            self.usages.append(float(np.mean(usages)))
            self.imbalances.append(max(usages) - self.usages[-1])
            await asyncio.sleep(EVERY_S)


def require_same(exact: KVImbalance | None, sampled: Sampler) -> None:
    assert exact is not None
    assert len(sampled.usages) > 1000
    assert exact.usage == pytest.approx(np.mean(sampled.usages), abs=2e-4)
    assert exact.mean == pytest.approx(np.mean(sampled.imbalances), abs=2e-4)
    assert exact.p95 == pytest.approx(np.percentile(sampled.imbalances, 95), abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("program", "fleet"), [("data_parallel", "both=3"), ("disaggregated", "prefill=1,decode=2")])
@pytest.mark.parametrize("settled_at", [7, kv_usage.SETTLED_AT])
@pytest.mark.parametrize("faults", [(), ("die",), ("freeze", "drain")])
def test_it_is_that_of_short_samples(
    program: str, fleet: str, settled_at: int, faults: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With scarce blocks: sequences are preempted, leases and reservations wait."""
    monkeypatch.setattr(kv_usage, "SETTLED_AT", settled_at)
    spec = parse_fleet(fleet)
    first, *_, last = ("both-0", "both-2") if fleet.startswith("both") else ("decode-0", "decode-1")
    planned = tuple(
        Fault(engine=first if number else last, at=0.7 + number / 10, down=0.6, kind=kind)  # type: ignore[arg-type]
        for number, kind in enumerate(faults)
    )
    arrivals, options = arrivals_of(len(faults)), EngineOptions(total_blocks=FEW_BLOCKS)
    sampler = Sampler(arrivals, unpaid=last)
    outcome = run_requests(
        load_program(program), replace(spec, faults=planned), PROFILE, options, arrivals, companion=sampler
    )
    require_same(outcome.imbalance, sampler)


def test_it_follows_the_speed_of_a_shared_host(tmp_path: Path) -> None:
    sharing = HostSharing(
        prefill_beside_prefill=1.5, prefill_beside_decode=1.3, decode_beside_prefill=1.7, decode_beside_decode=2.5
    )
    file = tmp_path / "shared.json"
    file.write_bytes(msgspec.json.encode(replace(load_profile(PROFILE), sharing=sharing)))
    arrivals = arrivals_of(5)
    sampler = Sampler(arrivals)
    options = EngineOptions(total_blocks=2 * FEW_BLOCKS)
    outcome = run_requests(
        load_program("data_parallel"), parse_fleet("both=3@h"), str(file), options, arrivals, companion=sampler
    )
    require_same(outcome.imbalance, sampler)


def test_without_time_between_arrivals_there_is_none() -> None:
    arrivals = [(1.0, request) for _, request in arrivals_of(0)[:3]]
    program, fleet = load_program("data_parallel"), parse_fleet("both=1")
    assert run_requests(program, fleet, PROFILE, EngineOptions(), arrivals).imbalance is None
