"""A fleet as a fluid: prefills and decodes are amounts, so that minutes of it take milliseconds.

Requests come at a rate; each takes ``prefill_s`` of an engine that prefills, and then ``steps`` steps of one that
decodes, where a step takes ``BASE_S`` and ``PER_DECODE_S`` more for each sequence that runs there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from tercet.decisions.planning import FleetPlan, Observed, ObservedEngine, ObservedRequest, PlanLimits
from tercet.decisions.roles import RoleController, RoleEffects
from tercet.protocol import Role
from tercet.settings.fleet_settings import Objectives

OBJECTIVES = Objectives(ttft=1.0, tpot=0.025)
BASE_S, PER_DECODE_S, CONTEXT = 0.006, 0.00006, 500
KV_DECODES = 800
LOOK_S, TICK_S = 0.5, 0.1


@dataclass
class Traffic:
    """Requests per second, what each of them needs, and the share by which they vary from tick to tick."""

    rate: float
    prefill_s: float
    steps: float
    noise: float = 0.0


@dataclass
class FluidEngine:
    name: str
    role: Role
    line_s: float = 0.0
    busy_s: float = 0.0
    decodes: float = 0.0
    reachable: bool = True

    @property
    def step_s(self) -> float:
        return BASE_S + PER_DECODE_S * self.decodes

    def observed(self) -> ObservedEngine:
        return ObservedEngine(
            self.name, self.role, self.reachable, self.line_s, self.busy_s, int(self.decodes), 0,
            int(self.decodes * CONTEXT), self.step_s, self.decodes / KV_DECODES,
        )  # fmt: skip


def observed_now(now: float, engines: list[ObservedEngine], arrivals: tuple[ObservedRequest, ...] = ()) -> Observed:
    """The engines, whose number may not change."""
    roles = [each.role for each in engines if each.able]
    plan, limits = FleetPlan(roles.count("prefill"), roles.count("decode")), PlanLimits(len(engines), len(engines))
    return Observed(now, 0.0, plan, arrivals, tuple(engines), OBJECTIVES, limits)


@dataclass
class FluidFleet:
    """Engines under a controller; ``looks`` are all of its answers."""

    controller: RoleController
    prefilling: int
    decoding: int
    seed: int = 0
    now: float = 0.0
    looks: list[RoleEffects] = field(default_factory=list[RoleEffects])

    def __post_init__(self) -> None:
        roles: list[Role] = [*["prefill"] * self.prefilling, *["decode"] * self.decoding]  # type: ignore[list-item]
        self.engines = [FluidEngine(f"e{number}", role) for number, role in enumerate(roles)]
        self._random = Random(self.seed)
        self._look_at = 0.0

    def count(self, role: Role) -> int:
        return sum(engine.role == role for engine in self.engines)

    @property
    def flips(self) -> list[RoleEffects]:
        return [look for look in self.looks if look.flip is not None]

    def run(self, traffic: Traffic, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until - 1e-9:
            self._tick(traffic)
            self.now += TICK_S
            if self.now >= self._look_at:
                self._look_at = self.now + LOOK_S
                self.look()

    def look(self) -> RoleEffects:
        found = self.controller.on_tick(observed_now(self.now, [engine.observed() for engine in self.engines]))
        self.looks.append(found)
        if found.flip is not None:
            for engine in self.engines:
                if engine.name in found.flip.engines:
                    engine.role = found.flip.role
        return found

    def _tick(self, traffic: Traffic) -> None:
        coming = max(0.0, traffic.rate * TICK_S * self._random.gauss(1.0, traffic.noise))
        prefilling = [engine for engine in self.engines if engine.role == "prefill" and engine.reachable]
        decoding = [engine for engine in self.engines if engine.role == "decode" and engine.reachable]
        done = self._prefill(prefilling, coming, traffic.prefill_s)
        for engine in self.engines:
            engine.decodes -= min(engine.decodes, engine.decodes * TICK_S / (engine.step_s * traffic.steps))
        if decoding:
            min(decoding, key=lambda each: each.decodes).decodes += done

    def _prefill(self, able: list[FluidEngine], coming: float, prefill_s: float) -> float:
        """The number of requests whose prefill has ended."""
        if able:
            min(able, key=lambda each: each.line_s).line_s += coming * prefill_s
        worked = 0.0
        for engine in self.engines:
            part = min(engine.line_s, TICK_S)
            engine.line_s -= part
            engine.busy_s += part
            worked += part
        return worked / prefill_s if prefill_s else coming
