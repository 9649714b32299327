"""The choice of the router for a request, by the model that it names and by the routers' weights; without I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tercet.fleet.members import CallsInFlight
from tercet.protocol import BadRequest, EngineUnreachable, UnknownModel
from tercet.protocol.weights import chosen_by_weight


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
