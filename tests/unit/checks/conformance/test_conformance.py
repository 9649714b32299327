"""The conformance suite of the verbs: a sound engine passes, and each planted fault is found by the check about it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

import pytest

from tercet_checks.chaos.simulated_arena import _end_all, _virtual_clocks  # pyright: ignore[reportPrivateUsage]
from tercet_checks.chaos.virtual_network import NetworkedLoop, VirtualProcess
from tercet_checks.conformance import run_checks
from tercet_checks.conformance.trials import CHECKS, NEEDS_PEER, CheckResult
from tercet_lab.sim import sim_server
from tercet_lab.sim.sim_engine import SimEngine
from tercet_lab.sim.sim_server import ServerConfig, serving
from tercet_lab.sim.sim_verbs import SimVerbs
from tests.long_runs import FULL
from tests.unit.lab.sim.models import profile_of

from .wrong_engine import FAULTS, Fault, WrongVerbs

HOST, WRONG = "127.0.0.1", "wrong"
SECRET = "s3cret"


def results_of(
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault | None = None,
    secret: str = "",
    alone: bool = False,
    only: Sequence[str] = (),
) -> dict[str, CheckResult]:
    """Run the suite, or some checks, in virtual time against an engine with this fault, and a peer that has none."""
    loop = NetworkedLoop()

    def verbs_of(engine: SimEngine, keys: Sequence[str], model: str) -> SimVerbs:
        if fault is not None and engine.name == WRONG:
            return WrongVerbs(engine, keys, model, fault)
        return SimVerbs(engine, keys, model)

    async def main() -> list[CheckResult]:
        ready, never = [], asyncio.Event()
        for port, name in ((8001, WRONG), (8002, "sound")):
            url = f"http://{HOST}:{port}"
            config = ServerConfig(
                name=name, profile=profile_of(), host=HOST, port=port, url=url, model="m", secret=secret
            )  # fmt: skip
            with VirtualProcess(loop, HOST).enter():
                started = asyncio.Event()

                async def serve(config: ServerConfig = config, started: asyncio.Event = started) -> None:
                    async with serving(config):
                        started.set()
                        await never.wait()

                ready.append(asyncio.ensure_future(serve()))
                await started.wait()
        with VirtualProcess(loop, HOST).enter():
            peer = None if alone else f"http://{HOST}:8002"
            return await run_checks(f"http://{HOST}:8001", peer, secret, 10.0, only)

    monkeypatch.setattr(sim_server, "SimVerbs", verbs_of)
    with _virtual_clocks(loop):
        try:
            found = loop.run_until_complete(main())
        finally:
            _end_all(loop)
    return {each.check: each for each in found}


def named(found: dict[str, CheckResult], state: str) -> set[str]:
    return {name for name, each in found.items() if each.state == state}


def test_a_sound_engine_passes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = results_of(monkeypatch)
    assert named(bare, "failed") == set(), bare
    assert named(bare, "skipped") == {"strangers-are-refused", "proofs-are-for-one-call"}
    keyed = results_of(monkeypatch, secret=SECRET)
    assert named(keyed, "failed") == set(), keyed
    assert named(keyed, "skipped") == {"web-pages-are-refused"}
    assert bare.keys() == keyed.keys() == {each.name for each in CHECKS}


def test_without_a_peer_what_needs_one_is_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = results_of(monkeypatch, alone=True)
    skipped = {each.check for each in found.values() if each.what == NEEDS_PEER}
    assert skipped == {each.name for each in CHECKS if each.needs_peer}
    assert named(found, "failed") == set()


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_by_the_check_about_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault = FAULTS[name]
    # The seed gives each fault another tenth of the other checks.
    some = Random(name).sample([each.name for each in CHECKS], len(CHECKS) // 10)
    found = results_of(monkeypatch, fault, fault.secret, only=() if FULL else [*fault.checks, *some])
    failed = named(found, "failed")
    assert fault.checks <= failed, (name, sorted(failed))
    for each in failed:
        assert found[each].what
        assert found[each].sent
        assert found[each].remedy


def test_every_check_finds_a_fault() -> None:
    """A check that no fault fails might be one that cannot fail."""
    assert {each.name for each in CHECKS} == {check for fault in FAULTS.values() for check in fault.checks}
