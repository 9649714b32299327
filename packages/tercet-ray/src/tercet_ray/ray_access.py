"""Access to Ray: the only module that imports and connects to it; and the time for which its head may be down."""

from __future__ import annotations

import importlib
import importlib.util
import ipaddress
import logging
from typing import Any

from tercet.protocol import BadRequest, EngineUnreachable
from tercet_ray.wanted import NAMESPACE

AUTO = "auto"
# Time for which the head of a cluster may be down (seconds); docs/howto/ray.md has the variables of Ray for it.
HEAD_AWAY_SECONDS = 600
ANSWER_SECONDS = 2.0


def require_ray() -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if Ray is not installed; Ray is not imported."""
    if importlib.util.find_spec("ray") is None:
        raise BadRequest("on: Ray is not installed; install it with: pip install 'tercet[ray]'", "on")


def the_ray() -> Any:
    """Import and return the module ``ray``."""
    require_ray()
    import ray

    return ray


def connect(address: str) -> Any:
    """Connect this process to Ray, and return the module ``ray``.

    Ray ends a connected process when Ray's head does not answer for a long time. Raises
    :class:`~tercet.protocol.EngineUnreachable` if no cluster answers at ``address``.
    """
    ray = the_ray()
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
    host = address.rpartition(":")[0]
    if _is_loopback(host):  # otherwise Ray looks for the node at this machine's external address
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
    """Return Ray's id of the head's node; empty if no node is marked as the head."""
    heads = [node for node in ray.nodes() if node["Alive"] and "node:__internal_head__" in node["Resources"]]
    return heads[0]["NodeID"] if heads else ""


def here(ray: Any) -> tuple[str, str]:
    """Return the address of this actor's machine, and Ray's id of that node."""
    util: Any = importlib.import_module("ray.util")
    return str(util.get_node_ip_address()), str(ray.get_runtime_context().get_node_id())


def named_actors() -> list[str]:
    """Return the names of Tercet's actors that have not ended for good."""
    util: Any = importlib.import_module("ray.util")
    found: list[dict[str, str]] = util.list_named_actors(all_namespaces=True)
    return [each["name"] for each in found if each["namespace"] == NAMESPACE]


def stored(name: str) -> bytes | None:
    """Return the content that Ray's head stores under ``name``, or None."""
    kv: Any = importlib.import_module("ray.experimental.internal_kv")
    return kv._internal_kv_get(name, namespace=NAMESPACE)


def store(name: str, content: bytes | None) -> None:
    """Store ``content`` under ``name`` in Ray's head; None deletes the name."""
    kv: Any = importlib.import_module("ray.experimental.internal_kv")
    if content is None:
        kv._internal_kv_del(name, namespace=NAMESPACE)
    else:
        kv._internal_kv_put(name, content, overwrite=True, namespace=NAMESPACE)


class HeadStore:
    """The key-value store of the head at ``address``, for a process that is not a process of Ray.

    Ray ends a process that uses it when the head does not answer for a long time.
    """

    def __init__(self, address: str) -> None:
        require_ray()
        services: Any = importlib.import_module("ray._private.services")
        raylet: Any = importlib.import_module("ray._raylet")
        self._client = raylet.GcsClient(address=services.canonicalize_bootstrap_address_or_die(address))
        self._namespace = NAMESPACE.encode()

    def put_new(self, key: str, value: bytes) -> bool:
        """Store ``value`` unless the key exists; return True if it was stored."""
        return self._client.internal_kv_put(key.encode(), value, False, self._namespace, ANSWER_SECONDS) == 1

    def get(self, key: str) -> bytes | None:
        """Return the stored value, or None."""
        return self._client.internal_kv_get(key.encode(), self._namespace, ANSWER_SECONDS)

    def delete(self, key: str) -> None:
        """Remove the key if it exists."""
        self._client.internal_kv_del(key.encode(), False, self._namespace, ANSWER_SECONDS)

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with ``prefix``."""
        return [key.decode() for key in self._client.internal_kv_keys(prefix.encode(), self._namespace, ANSWER_SECONDS)]


def draining_nodes(ray: Any) -> set[str]:
    """Return the ids of the nodes that Ray drains, and will remove."""
    client = ray._private.worker.global_worker.gcs_client
    return {node.hex() if isinstance(node, bytes) else str(node) for node in client.get_draining_nodes()}
