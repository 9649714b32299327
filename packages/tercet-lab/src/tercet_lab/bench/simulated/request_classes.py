"""The classes of simulated requests: the class of each request, and the share that meets the class's objectives."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from tercet.protocol import BadRequest, Request
from tercet.protocol.weights import chosen_by_weight
from tercet.settings.role_settings import DEFAULT_CLASS, ObjectiveClass, Objectives
from tercet_lab.bench.summary import MS, Samples, Slo


def weights_of(traffic: Mapping[str, str], objectives: Objectives) -> dict[str, float]:
    """Return the weight of each class. Raise :class:`~tercet.protocol.BadRequest` for an unknown or missing class."""
    known, flag = [DEFAULT_CLASS, *(each.name for each in objectives.classes)], "class-traffic"
    found = dict[str, float]()
    for name, given in traffic.items():
        if name not in known:
            raise BadRequest(
                f"{flag}: {name} is not a class of the configuration; choose from {', '.join(known)}", flag
            )
        try:
            found[name] = float(given)
        except ValueError:
            found[name] = 0.0
        if not 0 < found[name] < np.inf:
            raise BadRequest(f"{flag}: the weight of {name} is {given!r}, and must be a positive number", flag)
    missing = [each.name for each in objectives.classes if each.name not in found]
    if missing:
        raise BadRequest(f"{flag}: the weight of class {missing[0]} is missing; give it", flag)
    return found


def classed(
    arrivals: Iterable[tuple[float, Request]], weights: Mapping[str, float], header: str, seed: int
) -> Iterator[tuple[float, Request]]:
    """Yield the arrivals, each with a class, drawn by weight, in its ``header``. Equal seeds give equal classes."""
    chance, names, parts = random.Random(f"{seed} classes"), list(weights), list(weights.values())
    for when, request in arrivals:
        name = names[chosen_by_weight(parts, chance.random())]
        headers = request.headers if name == DEFAULT_CLASS else {**request.headers, header: name}
        yield when, msgspec.structs.replace(request, headers=headers)


def slo_of_class(wanted: Objectives | ObjectiveClass) -> Slo:
    """Return the same objectives in milliseconds."""
    ttft, tpot = (None if limit is None else limit * MS for limit in (wanted.ttft, wanted.tpot))
    return Slo(ttft=ttft, tpot=tpot)


@dataclass(frozen=True)
class ClassedSamples(Samples):
    """The requests of a run with their ``classes``. None is a request without a class, with the default objectives."""

    classes: tuple[ObjectiveClass | None, ...] = ()

    def meets(self, slo: Slo) -> NDArray[np.bool_]:
        """Return, for each request, True if it succeeded within every limit of its class (without one: of ``slo``)."""
        good = super().meets(slo)
        for each in {*self.classes}:
            if each is not None:
                of_class = self._are_of(each)
                good[of_class] = super().meets(slo_of_class(each))[of_class]
        return good

    def attainment(self, slo: Slo) -> dict[str, float]:
        """Return, by class, the share of requests that met the objectives."""
        good = self.meets(slo)
        found = {each: float(good[self._are_of(each)].mean()) for each in dict.fromkeys(self.classes)}
        return {DEFAULT_CLASS if each is None else each.name: share for each, share in found.items()}

    def _are_of(self, wanted: ObjectiveClass | None) -> NDArray[np.bool_]:
        return np.array([each == wanted for each in self.classes], dtype=np.bool_)
