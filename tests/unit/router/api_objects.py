"""A stand-in for Kubernetes' API server: it keeps objects, and changes one only if it is as its caller read it."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

from tercet.fleet.kubernetes_api import ApiAccess
from tercet.protocol import EngineError

NAMESPACE = "models"
Json = dict[str, Any]


@dataclass
class ApiObjects:
    """Objects by path. ``calls`` are the methods and paths so far; ``refuse`` answers everything with that status."""

    objects: dict[str, Json] = field(default_factory=dict[str, Json])
    calls: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    tokens: set[str] = field(default_factory=set[str])
    refuse: int = 0
    away: bool = False
    _version: int = 0
    _lock: Lock = field(default_factory=Lock)

    def ask(self, method: str, path: str, body: Json | None) -> tuple[int, Json]:
        """Answer a call as the server does; one that is away is an error."""
        if self.away:
            raise EngineError("the API server does not answer")
        with self._lock:
            self.calls.append((method, path))
            if self.refuse:
                return self.refuse, {"kind": "Status", "message": "no"}
            return self._answer(method, path, json.loads(json.dumps(body)))

    def _answer(self, method: str, path: str, body: Json | None) -> tuple[int, Json]:
        if method == "POST":
            assert body is not None
            assert body["kind"]
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                return 409, {"reason": "AlreadyExists"}
            return 201, self._put(path, body)
        found = self.objects.get(path)
        if found is None:
            return 404, {"reason": "NotFound"}
        if method == "GET":
            return 200, found
        assert method == "PATCH"
        assert body is not None
        if body["metadata"].get("resourceVersion") not in (None, found["metadata"]["resourceVersion"]):
            return 409, {"reason": "Conflict"}
        return 200, self._put(path, merged(found, body))

    def _put(self, path: str, found: Json) -> Json:
        self._version += 1
        self.objects[path] = merged(found, {"metadata": {"resourceVersion": str(self._version)}})
        return self.objects[path]


def merged(found: Json, patch: Json) -> Json:
    """As a merge patch does."""
    changed = dict(found)
    for key, value in patch.items():
        if value is None:
            changed.pop(key, None)
        else:
            changed[key] = merged(changed.get(key) or {}, value) if isinstance(value, dict) else value
    return changed


@contextmanager
def served_objects(given: ApiObjects) -> Generator[ApiAccess]:
    """The same over HTTP."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            given.tokens.add(self.headers.get("authorization", ""))
            length = int(self.headers.get("content-length", "0"))
            if self.command == "PATCH":
                assert self.headers["content-type"] == "application/merge-patch+json"
            body = json.loads(self.rfile.read(length)) if length else None
            status, found = given.ask(self.command, self.path, body)
            content = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PATCH = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield ApiAccess(f"http://127.0.0.1:{server.server_port}", NAMESPACE, lambda: "token")
        finally:
            server.shutdown()
