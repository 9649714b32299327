"""Has a new fleet take over from an old one behind a model router: what :mod:`tercet.decisions.rollout` says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from tercet.decisions.rollout import Rollout, RolloutPlan, Seen
from tercet.protocol import BadRequest, EngineError
from tercet.wire.client.ask_router import ask_router

LOOK_SECONDS = 0.5
# Looks in a row that see nothing at a fleet before it counts as empty.
EMPTY_LOOKS = 3
Backends = Mapping[str, Mapping[str, Any]]


class Upgrade:
    """Shifts the requests of the router at ``old`` to that at ``new``; ``told`` receives a line for each step.

    ``url`` is the model router's, asked with ``key``. A fleet is emptied for ``drain_s`` seconds at most.
    """

    def __init__(
        self, url: str, key: str, old: str, new: str, plan: RolloutPlan, drain_s: float, told: Callable[[str], None]
    ) -> None:
        self._url = url
        self._key = key
        self._old, self._new = old.rstrip("/"), new.rstrip("/")
        self._plan = plan
        self._drain_s = drain_s
        self._told = told
        self._weight = 1.0
        self.rollout = Rollout(plan)

    async def run(self) -> None:
        """Return once the new fleet has all requests and the old one is empty and left out.

        On errors of the new fleet, and when cancelled before it has all requests, the old one has them again, and the
        new one is emptied and left out. Raises :class:`~tercet.protocol.EngineError` in the first case, and
        :class:`~tercet.protocol.BadRequest` for fleets that cannot take over from one another.
        """
        await self._enter()
        try:
            await self._shift()
        except asyncio.CancelledError:
            self.rollout.give_up("it was interrupted")
            await asyncio.shield(self._leave(self._new))
            raise
        except BaseException:
            self.rollout.give_up("the model router does not answer")
            with contextlib.suppress(Exception):  # the first error is what the caller gets
                await asyncio.shield(self._leave(self._new))
            raise
        if self.rollout.state == "returned":
            await self._leave(self._new)
            raise EngineError(f"the old fleet serves as before: {self.rollout.why}")
        await self._leave(self._old)

    async def _enter(self) -> None:
        """Have the model router know both, the new one as it is there already or with nothing."""
        there = await self._backends()
        if self._old not in there:
            raise BadRequest(
                f"--from: the model router has no router at {self._old}; it has {', '.join(there)}", "--from"
            )
        if self._old == self._new:
            raise BadRequest("--to: is the same router as --from", "--to")
        if self._new not in there:
            there = await self._put({self._new: 0.0})
        old, new = there[self._old], there[self._new]
        missing = [name for name in old["models"] if name not in new["models"]]
        if missing or not new["answers"]:
            await self._leave(self._new)
            what = f"does not serve {', '.join(missing)}" if new["answers"] else "does not answer"
            raise BadRequest(
                f"--to: the router at {self._new} {what}, which the old one serves; see served-model-name", "--to"
            )
        self._weight = old["weight"] + new["weight"] or 1.0
        self.rollout = Rollout(self._plan, new["weight"] / self._weight)

    async def _shift(self) -> None:
        clock = asyncio.get_running_loop().time
        while self.rollout.state == "shifting":
            there = await self._backends()
            if self.rollout.look(clock(), _seen(there, self._old), _seen(there, self._new)):
                await self._apply()
            if self.rollout.state == "shifting":
                await asyncio.sleep(min(LOOK_SECONDS, self._plan.hold_s))

    async def _apply(self) -> None:
        """Give both their weights; the share of other routers of the same model stays."""
        share = self.rollout.share
        await self._put({self._old: self._weight * (1 - share), self._new: self._weight * share})
        why = f": {self.rollout.why}" if self.rollout.why else ""
        self._told(f"{self._new} has {share:.0%} of the requests, {self._old} {1 - share:.0%}{why}")

    async def _leave(self, url: str) -> None:
        """Give a router nothing new, wait until it is empty, and leave it out; its time is bounded."""
        other = self._new if url == self._old else self._old
        there = await self._put({url: 0.0, other: self._weight})
        empty, said = 0, -1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                while url in there and empty < EMPTY_LOOKS:
                    left = there[url]["in_flight"]
                    empty = 0 if left else empty + 1
                    if left != said:
                        self._told(f"{url}: {left} requests left")
                        said = left
                    await asyncio.sleep(LOOK_SECONDS)
                    there = await self._backends()
        await self._put({url: None})

    async def _backends(self) -> Backends:
        found: list[dict[str, Any]] = await ask_router(self._url, "GET", "/backends", admin_key=self._key)
        return {each["url"]: each for each in found}

    async def _put(self, changes: Mapping[str, float | None]) -> Backends:
        """Change the weights of these routers, and leave out those that get None; the others stay."""
        weights: dict[str, float | None] = {url: each["weight"] for url, each in (await self._backends()).items()}
        weights |= changes
        routers = [{"url": url, "weight": weight} for url, weight in weights.items() if weight is not None]
        body = {"routers": routers}
        found: list[dict[str, Any]] = await ask_router(self._url, "PUT", "/backends", body, self._key)
        return {each["url"]: each for each in found}


def _seen(there: Backends, url: str) -> Seen:
    each = there.get(url)
    if each is None:
        raise BadRequest(f"--model-router: another command has removed {url} from it", "--model-router")
    return Seen(each["requests"], each["failures"], each["in_flight"], each["answers"])
