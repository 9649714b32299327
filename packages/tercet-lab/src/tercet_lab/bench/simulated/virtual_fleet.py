"""The fleet of a simulated run: engines as its specification says, the router's service, and planned faults."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tercet.fleet import EngineFleet, EngineObserver, Member
from tercet.programs import Program, name_of
from tercet.protocol import BadRequest, LayoutMismatch
from tercet.router.serve.service import Service
from tercet.settings import RetryBudget, RouterSettings
from tercet_lab.bench.simulated.moving_fleet import MoveCounts, MovingFleet, MovingSettings
from tercet_lab.bench.simulated.scenario import Fault, FleetSpec, members_of
from tercet_lab.sim import EngineOptions, Host, Network, Profile, SimEngine, load_profile, options_from

RETRIES = RetryBudget()
WAIT_FOR_ENGINE = RouterSettings().wait_for_engine_s


@dataclass
class VirtualFleet:
    """A fleet of simulated engines, and the service in front of it; ``router`` is the time that it adds (seconds)."""

    service: Service[MoveCounts]
    engines: dict[str, SimEngine]
    network: Network
    router: float
    moving: MovingFleet


def build_fleet(
    program: Program, spec: FleetSpec, profile: str, options: EngineOptions, seed: int, moving: MovingSettings
) -> VirtualFleet:
    """Build the engines of ``spec`` and their service, inside the loop of the run.

    Raises :class:`~tercet.protocol.BadRequest` if the engines cannot exchange KV.
    """
    network, profiles, hosts = Network(), dict[str, Profile](), defaultdict[str, Host](Host)
    members: list[Member] = []
    engines: dict[str, SimEngine] = {}
    for group, index in members_of(spec):
        wanted = group.profile or profile
        if wanted not in profiles:
            profiles[wanted] = load_profile(wanted)
        name = f"{group.role}-{index}"
        host = None if group.host is None else hosts[group.host]
        settings = options_from(options, group.options)
        engine = engines[name] = SimEngine(name, profiles[wanted], network, settings, seed, host=host)
        room = engine.pool.total * engine.profile.block_size
        members.append(Member(name, f"sim://{name}", group.role, engine, kv_tokens=room))
    if not spec.without_kv_exchange:
        _require_exchange(list(engines.values()))
    # Simulated engines report every change, so the last report is valid at any age.
    fleet = EngineFleet(members, clock=asyncio.get_running_loop().time, stale_after=math.inf, seed=seed)

    fleet.costs.watch_once_asked()

    def listen() -> None:
        for name, engine in engines.items():
            engine.observe(EngineObserver(fleet.knowledge, name, engine.profile.block_size))

    def listen_for_blocks() -> None:
        for name, engine in engines.items():
            engine.observe_blocks(EngineObserver(fleet.knowledge, name, engine.profile.block_size))

    fleet.knowledge.hear_from(listen, listen_for_blocks)  # only programs that ask for reports cause their cost
    # A fleet has one router, with the time of the engines' default profile.
    router = profiles[profile].router if profile in profiles else 0.0
    service = Service(
        fleet, name_of(program), {}, MoveCounts(), retries=RETRIES, wait_for_engine=WAIT_FOR_ENGINE,
        moves=moving.moves, retries_faults=False, load_arm=lambda _: program,
    )  # fmt: skip
    with_moves = MovingFleet(service, engines, moving, bool(spec.faults))
    return VirtualFleet(service, engines, network, router, with_moves)


def _require_exchange(engines: Sequence[SimEngine]) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` unless all engines can exchange KV: sends would fail."""
    for first, other in itertools.combinations({engine.profile.name: engine for engine in engines}.values(), 2):
        try:
            first.require_exchange(other)
        except LayoutMismatch as error:
            raise BadRequest(
                f"fleet: {first.name} ({first.profile.name}) and {other.name} ({other.profile.name}): {error.message}; "
                "choose profiles of one model, or set without_kv_exchange: true in the fleet's file",
                "fleet",
            ) from None


def plan_fault(fault: Fault, engine: SimEngine, fleet: EngineFleet) -> None:
    """Let a fault of ``engine`` begin and end at its times."""
    begins: dict[str, Callable[[], None]] = {
        "die": engine.fail,
        "freeze": engine.freeze,
        "drain": partial(fleet.drain, engine.name),
    }
    ends: dict[str, Callable[[], None]] = {
        "die": partial(_recover, engine, fleet),
        "freeze": engine.thaw,
        "drain": partial(fleet.drain, engine.name, False),
    }
    loop = asyncio.get_running_loop()
    loop.call_at(fault.at, begins[fault.kind])
    if fault.down is not None:
        loop.call_at(fault.at + fault.down, ends[fault.kind])


def _recover(engine: SimEngine, fleet: EngineFleet) -> None:
    engine.recover()
    fleet.member(engine.name).reachable = True
