"""The one place where Ray is imported and connected to, and what a head that is away asks of Ray's settings."""

from __future__ import annotations

import importlib
import importlib.util
import ipaddress
import logging
from collections.abc import Mapping
from typing import Any

from tercet.cluster.on_ray.wanted import NAMESPACE
from tercet.protocol import BadRequest, EngineUnreachable

AUTO = "auto"
HEAD_AWAY_SECONDS = 600
ANSWER_SECONDS = 2.0


def head_settings(storage: str) -> Mapping[str, str]:
    """Ray's variables for every node of a cluster whose head may be away for :data:`HEAD_AWAY_SECONDS`.

    ``storage`` is a directory that outlives the head's processes. A node that is lost is noticed within 2 s, one that
    stands still within 6 s.
    """
    return {
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": storage,
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(HEAD_AWAY_SECONDS),
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_timeout_ms": "1000",
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_failure_threshold": "4",
    }


def require_ray() -> None:
    """Raise :class:`~tercet.protocol.BadRequest` without the extra; nothing is imported."""
    if importlib.util.find_spec("ray") is None:
        raise BadRequest("on: Ray is not installed here; pip install 'tercet[ray]'", "on")


def the_ray() -> Any:
    """The module."""
    require_ray()
    import ray

    return ray


def connect(address: str) -> Any:
    """Connect this process, which Ray ends when its head is away for long. Returns the module.

    Raises :class:`~tercet.protocol.EngineUnreachable` if no cluster answers at ``address``.
    """
    ray = the_ray()
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
    host = address.rpartition(":")[0]
    if _is_loopback(host):  # Ray would look for the node at this machine's outward address
        options["_node_ip_address"] = host
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise EngineUnreachable(f"--on: no Ray cluster answers at {address}: {error}", "on") from error
    return ray


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def head_node(ray: Any) -> str:
    """Ray's id of the head's node; empty if the head is not told from others."""
    heads = [node for node in ray.nodes() if node["Alive"] and "node:__internal_head__" in node["Resources"]]
    return heads[0]["NodeID"] if heads else ""


def here(ray: Any) -> tuple[str, str]:
    """The address of this actor's machine, and Ray's id of it."""
    util: Any = importlib.import_module("ray.util")
    return str(util.get_node_ip_address()), str(ray.get_runtime_context().get_node_id())


def named_actors() -> list[str]:
    """Names of Tercet's actors that have not ended for good."""
    util: Any = importlib.import_module("ray.util")
    found: list[dict[str, str]] = util.list_named_actors(all_namespaces=True)
    return [each["name"] for each in found if each["namespace"] == NAMESPACE]


def stored(name: str) -> bytes | None:
    """What Ray's head stores under that name."""
    kv: Any = importlib.import_module("ray.experimental.internal_kv")
    return kv._internal_kv_get(name, namespace=NAMESPACE)


def store(name: str, content: bytes | None) -> None:
    """Have Ray's head store it, or nothing under that name any more."""
    kv: Any = importlib.import_module("ray.experimental.internal_kv")
    if content is None:
        kv._internal_kv_del(name, namespace=NAMESPACE)
    else:
        kv._internal_kv_put(name, content, overwrite=True, namespace=NAMESPACE)


class HeadStore:
    """The key-value store of the head at ``address``, without being one of Ray's processes.

    Ray ends a process that has it, as any that is connected, when the head is away for long.
    """

    def __init__(self, address: str) -> None:
        require_ray()
        services: Any = importlib.import_module("ray._private.services")
        raylet: Any = importlib.import_module("ray._raylet")
        self._client = raylet.GcsClient(address=services.canonicalize_bootstrap_address_or_die(address))
        self._namespace = NAMESPACE.encode()

    def put_new(self, key: str, value: bytes) -> bool:
        """See :class:`~tercet.cluster.on_ray.kept_objects.KeyValues`, as for the others."""
        return self._client.internal_kv_put(key.encode(), value, False, self._namespace, ANSWER_SECONDS) == 1

    def get(self, key: str) -> bytes | None:
        """What is stored."""
        return self._client.internal_kv_get(key.encode(), self._namespace, ANSWER_SECONDS)

    def delete(self, key: str) -> None:
        """Remove it, if it is there."""
        self._client.internal_kv_del(key.encode(), False, self._namespace, ANSWER_SECONDS)

    def keys(self, prefix: str) -> list[str]:
        """Keys that begin so."""
        return [key.decode() for key in self._client.internal_kv_keys(prefix.encode(), self._namespace, ANSWER_SECONDS)]


def draining_nodes(ray: Any) -> set[str]:
    """Ids of nodes that Ray is about to take away."""
    client = ray._private.worker.global_worker.gcs_client
    return {node.hex() if isinstance(node, bytes) else str(node) for node in client.get_draining_nodes()}
