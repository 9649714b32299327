"""Ray's processes on this machine, and what becomes of engines there when Ray's head is away. Ray is not imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from tercet.cluster.findings import Finding
from tercet.cluster.on_ray.ray_access import HEAD_AWAY_SECONDS

PROCESSES = Path("/proc")
RECONNECT, STORAGE = "RAY_gcs_rpc_server_reconnect_timeout_s", "RAY_gcs_storage"
# Ray's own values without these variables.
RECONNECT_SECONDS, IN_MEMORY = 60, "memory"
HEAD, NODE = "gcs_server", "raylet"


class RayProcess(msgspec.Struct, frozen=True):
    """A process of Ray's head (``gcs_server``) or node (``raylet``), with those of its variables that matter here.

    ``reconnect_s``: how long it waits for a head that is away; ``storage``: where a head keeps what it knows.
    """

    kind: str
    reconnect_s: int
    storage: str


def ray_processes(root: Path = PROCESSES) -> tuple[RayProcess, ...]:
    """Those that this user may look at."""
    return tuple(_processes(root))


def _processes(root: Path) -> Iterator[RayProcess]:
    for directory in sorted(root.glob("[0-9]*")):
        try:
            kind = (directory / "comm").read_text().strip()
            if kind not in (HEAD, NODE):
                continue
            lines = (directory / "environ").read_text(errors="replace").split("\0")
        except OSError:  # it has ended, or is another user's
            continue
        told = {name: value for name, _, value in (line.partition("=") for line in lines)}
        yield RayProcess(kind, _seconds(told), told.get(STORAGE, IN_MEMORY))


def _seconds(told: Mapping[str, str]) -> int:
    given = told.get(RECONNECT, "")
    return int(given) if given.isdecimal() else RECONNECT_SECONDS


def ray_findings(found: Sequence[RayProcess]) -> Iterator[Finding]:
    """A line for each kind of process; nothing without Ray."""
    waits = [each.reconnect_s for each in found if each.kind == NODE]
    if waits and min(waits) < HEAD_AWAY_SECONDS:
        yield Finding(
            "Ray node", "costs", f"it waits {min(waits)} s for a head that is away",
            "then it ends, and takes its engines along",
            f"before `ray start` on every node: export {RECONNECT}={HEAD_AWAY_SECONDS}",
        )  # fmt: skip
    elif waits:
        yield Finding("Ray node", "ok", f"it waits {min(waits)} s for a head that is away, and its engines serve")
    heads = [each for each in found if each.kind == HEAD]
    if any(each.storage == IN_MEMORY for each in heads):
        yield Finding(
            "Ray head", "costs", "it keeps what it knows in memory",
            "one that comes back knows no node and no engine: all of them end",
            f"before `ray start` on every node: export {STORAGE}=rocksdb {STORAGE}_path=DIRECTORY",
        )  # fmt: skip
    elif heads:
        yield Finding("Ray head", "ok", f"it keeps what it knows in {heads[0].storage}")
