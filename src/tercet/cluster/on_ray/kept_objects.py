"""Objects that are changed only if they are as they were read, in Ray's key-value store, which has no such change.

What that store has is a put that fails if the key is there. So each version of an object has its own key, and who
puts version N + 1 first has changed version N. The newest :data:`KEPT` versions stay. A writer that was stopped for
longer than these last, and puts a version that was there and is gone, is told by how old it is.

Objects, methods and answers are those of Kubernetes' API server, as far as :mod:`tercet.router.state_configmap` uses
them, so that one code claims and changes both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import msgspec

KEPT = 16
OK, CREATED, NOT_FOUND, CONFLICT, UNKNOWN = 200, 201, 404, 409, 500
Json = dict[str, Any]


class KeyValues(Protocol):
    """The part of Ray's key-value store that is needed."""

    def put_new(self, key: str, value: bytes) -> bool:
        """Store it unless the key is there; whether it was stored."""
        ...

    def get(self, key: str) -> bytes | None:
        """What is stored."""
        ...

    def delete(self, key: str) -> None:
        """Remove it, if it is there."""
        ...

    def keys(self, prefix: str) -> Sequence[str]:
        """Keys that begin so."""
        ...


class KeptObjects:
    """The objects that ``store`` has. Any number of processes may use one store."""

    def __init__(self, store: KeyValues) -> None:
        self._store = store

    def ask(self, method: str, path: str, body: Json | None) -> tuple[int, Json]:
        """Answer ``GET`` of an object, ``POST`` of a new one to its collection, or ``PATCH`` of one that was read."""
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
            if content is not None:  # else it has been changed very often since
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
            return UNKNOWN, {"message": "this process stood still while others changed it; ask again"}
        for old in versions:
            if old <= version - KEPT:
                self._store.delete(f"{path}@{old}")
        return status, written
