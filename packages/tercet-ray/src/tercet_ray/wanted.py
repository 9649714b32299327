"""Description of a wanted fleet on Ray, as plain data that the follower sends to the keeper, and it to the owners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tercet.cluster.engine_command import EngineSpec
from tercet.protocol import Role

NAMESPACE = "tercet"


class WantedEngine(msgspec.Struct, frozen=True):
    """One engine; its owner chooses host, port, cores and devices at the start. ``environment`` may hold a secret."""

    spec: EngineSpec
    role: Role
    environment: Mapping[str, str] = {}
    restarts: int = 5
    log_dir: str | None = None


class Resources(msgspec.Struct, frozen=True):
    """Resources that each engine requests from Ray. ``head`` is True if the machine of Ray's head may have engines."""

    cpus: float = 1.0
    gpus: int = 0
    memory_gib: float = 0.0
    head: bool = False


class WantedFleet(msgspec.Struct, frozen=True):
    """A fleet called ``name``; ``address`` is that of Ray's head, ``auto`` for a cluster of this machine.

    The fleet with the higher ``version`` replaces another one; each change of the engines increases the version by 1.
    """

    name: str
    address: str
    engines: tuple[WantedEngine, ...]
    resources: Resources = Resources()
    version: int = 1

    @property
    def keeper(self) -> str:
        """Name of the fleet's keeper among Ray's actors."""
        return f"{self.name}/keeper"

    def owner(self, engine: str) -> str:
        """Return the name of an engine's owner among Ray's actors."""
        return f"{self.name}/{engine}"


class OwnerReport(msgspec.Struct, frozen=True):
    """An owner's report about one start of an engine. ``url`` is empty until the engine has an address.

    ``state`` is ``starting``, ``ready``, or a description of the end. ``log`` is a file on the machine whose Ray id is
    ``node``.
    """

    uid: str
    url: str
    state: str
    node: str
    host: str
    log: str


def actor_options(name: str, resources: Resources, head_node: str) -> dict[str, Any]:
    """Return Ray's options of an engine's owner: restarts without a limit, and not on the head's machine by default."""
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
