"""The fleet of a simulated run: its engines, the router's service with its moves and roles, and planned faults.

Moves, the rescheduler and automatic roles are the router's code in virtual time; their results are counted here.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry

from tercet import __version__
from tercet.decisions.roles import RoleFlip
from tercet.decisions.sessions import Pause
from tercet.fleet import EngineFleet, FleetKnowledge, Member, Trace
from tercet.programs import Program, name_of
from tercet.protocol import BadRequest, EngineLoad, LayoutMismatch, Request
from tercet.protocol.addresses import Revision
from tercet.protocol.names import STORE
from tercet.router.observe.metrics import CopyOutcome, Metrics, SessionMetrics, WriteBehindMetrics
from tercet.router.serve.context_copies import WriteBehind
from tercet.router.serve.moves import MoveRecord, Rescheduler
from tercet.router.serve.service import Service
from tercet.router.serve.sessions import MoveEnd, PinEnd, Ran, Sessions
from tercet.router.state.roles import INTERVAL_S, FleetRoles, seen_for_roles, with_roles_followed
from tercet.settings import RetryBudget, RouterSettings
from tercet.settings.fleet_settings import Objectives
from tercet_lab.bench.simulated.scenario import Fault, FleetSpec, members_of, store_names
from tercet_lab.planner_settings import NO_PLANNER, MovingSettings
from tercet_lab.sim import EngineOptions, Host, Network, Profile, SimEngine, load_profile, options_from
from tercet_lab.tables import Kind, Table

if TYPE_CHECKING:
    from tercet_lab.sim.sim_store import SimStore


class VirtualFlip(msgspec.Struct, frozen=True):
    """A change of roles, ``at`` a time of the run in seconds: ``engines`` have the role ``role`` from then on."""

    at: float
    engines: tuple[str, ...]
    role: str
    reason: str


class VirtualRoles:
    """The automatic roles of a router for simulated engines, with the list of changes."""

    def __init__(self, service: Service, engines: Mapping[str, SimEngine], objectives: Objectives) -> None:
        self._fleet = service.fleet
        self._engines = engines
        seen = seen_for_roles(service.fleet, objectives)
        service.observers.append(seen)
        self._roles = FleetRoles(service.fleet, objectives, self._flip, seen)

    @property
    def flips(self) -> list[VirtualFlip]:
        """Changes of roles, the oldest first."""
        return [VirtualFlip(each.at, each.flip.engines, each.flip.role, each.flip.reason) for each in self._roles.flips]

    async def run(self) -> None:
        """Check the roles at regular intervals, until cancelled or until it raises: a simulation shows its errors."""
        while True:
            # As real engines do: a simulated engine reports nothing during a run of steps.
            for name, engine in self._engines.items():
                self._fleet.report(name, engine.load())
            await self._roles.look()
            await asyncio.sleep(INTERVAL_S)

    async def _flip(self, flip: RoleFlip) -> bool:
        for name in flip.engines:
            self._fleet.member(name).role = flip.role
        return True


# Seconds between two checks for stuck engines, as in a router.
WATCH_SECONDS = 0.5
_UNCOUNTED = nullcontext()


class MoveTotals(msgspec.Struct, frozen=True, kw_only=True):
    """The totals of a run's moves. ``outcomes`` counts them by reason and outcome, such as ``neutral_load moved``.

    ``pause_p50`` and ``pause_p99`` are the seconds between the source's last token and the next token; None if no
    sequence with a token was moved. ``bytes`` is the amount of KV sent, ``recomputed`` the number of positions computed
    again. ``held_back`` counts proposals that limits did not allow in a round; the next round may repeat them.
    """

    outcomes: dict[str, int] = {}
    pause_p50: float | None = None
    pause_p99: float | None = None
    bytes: int = 0
    recomputed: int = 0
    held_back: int = 0

    @property
    def moved(self) -> int:
        """Number of successful moves."""
        return sum(count for name, count in self.outcomes.items() if name.endswith(" moved"))

    def flat(self) -> dict[str, float]:
        """Return the values by name, for a report. Pauses are in milliseconds."""
        found: dict[str, float] = {f"moves_{name.replace(' ', '_')}": count for name, count in self.outcomes.items()}
        found |= {"moved_bytes": self.bytes, "moves_recomputed": self.recomputed, "moves_held_back": self.held_back}
        for name, pause in (("p50", self.pause_p50), ("p99", self.pause_p99)):
            if pause is not None:
                found[f"{name}_move_pause_ms"] = pause * 1e3
        return found


class SessionCounts(SessionMetrics):
    """The counts of sessions: turns by place, moves of contexts by outcome, and pins by outcome; no metric is made."""

    def __init__(self) -> None:
        self.counts = Counter[str]()

    def sizes(self, sessions: int, kept: int) -> None: ...

    def turn(self, ran: Ran) -> None:
        self.counts[f"session_turns_{ran}"] += 1

    def paused(self, waited_for: Pause, seconds: float) -> None:
        self.counts[f"session_pauses_{waited_for}"] += 1

    def moved(self, end: MoveEnd, sent: int) -> None:
        self.counts[f"session_moves_{end}"] += 1
        self.counts["session_moved_bytes"] += sent

    def unpinned(self, end: PinEnd) -> None:
        self.counts[f"session_pins_{end}"] += 1


MOVE_COLUMNS: Mapping[str, Kind] = {
    "at": "time", "id": "text", "source": "text", "target": "text", "reason": "text", "outcome": "text",
    "tokens": "count", "bytes": "count", "recomputed": "count", "pause_s": "time", "seconds": "time",
}  # fmt: skip


class CopyCounts(WriteBehindMetrics):
    """The counts of copies to stores, by outcome, and their tokens; no metric is made."""

    def __init__(self) -> None:
        self.counts = Counter[str]()

    def ended(self, outcome: CopyOutcome, tokens: int = 0) -> None:
        self.counts[f"store_copies_{outcome}"] += 1
        self.counts["store_copied_tokens"] += tokens


class SimulatedMetrics(Metrics):
    """The metrics of a simulated router, in a separate registry, with totals of its moves and sessions.

    What each request would count is left out: its trace has it, and a simulated request must stay cheap.
    """

    def __init__(self) -> None:
        super().__init__(CollectorRegistry())
        self.sessions, self.write_behind = SessionCounts(), CopyCounts()
        self.move_rows = Table(MOVE_COLUMNS)
        self._move_outcomes = Counter[str]()
        self._move_pauses: list[float] = []
        self._sent = self._recomputed = self._held_back = 0

    def sequence(self) -> AbstractContextManager[object]:
        return _UNCOUNTED

    def finished(self, trace: Trace) -> None: ...

    def objectives(self, of_class: str, met: bool) -> None: ...

    def moved(self, move: MoveRecord) -> None:
        self._move_outcomes[f"{move.reason} {move.outcome}"] += 1
        self.move_rows.append(
            asyncio.get_running_loop().time() - move.seconds, move.seq_id, move.source, move.destination, move.reason,
            move.outcome, move.tokens, move.bytes, move.recomputed, math.nan if move.pause is None else move.pause,
            move.seconds,
        )  # fmt: skip
        self._sent += move.bytes
        self._recomputed += move.recomputed
        if move.pause is not None:
            self._move_pauses.append(move.pause)

    def held_back(self, moves: int) -> None:
        self._held_back += moves

    def totals(self) -> MoveTotals:
        pauses = self._move_pauses
        p50, p99 = map(float, np.percentile(pauses, (50, 99))) if pauses else (None, None)
        return MoveTotals(
            outcomes=dict(sorted(self._move_outcomes.items())), pause_p50=p50, pause_p99=p99, bytes=self._sent,
            recomputed=self._recomputed, held_back=self._held_back,
        )  # fmt: skip


class MovingFleet:
    """The background ``work`` of a router: a rescheduler of the service's sequences, and a check for stuck engines.

    The rescheduler runs if policies, sessions or faults need it. The check runs only with faults (``has_faults``),
    since engines are never stuck otherwise.
    """

    def __init__(
        self, service: Service, metrics: SimulatedMetrics, engines: Mapping[str, SimEngine],
        stores: Mapping[str, SimStore], settings: MovingSettings, has_faults: bool,
    ) -> None:  # fmt: skip
        self._fleet = fleet = service.fleet
        self._engines, self._stores = engines, stores
        self._interval = settings.reschedule.interval_s
        self.work: list[Coroutine[Any, Any, None]] = []
        by_itself = settings.roles == "auto"
        change = by_itself or settings.planner != NO_PLANNER
        policies = with_roles_followed(settings.reschedule) if change else settings.reschedule
        rescheduler = Rescheduler(fleet, service.sequences, service.moves, policies)
        self.roles = VirtualRoles(service, engines, settings.objectives) if by_itself else None
        if self.roles is not None:
            self.work.append(self.roles.run())
        if settings.sessions.on:
            service.sessions = sessions = Sessions(fleet, settings.sessions, metrics.sessions, "session")
            self.work.append(sessions.run())
        if policies.policies or has_faults or settings.sessions.on:
            fleet.knowledge.start_reports()
            self.work += [self._report(), rescheduler.run()]
        if has_faults:
            self.work.append(self._watch())
        if stores:
            self.work.append(WriteBehind(fleet, metrics.write_behind).run())

    async def _report(self) -> None:
        """Report the loads of engines that compute: they report nothing themselves during a run of steps."""
        loads = self._fleet.knowledge.loads
        while True:
            for name, engine in self._engines.items():
                if engine.computes:
                    loads.report(name, engine.load())
            await asyncio.sleep(self._interval)

    async def _watch(self) -> None:
        """Detect stuck engines and their recovery, as :mod:`tercet.fleet.membership` does."""
        fleet = self._fleet
        while True:
            for member in fleet.members:
                engine = self._engines.get(member.name) or self._stores[member.name]
                if not engine.down:
                    fleet.health.heard(member.name, engine.load().stalled_s)
                member.reachable = not (engine.down or fleet.liveness.is_stuck(member.name))
            fleet.health.stand_still(WATCH_SECONDS)
            await asyncio.sleep(WATCH_SECONDS)


@asynccontextmanager
async def alongside(*work: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """Run coroutines while the context is open, then cancel them. Raise the error of one that failed."""
    tasks = [asyncio.get_running_loop().create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()


RETRIES = RetryBudget()
WAIT_FOR_ENGINE = RouterSettings().wait_for_engine_s


@dataclass
class VirtualFleet:
    """A fleet of simulated engines, and the service in front of it; ``router`` is the time that it adds (seconds).

    ``predict`` adds to a request what policies believe of it.
    """

    service: Service
    metrics: SimulatedMetrics
    engines: dict[str, SimEngine]
    stores: dict[str, SimStore]
    network: Network
    router: float
    moving: MovingFleet
    predict: Callable[[Request], Request] | None = None


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
        settings = options_from(options, group.options) if group.options else options
        engine = engines[name] = SimEngine(name, profiles[wanted], network, settings, seed, host=host)
        room = engine.pool.total * engine.profile.block_size
        members.append(Member(name, f"sim://{name}", group.role, engine, kv_tokens=room))
    if not spec.without_kv_exchange:
        _require_exchange(list(engines.values()))
    stores: dict[str, SimStore] = {}
    if spec.stores:
        from tercet_lab.sim.sim_store import SimStore  # imports the real one with its transports

        mirrored = next(iter(engines.values())).profile
        for member in members:  # copies go where revisions allow it
            member.revision = _revision(engines[member.name].profile)
        for name, each in zip(store_names(spec), spec.stores, strict=True):
            stores[name] = SimStore(name, mirrored, network, each)
            members.append(Member(name, f"sim://{name}", STORE, stores[name], revision=_revision(mirrored)))
    # Simulated engines report every change, so the last report is valid at any age.
    fleet = EngineFleet(members, clock=asyncio.get_running_loop().time, stale_after=math.inf, seed=seed)

    fleet.costs.watch_once_asked()

    def listen() -> None:
        for name, engine in engines.items():
            engine.observe(EngineObserver(fleet.knowledge, name, engine.profile.block_size))

    def listen_for_blocks() -> None:
        for name, each in (*engines.items(), *stores.items()):
            each.observe_blocks(EngineObserver(fleet.knowledge, name, each.profile.block_size))

    if stores:  # what they hold is known by their events only, and then engines must be known by theirs
        listen_for_blocks()
    # Only programs that ask for reports cause their cost.
    fleet.knowledge.hear_from(listen, (lambda: None) if stores else listen_for_blocks)
    # A fleet has one router, with the time of the engines' default profile.
    router = profiles[profile].router if profile in profiles else 0.0
    metrics = SimulatedMetrics()
    service = Service(
        fleet, name_of(program), {}, metrics, retries=RETRIES, wait_for_engine=WAIT_FOR_ENGINE,
        moves=moving.moves, retries_faults=False, load_arm=lambda _: program,
    )  # fmt: skip
    with_moves = MovingFleet(service, metrics, engines, stores, moving, bool(spec.faults))
    return VirtualFleet(service, metrics, engines, stores, network, router, with_moves)


def _revision(profile: Profile) -> Revision:
    layout = profile.layout()
    return Revision(__version__, "simulated", layout.model, layout=layout)


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


def plan_fault(fault: Fault, engine: SimEngine | SimStore, fleet: EngineFleet) -> None:
    """Let a fault of ``engine`` begin and end at its times."""
    times: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "die": (engine.fail, partial(_recover, engine, fleet)),
        "freeze": (engine.freeze, engine.thaw),
        "drain": (partial(fleet.drain, engine.name), partial(fleet.drain, engine.name, False)),
    }
    loop, (begin, end) = asyncio.get_running_loop(), times[fault.kind]
    loop.call_at(fault.at, begin)
    if fault.down is not None:
        loop.call_at(fault.at + fault.down, end)


def _recover(engine: SimEngine | SimStore, fleet: EngineFleet) -> None:
    engine.recover()
    fleet.member(engine.name).reachable = True


@dataclass(frozen=True)
class EngineObserver:
    """Observer of a simulated engine, which records the engine's events in ``knowledge``."""

    knowledge: FleetKnowledge
    name: str
    block_size: int

    def load(self, load: EngineLoad) -> None:
        self.knowledge.loads.report(self.name, load)

    def stored(self, hashes: Sequence[int]) -> None:
        self.knowledge.hold(self.name, self.block_size, hashes)

    def dropped(self, hashes: Sequence[int]) -> None:
        self.knowledge.unstore(self.name, hashes)

    def cleared(self) -> None:
        self.knowledge.cleared(self.name)
