"""A Ray in memory: named actors that answer, do not, are unavailable or dead, as a test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class ActorDiedError(Exception):
    """Ray's: gone for good."""


class ActorUnavailableError(ActorDiedError):
    """Ray's: being started again."""


@dataclass
class FakeActor:
    """One actor; each method in `answers` is called at once, unless it is `silent` or has a `failure`."""

    name: str
    options: dict[str, Any]
    answers: dict[str, Callable[[], Any]] = field(default_factory=dict[str, Callable[[], Any]])
    failure: Exception | None = None
    silent: bool = False
    called: list[str] = field(default_factory=list[str])

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda: FakeRef(self, method))


class FakeRef:
    def __init__(self, actor: FakeActor, method: str) -> None:
        actor.called.append(method)
        self._actor, self._method = actor, method

    @property
    def is_ready(self) -> bool:
        return not self._actor.silent

    def value(self) -> Any:
        if self._actor.failure is not None:
            raise self._actor.failure
        return self._actor.answers.get(self._method, lambda: None)()


class FakeRay:
    """The module. `made` is told of each actor that is made; names are taken until they are killed."""

    exceptions = SimpleNamespace(RayActorError=ActorDiedError, ActorUnavailableError=ActorUnavailableError)

    def __init__(self, made: Callable[[FakeActor], object]) -> None:
        self.actors: dict[str, FakeActor] = {}
        self.killed: list[str] = []
        self._made = made

    def remote(self, _kind: type) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda *_: self._get_or_make(options)))

    def _get_or_make(self, options: dict[str, Any]) -> FakeActor:
        name = options["name"]
        if name not in self.actors:
            self.actors[name] = FakeActor(name, options)
            self._made(self.actors[name])
        return self.actors[name]

    def get_actor(self, name: str, namespace: str) -> FakeActor:
        assert namespace == "tercet"
        return self.actors[name]

    def wait(self, refs: Sequence[FakeRef], **_: object) -> tuple[list[FakeRef], list[FakeRef]]:
        return [each for each in refs if each.is_ready], [each for each in refs if not each.is_ready]

    def get(self, ref: FakeRef) -> Any:
        return ref.value()

    def kill(self, actor: FakeActor, no_restart: bool) -> None:
        assert no_restart
        self.killed.append(actor.name)
        self.actors.pop(actor.name, None)
