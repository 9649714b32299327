"""Two fake engines, a fleet of fake engines, and what programs get from them."""

from __future__ import annotations

import pytest

from tercet.fleet import EngineFleet, FleetView, Member, Trace
from tercet.programs import load_program, outputs_of
from tercet.protocol import Request
from tests.unit.fakes import FakeEngine

Pair = tuple[FakeEngine, FakeEngine, EngineFleet]


def fleet_of(*engines: tuple[FakeEngine, str]) -> EngineFleet:
    return EngineFleet([Member(engine.name, "", role, engine) for engine, role in engines])  # type: ignore[arg-type]


def request_of(length: int = 100, **sampling: int) -> Request:
    return Request(seq_id="s", prompt=tuple(range(length)), sampling_params=sampling)


async def run(
    name: str, fleet: EngineFleet, request: Request | None = None, trace: Trace | None = None, /, **args: str
) -> list[int]:
    """The tokens that a program gives for a request, by default for one of 100 tokens."""
    outputs = outputs_of(load_program(name, args)(request or request_of(), FleetView(fleet, trace)))
    return [token async for output in outputs for token in output.token_ids]


@pytest.fixture
def pair() -> Pair:
    prefill, decode = FakeEngine("p"), FakeEngine("d")
    return prefill, decode, fleet_of((prefill, "prefill"), (decode, "decode"))
