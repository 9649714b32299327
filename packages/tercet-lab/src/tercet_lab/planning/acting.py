"""The change that turns a fleet into a wanted one: which engines change roles, start or stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tercet.decisions.planning.observed import FleetPlan
from tercet.decisions.roles import ObservedEngine
from tercet.protocol import Role


@dataclass(frozen=True)
class FleetChange:
    """A change of a fleet: engines with their new roles, roles of engines to start, and engines to drain and stop."""

    flips: tuple[tuple[str, Role], ...] = ()
    starts: tuple[Role, ...] = ()
    stops: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.flips or self.starts or self.stops)


def change_to(plan: FleetPlan, engines: Sequence[ObservedEngine]) -> FleetChange:
    """Return the smallest change that turns ``engines``, all that serve or start, into ``plan``.

    The engines with the least work left change first. A role with too many engines gives them to the other role before
    any engine is started or stopped.
    """
    idle: dict[Role, list[str]] = {
        role: [each.name for each in sorted(engines, key=_idle) if each.role == role] for role in ("prefill", "decode")
    }
    spare = {"prefill": len(idle["prefill"]) - plan.prefill, "decode": len(idle["decode"]) - plan.decode}
    flips = list[tuple[str, Role]]()
    pairs: tuple[tuple[Role, Role], ...] = (("prefill", "decode"), ("decode", "prefill"))
    for giving, taking in pairs:
        while spare[giving] > 0 and spare[taking] < 0:
            flips.append((idle[giving].pop(0), taking))
            spare[giving] -= 1
            spare[taking] += 1
    starts: list[Role] = [role for role, _ in pairs for _ in range(max(0, -spare[role]))]
    stops = [name for role, _ in pairs for name in idle[role][: max(0, spare[role])]]
    return FleetChange(tuple(flips), tuple(starts), tuple(stops))


def _idle(engine: ObservedEngine) -> tuple[float, float, str]:
    return engine.waiting_s, engine.kv_usage, engine.name
