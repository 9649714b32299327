"""Rollout of a new fleet for a model: it takes over requests step by step, and gives them back on errors. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tercet.protocol import BadRequest

STEPS = (0.05, 0.25, 0.5, 1.0)
RolloutState = Literal["shifting", "shifted", "returned"]


@dataclass(frozen=True)
class Seen:
    """Counters of one fleet in the model router: requests since its start, failed ones, and running ones."""

    requests: int = 0
    failures: int = 0
    in_flight: int = 0
    answers: bool = True

    def since(self, before: Seen) -> Seen:
        """Return the requests and failures after ``before``."""
        return Seen(self.requests - before.requests, self.failures - before.failures, self.in_flight, self.answers)

    @property
    def failed_share(self) -> float:
        """The share of requests that failed; 0 without requests."""
        return self.failures / self.requests if self.requests else 0.0


@dataclass(frozen=True)
class RolloutPlan:
    """The shares of requests that the new fleet gets one after the other, each for ``hold_s`` seconds.

    The old fleet gets all requests again if the new fleet fails a share of its requests that is larger than the old
    one's by more than ``tolerance``. Raises :class:`~tercet.protocol.BadRequest`.
    """

    steps: Sequence[float] = STEPS
    hold_s: float = 30.0
    tolerance: float = 0.01

    def __post_init__(self) -> None:
        rises = all(before < after for before, after in zip(self.steps, self.steps[1:], strict=False))
        if not self.steps or not rises or self.steps[0] <= 0 or self.steps[-1] != 1:
            raise BadRequest("steps: must rise from above 0 to 100 percent", "steps")


class Rollout:
    """One change from an old fleet to a new one, which has the share ``present`` already.

    ``share`` is the share that the new fleet should have. The rollout ends as ``shifted`` with all requests, or as
    ``returned`` with none; ``why`` then has the reason.
    """

    def __init__(self, plan: RolloutPlan, present: float = 0.0) -> None:
        self.state: RolloutState = "shifting"
        self.share = present
        self.why = ""
        self._plan = plan
        self._left = [step for step in plan.steps if step > present]
        self._since: tuple[float, Seen, Seen] | None = None

    def look(self, now: float, old: Seen, new: Seen) -> bool:
        """Decide by the counters at time ``now``; return True if the share has changed."""
        if self.state != "shifting":
            return False
        if not new.answers:
            return self.give_up("the new fleet does not answer")
        if self._since is not None:
            began, old_before, new_before = self._since
            old_since, new_since = old.since(old_before), new.since(new_before)
            if new_since.failed_share > old_since.failed_share + self._plan.tolerance:
                return self.give_up(
                    f"{new_since.failures} of {new_since.requests} requests failed at the new fleet, and "
                    f"{old_since.failures} of {old_since.requests} at the old one"
                )
            if now - began < self._plan.hold_s:
                return False
        if not self._left:
            self.state = "shifted"
            return False
        self.share, self._since = self._left.pop(0), (now, old, new)
        return True

    def give_up(self, why: str) -> bool:
        """Give all requests back to the old fleet; return True if the share has changed."""
        changed = self.share != 0
        self.state, self.share, self.why = "returned", 0.0, why
        return changed
