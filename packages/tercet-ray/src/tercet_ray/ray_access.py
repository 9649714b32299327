"""Access to Ray: the only module that imports and connects to it, and the objects that routers keep in its head."""

from __future__ import annotations

import importlib
import importlib.util
import ipaddress
import logging
import sys
from contextlib import suppress
from typing import Any, cast

import msgspec

from tercet.protocol import BadRequest, EngineUnreachable

# Time for which the head of a cluster may be down (seconds); docs/howto/ray.md has the variables of Ray for it.
HEAD_AWAY_SECONDS = 600
NAMESPACE = "tercet"  # of Tercet's actors and keys
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
    with suppress(ValueError):  # `auto`, or a name
        if ipaddress.ip_address(host).is_loopback:  # otherwise Ray looks for the node at the machine's external address
            options["_node_ip_address"] = host
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise EngineUnreachable(f"--on: no Ray cluster answers at {address}: {error}", "on") from error
    return ray


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
    return importlib.import_module("ray.experimental.internal_kv")._internal_kv_get(name, namespace=NAMESPACE)


def store(name: str, content: bytes | None) -> None:
    """Store ``content`` under ``name`` in Ray's head; None deletes the name."""
    kv: Any = importlib.import_module("ray.experimental.internal_kv")
    if content is None:
        kv._internal_kv_del(name, namespace=NAMESPACE)
    else:
        kv._internal_kv_put(name, content, overwrite=True, namespace=NAMESPACE)


def draining_nodes(ray: Any) -> set[str]:
    """Return the ids of the nodes that Ray drains, and will remove."""
    client = ray._private.worker.global_worker.gcs_client
    return {node.hex() if isinstance(node, bytes) else str(node) for node in client.get_draining_nodes()}


class HeadStore:
    """The key-value store of the head at ``address``; Ray ends a process that uses it when that is away for long."""

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
        return self._client.internal_kv_get(key.encode(), self._namespace, ANSWER_SECONDS)

    def delete(self, key: str) -> None:
        self._client.internal_kv_del(key.encode(), False, self._namespace, ANSWER_SECONDS)

    def keys(self, prefix: str) -> list[str]:
        return [key.decode() for key in self._client.internal_kv_keys(prefix.encode(), self._namespace, ANSWER_SECONDS)]


KEPT = 16
OK, CREATED, NOT_FOUND, CONFLICT, UNKNOWN, UNAVAILABLE = 200, 201, 404, 409, 500, 503
Json = dict[str, Any]


class KeptObjects:
    """Objects with conditional changes in ``store``: a change fails if the object changed since it was read.

    The store has one atomic operation: a put that fails if the key exists. Each version of an object therefore has its
    own key; the writer that puts version N + 1 first wins. The newest :data:`KEPT` versions are kept. A writer that
    paused for longer than that may put a version that existed and was deleted; it detects this by the newer versions,
    and fails. Objects, methods and answers are those of Kubernetes' API server that
    :mod:`tercet.router.state.state_store` uses, so that the same code claims and changes both.
    """

    def __init__(self, store: HeadStore) -> None:
        self._store = store

    def ask(self, method: str, path: str, body: Json | None) -> tuple[int, Json]:
        """Answer ``GET`` of an object, ``POST`` of a new one to its collection, or ``PATCH`` of one that was read.

        Returns the HTTP status and the object; the status is CONFLICT if another process changed the object.
        """
        if method == "POST":
            made = cast("Json", body)
            return self._write(f"{path}/{made['metadata']['name']}", 0, made, CREATED)
        version, found = 0, None
        while found is None and (versions := self._versions(path)):
            version = versions[-1]
            content = self._store.get(f"{path}@{version}")
            if content is not None:  # None: many newer versions were written in the meantime
                found = msgspec.json.decode(content, type=Json)
        if found is None:
            return NOT_FOUND, {}
        if method == "GET":
            return OK, found
        changed = cast("Json", body)
        if changed["metadata"]["resourceVersion"] != str(version):
            return CONFLICT, {}
        return self._write(path, version, {**found, **changed}, OK)

    def _versions(self, path: str) -> list[int]:
        return sorted(int(key.rpartition("@")[2]) for key in self._store.keys(f"{path}@"))

    def _write(self, path: str, since: int, content: Json, status: int) -> tuple[int, Json]:
        version = since + 1
        written = {**content, "metadata": {**content["metadata"], "resourceVersion": str(version)}}
        if not since and self._versions(path):
            return CONFLICT, {}
        if not self._store.put_new(f"{path}@{version}", msgspec.json.encode(written)):
            return CONFLICT, {}
        versions = self._versions(path)
        if versions[-1] >= version + KEPT:
            self._store.delete(f"{path}@{version}")
            return UNKNOWN, {"message": "this process paused while others changed the object; try again"}
        for old in versions:
            if old <= version - KEPT:
                self._store.delete(f"{path}@{old}")
        return status, written


def main(address: str) -> None:
    """Answer a router's calls until the end of standard input: it is not a process of Ray, and this one is.

    ``python -m tercet_ray.ray_access ADDRESS`` reads lines of JSON, ``[method, path, body]``, and answers each with a
    line of JSON, ``[status, object]``. Ray ends it when Ray's head does not answer for a long time.
    """
    objects = KeptObjects(HeadStore(address))
    for line in sys.stdin.buffer:
        method, path, body = msgspec.json.decode(line, type=tuple[str, str, dict[str, Any] | None])
        try:
            answer = objects.ask(method, path, body)
        except Exception as error:  # Ray's error: its head does not answer; a later call may succeed
            answer = (UNAVAILABLE, {"message": f"{type(error).__name__}: {error}"})
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1])
