"""Ray's processes on this machine, and their settings for a head that does not answer. Ray is not imported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tercet.cluster.machine import Finding
from tercet_ray.ray_access import HEAD_AWAY_SECONDS

PROCESSES = Path("/proc")
RECONNECT, STORAGE = "RAY_gcs_rpc_server_reconnect_timeout_s", "RAY_gcs_storage"
# Ray's defaults for these variables.
RECONNECT_SECONDS, IN_MEMORY = 60, "memory"
HEAD, NODE = "gcs_server", "raylet"


class RayProcess(msgspec.Struct, frozen=True):
    """A process of Ray's head or node, with the two settings that are checked here."""

    kind: str  # ``gcs_server`` or ``raylet``
    reconnect_s: int  # the longest wait, in seconds, for a head that does not answer
    storage: str  # the head's store


def ray_processes(root: Path = PROCESSES) -> tuple[RayProcess, ...]:
    """Return the Ray processes that this user may inspect."""
    found = list[RayProcess]()
    for directory in sorted(root.glob("[0-9]*")):
        try:
            kind = (directory / "comm").read_text().strip()
            if kind not in (HEAD, NODE):
                continue
            lines = (directory / "environ").read_text(errors="replace").split("\0")
        except OSError:  # the process has ended, or belongs to another user
            continue
        environment = {name: value for name, _, value in (line.partition("=") for line in lines)}
        given = environment.get(RECONNECT, "")
        seconds = int(given) if given.isdecimal() else RECONNECT_SECONDS
        found.append(RayProcess(kind, seconds, environment.get(STORAGE, IN_MEMORY)))
    return tuple(found)


def ray_findings(found: Sequence[RayProcess]) -> Iterator[Finding]:
    """Yield a finding for each kind of process; none without Ray."""
    waits = [each.reconnect_s for each in found if each.kind == NODE]
    if waits and min(waits) < HEAD_AWAY_SECONDS:
        yield Finding(
            "Ray node", "costs", f"the node waits {min(waits)} s for a head that does not answer",
            "after that time the node ends, and its engines with it",
            f"before `ray start` on every node: export {RECONNECT}={HEAD_AWAY_SECONDS}",
        )  # fmt: skip
    elif waits:
        yield Finding(
            "Ray node", "ok", f"the node waits {min(waits)} s for a head that does not answer, and its engines serve"
        )
    heads = [each for each in found if each.kind == HEAD]
    if any(each.storage == IN_MEMORY for each in heads):
        yield Finding(
            "Ray head", "costs", "the head keeps its state in memory",
            "a restarted head knows no nodes and no engines: all of them end",
            f"before `ray start` on every node: export {STORAGE}=rocksdb {STORAGE}_path=DIRECTORY",
        )  # fmt: skip
    elif heads:
        yield Finding("Ray head", "ok", f"the head keeps its state in {heads[0].storage}")
