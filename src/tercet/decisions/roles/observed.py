"""Input of a role policy: engines, and the demand of the fleet over the last seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tercet.decisions.cost.cost_model import OnlineFit
from tercet.protocol import Role

WINDOW_S = 5.0
"""Seconds over which the prefills' demand is measured."""
GROWTH_S = 3.0
"""Seconds over which the growth of decodes is measured: older growth tells little about the next seconds."""
SETTLE_S = 1.0
"""Seconds after an engine appears or changes its role, in which its step times are ignored."""
STEPS_NEEDED = 4
"""Step times that must be measured before one is predicted."""


@dataclass(frozen=True)
class ObservedEngine:
    """The state of one engine now; ``able`` is True if it answers and may be picked.

    ``waiting_s`` is the prefill ahead of a new arrival, in seconds; ``busy_s`` is the time in seconds in which prefills
    ran, since the engine is observed. It decodes ``running`` sequences, which read ``contexts`` tokens of KV in a step;
    a recent step took ``step_s`` seconds (None: unknown); ``queued`` sequences wait to decode. ``kv_usage`` is the
    share of its KV cache in use.
    """

    name: str
    role: Role
    able: bool = True
    waiting_s: float = 0.0
    busy_s: float = 0.0
    running: int = 0
    queued: int = 0
    contexts: int = 0
    step_s: float | None = None
    kv_usage: float = 0.0

    @property
    def with_queued(self) -> float:
        """Factor by which its decodes and their contexts would grow if the queued sequences ran as well."""
        return (self.running + self.queued) / self.running if self.running else 1.0


@dataclass(frozen=True)
class Demand:
    """The work of a fleet: prefills as the number of engines that they keep busy, decodes as sequences at a time.

    ``prefill`` is the seconds of prefill computed per second, plus the growth of the line; ``waiting_s`` is that line
    over all engines, in seconds of one engine. ``decodes`` is the number of sequences that run or wait on engines that
    decode, with ``contexts`` tokens of KV, which need ``kv_usage`` KV caches; ``more_decodes`` and ``more_contexts``
    are the growth of both per second. Prefills were measured over the last ``over_s`` seconds.
    """

    prefill: float
    waiting_s: float
    decodes: float
    contexts: float
    kv_usage: float
    more_decodes: float
    more_contexts: float
    over_s: float


@dataclass(frozen=True)
class _Sample:
    at: float
    busy: dict[str, float]
    waiting_s: float
    decodes: float
    contexts: float


class FleetHistory:
    """The last :data:`WINDOW_S` seconds of a fleet, by the caller's clock."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._roles: dict[str, tuple[Role, float]] = {}
        self._step = OnlineFit((0.01, 1e-4, 1e-7))

    def observe(self, now: float, engines: Sequence[ObservedEngine]) -> Demand | None:
        """Add a look at the engines, and return the demand; None if there is no earlier look to compare with."""
        self._learn_steps(now, engines)
        decoding = [each for each in engines if each.role == "decode" and each.able]
        newest = _Sample(
            at=now,
            busy={each.name: each.busy_s for each in engines},
            waiting_s=sum(each.waiting_s for each in engines),
            decodes=sum(each.running + each.queued for each in decoding),
            contexts=sum(each.contexts * each.with_queued for each in decoding),
        )
        self._samples.append(newest)
        while len(self._samples) > 2 and now - self._samples[0].at > WINDOW_S:
            self._samples.popleft()  # the last two stay: looks of a starved process are rare
        oldest = self._samples[0]
        passed = now - oldest.at
        if passed <= 0:
            return None
        computed = sum(max(0.0, busy - oldest.busy.get(name, busy)) for name, busy in newest.busy.items())
        grown = newest.waiting_s - oldest.waiting_s
        recent = next(each for each in self._samples if now - each.at <= GROWTH_S)
        lately = now - recent.at
        return Demand(
            prefill=max(0.0, (computed + grown) / passed),
            waiting_s=newest.waiting_s,
            decodes=newest.decodes,
            contexts=newest.contexts,
            kv_usage=sum(each.kv_usage for each in decoding),
            more_decodes=(newest.decodes - recent.decodes) / lately if lately else 0.0,
            more_contexts=(newest.contexts - recent.contexts) / lately if lately else 0.0,
            over_s=passed,
        )

    @property
    def knows_steps(self) -> bool:
        """True if step times can be predicted."""
        return self._step.count >= STEPS_NEEDED

    def step_s(self, running: float, contexts: float) -> float:
        """Return the predicted seconds of a step that decodes ``running`` sequences with ``contexts`` tokens of KV."""
        return self._step.predict((1.0, running, contexts))

    def _learn_steps(self, now: float, engines: Sequence[ObservedEngine]) -> None:
        known = self._roles
        self._roles = {
            each.name: (each.role, known[each.name][1])
            if each.name in known and known[each.name][0] == each.role
            else (each.role, now)
            for each in engines
        }
        for each in engines:
            settled = now - self._roles[each.name][1] >= SETTLE_S
            if settled and each.role == "decode" and each.running and each.step_s and not each.waiting_s:
                self._step.observe((1.0, each.running, each.contexts), each.step_s)
