"""Engines and decisions to try plugins on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np

from tercet.decisions.scheduling import Decision, Engines, Scheduling, load_scheduling
from tercet.decisions.scheduling.plugin import Floats, Scorer
from tercet.fleet import FleetKnowledge
from tercet.protocol import AdapterReport, EngineLoad, Request, Revision, Role
from tercet.protocol.addresses import UNKNOWN_REVISION


@dataclass
class View:
    """An engine as plugins see it."""

    name: str
    role: str = "both"
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    reachable: bool = True
    in_flight: int = 0
    in_flight_tokens: int = 0
    adapters: Mapping[str, AdapterReport] = field(default_factory=dict[str, AdapterReport])
    revision: Revision = UNKNOWN_REVISION


class Bench:
    """Some engines, what is known of them, and a clock that stands until it is moved."""

    def __init__(self, *views: View) -> None:
        self.now = 100.0
        self.views = list(views)
        self.knowledge = FleetKnowledge(lambda: self.now)
        for view in views:
            self.knowledge.add(view.name)

    def report(self, name: str, waiting: int = 0, running: int = 0, kv: float = 0.0, tokens: int | None = None) -> None:
        self.knowledge.loads.report(name, EngineLoad(waiting=waiting, running=running, kv_usage=kv, tokens=tokens))

    @property
    def engines(self) -> Engines:
        for view in self.views:
            self.knowledge.loads.count(view.name, "in_flight", view.in_flight)
            self.knowledge.loads.count(view.name, "in_flight_tokens", view.in_flight_tokens)
        rows = self.knowledge.rows([view.name for view in self.views])
        return Engines(self.views, rows, self.knowledge.loads)

    def decision(self, request: Request | None = None, role: Role = "both") -> Decision:
        return Decision(request, role, self.knowledge, Random(0))

    def scores(self, scorer: Scorer, request: Request | None = None) -> list[float]:
        return listed(scorer.score(self.decision(request), self.engines))


def listed(scores: Floats | Sequence[float]) -> list[float]:
    return [float(score) for score in np.asarray(scores)]


def request_of(*tokens: int, salt: str | None = None, seq_id: str = "s", **headers: str) -> Request:
    renamed = {name.replace("_", "-"): value for name, value in headers.items()}
    return Request(seq_id=seq_id, prompt=tokens, cache_salt=salt, headers=renamed)


def loaded(folder: Path, text: str) -> Scheduling:
    """The scheduling of a file with this text."""
    file = folder / "scheduling.yaml"
    file.write_text(text)
    return load_scheduling(file)
