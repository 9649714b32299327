"""What a role policy sees: engines, and the demand of the fleet over the last seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tercet.decisions.cost.cost_model import OnlineFit
from tercet.protocol import Role

WINDOW_S = 5.0
"""Seconds over which the prefills' demand is measured."""
GROWTH_S = 3.0
"""Seconds over which the growth of decodes is measured: what came before says little of what comes."""
SETTLE_S = 1.0
"""Seconds after it appears, or has another role, in which an engine's step times count for nothing."""
STEPS_NEEDED = 4
"""Step times that must have been seen before any is predicted."""


@dataclass(frozen=True)
class ObservedEngine:
    """One engine now. ``able``: it answers, and may be picked.

    ``waiting_s`` are seconds of prefill ahead of a new arrival, ``busy_s`` is the time since it was met in which
    prefills ran. It decodes ``running`` sequences that read ``contexts`` tokens of KV in a step, which took ``step_s``
    seconds lately (None: unknown); ``queued`` wait for that. ``kv_usage`` is the share of its KV cache in use.
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
        """The factor by which its decodes and their contexts would be more if none waited."""
        return (self.running + self.queued) / self.running if self.running else 1.0


@dataclass(frozen=True)
class Demand:
    """What a fleet has to do: prefills as engines that they keep busy, decodes as sequences that run at once.

    ``prefill`` is what has been computed per second, and what the line has grown by; ``waiting_s`` is that line,
    over all engines, in seconds of one engine. ``decodes`` are the sequences that run or wait on engines that decode,
    with ``contexts`` tokens of KV, which need ``kv_usage`` KV caches; ``more_decodes`` and ``more_contexts`` are by how
    much both grow per second. Prefills were measured over the last ``over_s`` seconds.
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
    """The last :data:`WINDOW_S` seconds of a fleet. Times are of the caller's clock."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._roles: dict[str, tuple[Role, float]] = {}
        self._step = OnlineFit((0.01, 1e-4, 1e-7))

    def observe(self, now: float, engines: Sequence[ObservedEngine]) -> Demand | None:
        """Add a look; None while there is nothing to compare it with."""
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
            self._samples.popleft()  # of a starved process, whose looks are rare, the one before stays
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
        """Whether step times can be predicted."""
        return self._step.count >= STEPS_NEEDED

    def step_s(self, running: float, contexts: float) -> float:
        """Predicted seconds of a step that decodes ``running`` sequences with ``contexts`` tokens of KV."""
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
