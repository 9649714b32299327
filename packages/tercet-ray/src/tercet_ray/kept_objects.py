"""Objects with conditional changes in Ray's key-value store: a change fails if the object changed since it was read.

The store has one atomic operation: a put that fails if the key exists. Each version of an object therefore has its own
key; the writer that puts version N + 1 first wins. The newest :data:`KEPT` versions are kept. A writer that paused for
longer than that may put a version that existed and was deleted; it detects this by the newer versions, and fails.

Objects, methods and answers are those of Kubernetes' API server that :mod:`tercet.router.state.state_configmap` uses,
so that the same code claims and changes both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import msgspec

KEPT = 16
OK, CREATED, NOT_FOUND, CONFLICT, UNKNOWN = 200, 201, 404, 409, 500
Json = dict[str, Any]


class KeyValues(Protocol):
    """The operations of Ray's key-value store that are needed here."""

    def put_new(self, key: str, value: bytes) -> bool:
        """Store ``value`` unless the key exists; return True if it was stored."""
        ...

    def get(self, key: str) -> bytes | None:
        """Return the stored value, or None."""
        ...

    def delete(self, key: str) -> None:
        """Remove the key if it exists."""
        ...

    def keys(self, prefix: str) -> Sequence[str]:
        """Return the keys that begin with ``prefix``."""
        ...


class KeptObjects:
    """The objects in ``store``. Any number of processes may use one store."""

    def __init__(self, store: KeyValues) -> None:
        self._store = store

    def ask(self, method: str, path: str, body: Json | None) -> tuple[int, Json]:
        """Answer ``GET`` of an object, ``POST`` of a new one to its collection, or ``PATCH`` of one that was read.

        Returns the HTTP status and the object; the status is CONFLICT if another process changed the object.
        """
        if method == "POST":
            made = cast("Json", body)
            return self._write(f"{path}/{made['metadata']['name']}", 0, made, CREATED)
        version, found = self._newest(path)
        if found is None:
            return NOT_FOUND, {}
        if method == "GET":
            return OK, found
        changed = cast("Json", body)
        if changed["metadata"]["resourceVersion"] != str(version):
            return CONFLICT, {}
        return self._write(path, version, {**found, **changed}, OK)

    def _newest(self, path: str) -> tuple[int, Json | None]:
        while versions := self._versions(path):
            content = self._store.get(f"{path}@{versions[-1]}")
            if content is not None:  # None: many newer versions were written in the meantime
                return versions[-1], msgspec.json.decode(content, type=Json)
        return 0, None

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
