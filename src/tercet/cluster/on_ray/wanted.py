"""What a fleet on Ray shall be, as plain data: what the follower gives to the keeper, and the keeper to the owners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tercet.cluster.engine_command import EngineSpec
from tercet.protocol import Role

NAMESPACE = "tercet"


class WantedEngine(msgspec.Struct, frozen=True):
    """One engine; its host, port, cores and devices are chosen where it starts. ``environment`` may hold a secret."""

    spec: EngineSpec
    role: Role
    environment: Mapping[str, str] = {}
    restarts: int = 5
    log_dir: str | None = None


class Resources(msgspec.Struct, frozen=True):
    """What each engine asks Ray for. ``head``: whether the machine of Ray's head may have engines."""

    cpus: float = 1.0
    gpus: int = 0
    memory_gib: float = 0.0
    head: bool = False


class WantedFleet(msgspec.Struct, frozen=True):
    """A fleet called ``name``; ``address`` is that of Ray's head, ``auto`` for a cluster of this machine.

    Of two that differ, the one of the higher ``version`` holds: each change of the engines has the next one.
    """

    name: str
    address: str
    engines: tuple[WantedEngine, ...]
    resources: Resources = Resources()
    version: int = 1

    @property
    def keeper(self) -> str:
        """The name of its keeper among Ray's actors."""
        return f"{self.name}/keeper"

    def owner(self, engine: str) -> str:
        """The name of an engine's owner among Ray's actors."""
        return f"{self.name}/{engine}"


class OwnerReport(msgspec.Struct, frozen=True):
    """One start of an engine, as its owner tells it. ``url`` is empty before it has an address.

    ``state`` is ``starting``, ``ready``, or how it ended; ``log`` is a file on the machine of ``node``, Ray's id of it.
    """

    uid: str
    url: str
    state: str
    node: str
    host: str
    log: str


def actor_options(name: str, resources: Resources, head_node: str) -> dict[str, Any]:
    """Ray's options of the actor that owns an engine: restarted elsewhere for ever, and not on the head's machine."""
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "max_concurrency": 4,
        "num_cpus": resources.cpus,
        "scheduling_strategy": "SPREAD",
    }
    if resources.gpus:
        options["num_gpus"] = resources.gpus
    if resources.memory_gib:
        options["memory"] = int(resources.memory_gib * 1024**3)
    if head_node and not resources.head:
        options["label_selector"] = {"ray.io/node-id": f"!{head_node}"}
    return options
