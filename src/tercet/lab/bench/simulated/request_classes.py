"""Classes of simulated requests: which class each is of, and how many meet its objectives, as a router counts them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from tercet.lab.bench.summary import MS, Samples, Slo
from tercet.protocol import BadRequest, Request
from tercet.settings.role_settings import DEFAULT_CLASS, ObjectiveClass, Objectives


def weights_of(traffic: Mapping[str, str], objectives: Objectives) -> dict[str, float]:
    """How often each class comes; raises :class:`~tercet.protocol.BadRequest` for an unknown one."""
    known, flag = [DEFAULT_CLASS, *(each.name for each in objectives.classes)], "class-traffic"
    found = dict[str, float]()
    for name, given in traffic.items():
        if name not in known:
            raise BadRequest(f"{flag}: the configuration has no class {name}; choose from {', '.join(known)}", flag)
        try:
            found[name] = float(given)
        except ValueError:
            found[name] = 0.0
        if not 0 < found[name] < np.inf:
            raise BadRequest(f"{flag}: the weight of {name} is {given!r}, and must be a positive number", flag)
    missing = [each.name for each in objectives.classes if each.name not in found]
    if missing:
        raise BadRequest(f"{flag}: no simulated request is of class {missing[0]}; give its weight", flag)
    return found


def classed(
    arrivals: Iterable[tuple[float, Request]], weights: Mapping[str, float], header: str, seed: int
) -> Iterator[tuple[float, Request]]:
    """The arrivals, each of a class that is drawn; the same for the same seed."""
    chance, names = random.Random(f"{seed} classes"), list(weights)
    for when, request in arrivals:
        (name,) = chance.choices(names, list(weights.values()))
        headers = request.headers if name == DEFAULT_CLASS else {**request.headers, header: name}
        yield when, msgspec.structs.replace(request, headers=headers)


def slo_of_class(wanted: Objectives | ObjectiveClass) -> Slo:
    """The same objectives in milliseconds."""
    ttft, tpot = (None if limit is None else limit * MS for limit in (wanted.ttft, wanted.tpot))
    return Slo(ttft=ttft, tpot=tpot)


@dataclass(frozen=True)
class ClassedSamples(Samples):
    """A run whose requests are of ``classes``; None has the objectives of requests without a class."""

    classes: tuple[ObjectiveClass | None, ...] = ()

    def meets(self, slo: Slo) -> NDArray[np.bool_]:
        """Which requests succeeded within every limit of their class, or of ``slo`` without one."""
        good = super().meets(slo)
        for each in {*self.classes}:
            if each is not None:
                of_class = self._are_of(each)
                good[of_class] = super().meets(slo_of_class(each))[of_class]
        return good

    def attainment(self, slo: Slo) -> dict[str, float]:
        """By class, the share of its requests that met its objectives."""
        good = self.meets(slo)
        found = {each: float(good[self._are_of(each)].mean()) for each in dict.fromkeys(self.classes)}
        return {DEFAULT_CLASS if each is None else each.name: share for each, share in found.items()}

    def _are_of(self, wanted: ObjectiveClass | None) -> NDArray[np.bool_]:
        return np.array([each == wanted for each in self.classes], dtype=np.bool_)
