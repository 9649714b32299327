"""The routers behind a model router: which serves a model, by weights, and regular polls of what they serve.

The log says when a router is lost or answers again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import msgspec

from tercet.aio import TaskSet, repeat
from tercet.fleet.members import CallsInFlight
from tercet.protocol import BadRequest, EngineUnreachable, UnknownModel
from tercet.protocol.access import bearer
from tercet.protocol.weights import chosen_by_weight
from tercet.protocol.wire import UNREADABLE
from tercet.wire.client.bounded_answers import PLAIN, read_answer, reason_of
from tercet.wire.client.passing import passing_session


@dataclass(eq=False)
class WeightedRouter:
    """One router and its fleet, at ``url``.

    ``models`` are the entries of its ``/v1/models`` by name, from its last answer; None before that. ``answers`` is
    True if it answered the last poll; ``silent`` counts consecutive polls without an answer in time, and ``lost`` is
    True from its first failure to its next answer. ``weight`` is its share of the requests for each of its models,
    relative to other routers that serve the same name. ``failures`` counts requests that ended with a status of 500 or
    above, or were cut off.

    ``sent`` is True if a part of an answer came since the last silent poll; ``still`` counts consecutive silent polls
    before which none came. ``calls`` ends running requests when the router stands still.
    """

    url: str
    weight: float = 1.0
    models: Mapping[str, Any] | None = None
    answers: bool = False
    silent: int = 0
    lost: bool = False
    in_flight: int = 0
    requests: int = 0
    failures: int = 0
    sent: bool = False
    still: int = 0
    calls: CallsInFlight = field(default_factory=CallsInFlight, repr=False)

    def serves(self, model: str) -> bool:
        """True if the router lists the model ``model``."""
        return self.models is not None and model in self.models


@dataclass
class ModelRoutes:
    """The routers, and the choice among them."""

    backends: Sequence[WeightedRouter] = field(default_factory=list[WeightedRouter])

    def choose(self, model: str, draw: float, but: Collection[WeightedRouter] = ()) -> WeightedRouter:
        """Return the router for a request of ``model``: one with a weight that answers, by ``draw`` in ``[0, 1)``.

        Routers in ``but`` are left out. Raises :class:`~tercet.protocol.UnknownModel` for a name that no router serves,
        and :class:`~tercet.protocol.EngineUnreachable` if no router that serves it is available now.
        """
        serving = [each for each in self.backends if each.serves(model)]
        if not serving:
            self._require_all_known()
            raise UnknownModel(f"The model `{model:.200}` does not exist.", "model")
        able = [each for each in serving if each.answers and each.weight > 0 and each not in but]
        if not able:
            urls = ", ".join(each.url for each in serving)
            raise EngineUnreachable(f"no router of the model {model!r} is available now: {urls}")
        return able[chosen_by_weight([each.weight for each in able], draw)]

    def only_model(self) -> str:
        """Return the model for a request that names none.

        Raises :class:`~tercet.protocol.BadRequest` if there are several. vLLM takes its model then, which a router
        lists first.
        """
        first = {next(iter(each.models)) for each in self.backends if each.models}
        if len(first) == 1:
            return first.pop()
        self._require_all_known()
        raise BadRequest(f"model: is missing; choose one of {', '.join(self.names)}", "model")

    def any_model(self) -> str:
        """Return a model of a router that answers, for a request to which every router answers alike.

        Raises :class:`~tercet.protocol.EngineUnreachable` if no router answers.
        """
        self.require_answers()
        able = (each.models for each in self.backends if each.answers and each.weight > 0 and each.models)
        return next((next(iter(models)) for models in able), "") or self.only_model()

    @property
    def names(self) -> list[str]:
        """All names that routers have listed."""
        return sorted({name for each in self.backends for name in each.models or ()})

    def listed(self) -> list[Any]:
        """Return the entries of ``/v1/models``: each name once, of the router with the largest weight that answers."""
        found = dict[str, Any]()
        for each in sorted(self.backends, key=lambda each: -each.weight):
            if each.answers and each.weight > 0:
                for name, entry in (each.models or {}).items():
                    found.setdefault(name, entry)
        return [found[name] for name in sorted(found)]

    def require_answers(self) -> None:
        """Raise :class:`~tercet.protocol.EngineUnreachable` if no router with a weight answers."""
        if not any(each.answers and each.weight > 0 for each in self.backends):
            raise EngineUnreachable("no router answers")

    def replaced(self, wanted: Iterable[tuple[str, float]]) -> tuple[list[WeightedRouter], list[WeightedRouter]]:
        """Set the routers, by URL and weight; routers that stay keep their state.

        Returns the new routers, and those that have left, whose running requests continue.
        """
        before = {each.url: each for each in self.backends}
        after = list[WeightedRouter]()
        for url, weight in wanted:
            backend = before.get(url) or WeightedRouter(url)
            backend.weight = weight
            after.append(backend)
        new = [each for each in after if each.url not in before]
        left = [each for each in before.values() if each not in after]
        self.backends = after
        return new, left

    def _require_all_known(self) -> None:
        silent = [each.url for each in self.backends if each.models is None]
        if silent:
            raise EngineUnreachable(f"these routers have not yet listed their models: {', '.join(silent)}")


logger = logging.getLogger("tercet.gateway")
POLL_TIMEOUT = aiohttp.ClientTimeout(total=5.0, sock_connect=2.0)
SILENT_POLLS = 3
"""Consecutive polls without an answer in time, after which a router that accepts connections counts as lost."""
KEEPALIVE_SECONDS, CONNECT_SECONDS, MOST_ANSWER_HEAD = 2.0, 5.0, 1024 * 1024


class _ModelList(msgspec.Struct):
    data: list[dict[str, Any]]


class BackendPolls:
    """Polls of the routers of ``routes`` every ``interval_s`` seconds, with the key that ``key`` returns.

    An async context manager, in which ``session`` has the connections to the routers.
    """

    session: aiohttp.ClientSession

    def __init__(self, routes: ModelRoutes, interval_s: float, key: Callable[[], str]) -> None:
        self._routes = routes
        self._interval_s = interval_s
        self._key = key
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._tasks = TaskSet()

    async def __aenter__(self) -> Self:
        self.session = passing_session(
            None, keep_alive_s=KEEPALIVE_SECONDS, connect_s=CONNECT_SECONDS, max_head=MOST_ANSWER_HEAD
        )
        await self._begin(self._routes.backends)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.close()
        await self.session.close()

    async def replace(self, weights: Mapping[str, float]) -> None:
        """Set the routers, by URL and weight; new ones are first asked for their models."""
        new, left = self._routes.replaced(weights.items())
        for backend in left:
            self._polls.pop(backend.url).cancel()
            logger.info("%s is no longer polled", backend.url)
        await self._begin(new)

    async def _begin(self, backends: Sequence[WeightedRouter]) -> None:
        firsts = [asyncio.Event() for _ in backends]
        for backend, first in zip(backends, firsts, strict=True):
            polling = self._polling(backend, first)
            self._polls[backend.url] = self._tasks.spawn(polling, f"polls of {backend.url}")
        for first in firsts:  # a caller that leaves here leaves routers that are polled
            await first.wait()

    async def _polling(self, backend: WeightedRouter, first: asyncio.Event) -> None:
        """Poll a router until cancelled; set ``first`` after the first poll, or when none will follow."""

        async def poll() -> None:
            try:
                await self.poll(backend)
            finally:
                first.set()

        await repeat(poll, self._interval_s, f"polls of {backend.url}")

    async def poll(self, backend: WeightedRouter) -> None:
        """Ask one router for its models."""
        try:
            async with self.session.get(
                f"{backend.url}/v1/models",
                headers={**bearer(self._key()), **PLAIN},
                timeout=POLL_TIMEOUT,
                allow_redirects=False,
            ) as response:
                response.raise_for_status()
                found = msgspec.json.decode(await read_answer(response), type=_ModelList)
                models = {str(each["id"]): each for each in found.data}
        except TimeoutError as error:
            self._silent(backend, error)
        except aiohttp.ClientResponseError as error:
            self.lost(backend, f"it answers {error.status} when asked for its models")
        except (aiohttp.ClientError, OSError) as error:
            self.lost(backend, reason_of(error))
        except (KeyError, *UNREADABLE):
            self.lost(backend, "its list of models cannot be read")
        else:
            if not backend.answers or backend.models is None or models.keys() != backend.models.keys():
                logger.info("%s serves %s", backend.url, ", ".join(models) or "no model")
            backend.models, backend.answers, backend.silent, backend.lost = models, True, 0, False
            backend.still = 0

    def _silent(self, backend: WeightedRouter, error: TimeoutError) -> None:
        """Count a poll without an answer. A router that is overloaded may still send its answers; they continue."""
        backend.silent += 1
        backend.still = 0 if backend.sent else backend.still + 1
        backend.sent = False
        if backend.silent >= SILENT_POLLS:
            self.lost(backend, reason_of(error))
        if backend.still >= SILENT_POLLS:
            reason = f"{backend.url} was lost: it did not answer {SILENT_POLLS} polls, and sent nothing meanwhile"
            backend.calls.lose(EngineUnreachable(reason))

    def lost(self, backend: WeightedRouter, reason: str) -> None:
        """Mark the router as lost: it gets no request until a poll succeeds. Running requests continue."""
        if not backend.lost:
            logger.warning("%s is unavailable: %s", backend.url, reason)
        backend.answers, backend.lost = False, True
