"""Replacement of a fleet by a new one behind a model router, as :mod:`tercet_gateway.model_router.rollout` decides."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from tercet.protocol import BadRequest, EngineError, UnknownPath
from tercet.wire.client.ask_router import ask_router
from tercet_gateway.model_router.rollout import Rollout, RolloutPlan, Seen

LOOK_SECONDS = 0.5
# Number of polls in a row without requests before a fleet counts as empty.
EMPTY_LOOKS = 3
Backends = Mapping[str, Mapping[str, Any]]


class Upgrade:
    """A shift of requests from the router at ``old`` to the router at ``new``; ``told`` receives a line for each step.

    ``url`` is the model router, and ``key`` its admin key. A fleet is drained for at most ``drain_s`` seconds.
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
                await self._apply()
            if self.rollout.state == "shifting":
                await asyncio.sleep(min(LOOK_SECONDS, self._plan.hold_s))

    async def _apply(self) -> None:
        """Set the weights of both routers; the share of other routers of the same model does not change."""
        share = self.rollout.share
        await self._change({self._old: self._weight * (1 - share), self._new: self._weight * share})
        why = f": {self.rollout.why}" if self.rollout.why else ""
        self._told(f"{self._new} has {share:.0%} of the requests, {self._old} {1 - share:.0%}{why}")

    async def _leave(self, url: str) -> None:
        """Send a router no new requests, wait until it is empty, for at most ``drain_s`` seconds, and remove it.

        If another command has removed the other router, this one stays as it is: it may be the only one that serves.
        """
        other = self._new if url == self._old else self._old
        if other not in await self._backends():
            self._told(f"{url} keeps its requests: another command removed {other} from the model router")
            return
        there = await self._change({url: 0.0, other: self._weight})
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
        body = {"routers": routers}
        found: list[dict[str, Any]] = await ask_router(self._url, "PUT", "/backends", body, self._key)
        return {each["url"]: each for each in found}


async def require_listed(url: str, key: str, router: str) -> Backends:
    """Return the routers of the model router at ``url``; raise BadRequest if the router ``router`` is none of them."""
    there = await _listed(url, key)
    if router.rstrip("/") not in there:
        raise BadRequest(f"--from: the model router has no router at {router}; it has {', '.join(there)}", "--from")
    return there


async def _listed(url: str, key: str) -> Backends:
    try:
        found: list[dict[str, Any]] = await ask_router(url, "GET", "/backends", admin_key=key)
    except UnknownPath as error:
        raise BadRequest(f"--model-router: the server at {url} is not a model router", "--model-router") from error
    return {each["url"]: each for each in found}


def _seen(there: Backends, url: str) -> Seen:
    each = there.get(url)
    if each is None:
        raise BadRequest(f"--model-router: another command removed {url}; start the upgrade again", "--model-router")
    return Seen(each["requests"], each["failures"], each["in_flight"], each["answers"])
