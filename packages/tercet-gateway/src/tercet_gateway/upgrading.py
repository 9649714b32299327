"""Replacement of a fleet by a new one behind a model router, step by step, with a return to the old fleet on errors.

The decisions are a state machine without I/O (:class:`Rollout`); :class:`Upgrade` carries them out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tercet.protocol import BadRequest, EngineError, UnknownPath

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


LOOK_SECONDS = 0.5
# Number of polls in a row without requests before a fleet counts as empty.
EMPTY_LOOKS = 3
Backends = Mapping[str, Mapping[str, Any]]


class Upgrade:
    """A shift of requests from the router at ``old`` to the router at ``new``; ``on_step`` gets a line for each step.

    ``url`` is the model router, and ``key`` its admin key. A fleet is drained for at most ``drain_s`` seconds.
    """

    def __init__(
        self, url: str, key: str, old: str, new: str, plan: RolloutPlan, drain_s: float, on_step: Callable[[str], None]
    ) -> None:
        self._url = url
        self._key = key
        self._old, self._new = old.rstrip("/"), new.rstrip("/")
        self._plan = plan
        self._drain_s = drain_s
        self._on_step = on_step
        self._weight = 1.0
        self.rollout = Rollout(plan)

    async def run(self) -> None:
        """Return when the new fleet has all requests, and the old one is empty and removed from the model router.

        If the new fleet fails requests, or the call is cancelled before the new fleet has all requests, the old fleet
        gets all requests again, and the new one is drained and removed. Raises :class:`~tercet.protocol.EngineError` if
        requests failed, and :class:`~tercet.protocol.BadRequest` if the new fleet cannot replace the old one.
        """
        await self._enter()
        try:
            await self._shift()
        except asyncio.CancelledError:
            self.rollout.give_up("the upgrade was interrupted")
            await asyncio.shield(self._leave(self._new))
            raise
        except BaseException:
            self.rollout.give_up("the model router does not answer")
            with contextlib.suppress(Exception):  # the caller gets the first error
                await asyncio.shield(self._leave(self._new))
            raise
        if self.rollout.state == "returned":
            await self._leave(self._new)
            raise EngineError(f"the old fleet serves all requests again: {self.rollout.why}")
        await self._leave(self._old)

    async def _enter(self) -> None:
        """Add the new router to the model router with the weight 0, unless it is listed, and check both routers."""
        there = await require_listed(self._url, self._key, self._old)
        if self._old == self._new:
            raise BadRequest("--to: must be another router than --from", "--to")
        if self._new not in there:
            there = await self._add_new()
        old, new = there[self._old], there[self._new]
        self._weight = old["weight"] + new["weight"] or 1.0
        missing = [name for name in old["models"] if name not in new["models"]]
        if missing or not new["answers"]:
            await self._leave(self._new)
            what = f"does not serve {', '.join(missing)}" if new["answers"] else "does not answer"
            raise BadRequest(
                f"--to: the router at {self._new} {what}; it must serve the old router's models, see served-model-name",
                "--to",
            )
        self.rollout = Rollout(self._plan, new["weight"] / self._weight)

    async def _shift(self) -> None:
        clock = asyncio.get_running_loop().time
        while self.rollout.state == "shifting":
            there = await self._backends()
            if self.rollout.look(clock(), _seen(there, self._old), _seen(there, self._new)):
                share, why = self.rollout.share, f": {self.rollout.why}" if self.rollout.why else ""
                # The share of other routers of the same model does not change.
                await self._change({self._old: self._weight * (1 - share), self._new: self._weight * share})
                self._on_step(f"{self._new} has {share:.0%} of the requests, {self._old} {1 - share:.0%}{why}")
            if self.rollout.state == "shifting":
                await asyncio.sleep(min(LOOK_SECONDS, self._plan.hold_s))

    async def _leave(self, url: str) -> None:
        """Send a router no new requests, wait until it is empty, for at most ``drain_s`` seconds, and remove it.

        If another command has removed the other router, this one stays as it is: it may be the only one that serves.
        """
        other = self._new if url == self._old else self._old
        if other not in await self._backends():
            self._on_step(f"{url} keeps its requests: another command removed {other} from the model router")
            return
        there = await self._change({url: 0.0, other: self._weight})
        empty, said = 0, -1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                while url in there and empty < EMPTY_LOOKS:
                    left = there[url]["in_flight"]
                    empty = 0 if left else empty + 1
                    if left != said:
                        self._on_step(f"{url}: {left} requests left")
                        said = left
                    await asyncio.sleep(LOOK_SECONDS)
                    there = await self._backends()
        await self._change({url: None})

    async def _backends(self) -> Backends:
        return await _listed(self._url, self._key)

    async def _add_new(self) -> Backends:
        """Add the new router with the weight 0; remove it again if the call is cancelled."""
        try:
            return await self._put({**await self._weights(), self._new: 0.0})
        except asyncio.CancelledError:
            await asyncio.shield(self._change({self._new: None}))
            raise

    async def _change(self, changes: Mapping[str, float | None]) -> Backends:
        """Change the weights of those of these routers that are listed, and remove those whose weight is None."""
        weights = await self._weights()
        return await self._put({**weights, **{url: to for url, to in changes.items() if url in weights}})

    async def _weights(self) -> Mapping[str, float]:
        return {url: each["weight"] for url, each in (await self._backends()).items()}

    async def _put(self, weights: Mapping[str, float | None]) -> Backends:
        """Make these the model router's routers, without those whose weight is None."""
        routers = [{"url": url, "weight": weight} for url, weight in weights.items() if weight is not None]
        return await _asked("PUT", self._url, self._key, {"routers": routers})


async def require_listed(url: str, key: str, router: str) -> Backends:
    """Return the routers of the model router at ``url``; raise BadRequest if the router ``router`` is none of them."""
    there = await _listed(url, key)
    if router.rstrip("/") not in there:
        raise BadRequest(f"--from: the model router has no router at {router}; it has {', '.join(there)}", "--from")
    return there


async def _listed(url: str, key: str) -> Backends:
    try:
        return await _asked("GET", url, key)
    except UnknownPath as error:
        raise BadRequest(f"--model-router: the server at {url} is not a model router", "--model-router") from error


async def _asked(method: str, url: str, key: str, body: Any = None) -> Backends:
    from tercet.wire.client.bounded_answers import ask_router  # not for the help of the command

    found: list[dict[str, Any]] = await ask_router(url, method, "/backends", body, key)
    return {each["url"]: each for each in found}


def _seen(there: Backends, url: str) -> Seen:
    each = there.get(url)
    if each is None:
        raise BadRequest(f"--model-router: another command removed {url}; start the upgrade again", "--model-router")
    return Seen(each["requests"], each["failures"], each["in_flight"], each["answers"])
