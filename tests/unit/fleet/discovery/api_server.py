"""A stand-in for Kubernetes' API server that lists and watches over real HTTP, and misbehaves when it is told to.

It has one version for all that it holds, as etcd has. What was compacted away cannot be watched from any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tercet.fleet.kubernetes_api import ApiAccess, Waits
from tests.servers import served

NAMESPACE = "models"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
POOLS = f"/apis/inference.networking.k8s.io/v1/namespaces/{NAMESPACE}/inferencepools"
EARLIER_POOLS = f"/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{NAMESPACE}/inferencepools"
OBJECTIVES = f"/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{NAMESPACE}/inferenceobjectives"
FAST = Waits(list_s=2.0, watch_s=1.0, grace_s=0.2, first_pause_s=0.005, longest_pause_s=0.05)
PATHS = PODS, POOLS, EARLIER_POOLS, OBJECTIVES
Object = dict[str, Any]


def pod(
    name: str, ip: str = "10.0.0.1", *, uid: str = "", ready: bool = True, deleting: bool = False,
    labels: dict[str, str] | None = None, annotations: dict[str, str] | None = None, phase: str = "Running",
) -> Object:  # fmt: skip
    metadata: Object = {"name": name, "uid": uid or f"uid-{name}", "labels": {"app": "engine", **(labels or {})}}
    if annotations:
        metadata["annotations"] = annotations
    if deleting:
        metadata["deletionTimestamp"] = "2026-11-23T15:00:00Z"
    status: Object = {"phase": phase, "conditions": [{"type": "Ready", "status": "True" if ready else "False"}]}
    if ip:
        status["podIP"] = ip
    return {"metadata": metadata, "spec": {"nodeName": "n"}, "status": status}


def pool(name: str, match: dict[str, str], *ports: int) -> Object:
    spec = {"selector": {"matchLabels": match}, "targetPorts": [{"number": port} for port in ports]}
    return {"metadata": {"name": name, "uid": f"uid-{name}"}, "spec": spec}


def earlier_pool(name: str, match: dict[str, str], port: int) -> Object:
    """As ``v1alpha2`` has it."""
    spec = {"selector": match, "targetPortNumber": port, "extensionRef": {"name": "epp"}}
    return {"metadata": {"name": name, "uid": f"uid-{name}"}, "spec": spec}


def objective(
    name: str, priority: int | None = None, pool: str = "pool", deleting: bool = False, **named: str
) -> Object:
    """``named`` is what else its reference to the pool says."""
    spec: Object = {"poolRef": {"name": pool, **named}, **({} if priority is None else {"priority": priority})}
    metadata: Object = {"name": name, "uid": f"uid-{name}"}
    if deleting:
        metadata["deletionTimestamp"] = "2026-11-23T15:00:00Z"
    return {"metadata": metadata, "spec": spec}


@dataclass
class Collection:
    objects: dict[str, Object] = field(default_factory=dict[str, Object])
    log: list[tuple[int, Object]] = field(default_factory=list[tuple[int, Object]])


@dataclass
class ApiServer:
    """``silent``: watches say nothing. ``refuse``: the answer to everything, as (status, headers)."""

    version: int = 100
    compacted: int = 0
    silent: bool = False
    refuse: tuple[int, dict[str, str]] | None = None
    refuse_watches: int | None = None
    page: int | None = None
    replay: int = 0
    lists: int = 0
    watches: int = 0
    tokens: list[str] = field(default_factory=list[str])
    queries: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    url: str = ""
    _collections: dict[str, Collection] = field(default_factory=lambda: {each: Collection() for each in PATHS})
    _open: set[web.StreamResponse] = field(default_factory=set[web.StreamResponse])
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def api(self) -> ApiAccess:
        return ApiAccess(self.url, NAMESPACE)

    @property
    def pods(self) -> dict[str, Object]:
        return self._collections[PODS].objects

    # ---- what happens in the cluster -------------------------------------------------------------------------

    def put(self, given: Object, where: str = PODS) -> None:
        of, name = self._collections[where], given["metadata"]["name"]
        kind = "MODIFIED" if name in of.objects else "ADDED"
        self.version += 1
        found = json.loads(json.dumps(given))
        found["metadata"]["resourceVersion"] = str(self.version)
        of.objects[name] = found
        self._log(of, kind, found)

    def delete(self, name: str, where: str = PODS) -> None:
        of = self._collections[where]
        found = of.objects.pop(name, None)
        if found is None:
            return
        self.version += 1
        last = json.loads(json.dumps(found))
        last["metadata"]["resourceVersion"] = str(self.version)
        self._log(of, "DELETED", last)

    def bookmark(self) -> None:
        """A version that no pod has."""
        self.version += 1
        self._tell_all({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self.version)}}})

    def elsewhere(self) -> None:
        """Something changes that nobody here watches."""
        self.version += 1

    def compact(self) -> None:
        """Nobody can go on from before now."""
        self.compacted = self.version
        for each in self._collections.values():
            each.log.clear()

    def _log(self, of: Collection, kind: str, found: Object) -> None:
        of.log.append((self.version, {"type": kind, "object": found}))
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # ---- what happens on the way -----------------------------------------------------------------------------

    def drop(self, begun: bytes = b"") -> None:
        """Break every watch off, after the beginning of a line if one is given."""
        for response in list(self._open):
            transport = response._req.transport if response._req is not None else None
            if transport is not None:
                if begun:
                    transport.write(f"{len(begun) + 50:x}\r\n".encode() + begun)
                transport.close()
        self._open.clear()

    def say(self, line: bytes) -> None:
        """Send a line to every watch."""
        for response in list(self._open):
            transport = response._req.transport if response._req is not None else None
            if transport is not None:
                transport.write(f"{len(line) + 1:x}\r\n".encode() + line + b"\n\r\n")

    def _tell_all(self, event: Object) -> None:
        self.say(json.dumps(event).encode())

    # ---- answering -------------------------------------------------------------------------------------------

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers.get("authorization", ""))
        self.queries.append(dict(request.query))
        if self.refuse is not None:
            status, headers = self.refuse
            return web.json_response(
                {"kind": "Status", "code": status, "message": "no"}, status=status, headers=headers
            )
        of = self._collections[request.path]
        if request.query.get("watch") == "1":
            return await self._watch(request, of)
        return self._list(request, of)

    def _chosen(self, request: web.Request, found: Object) -> bool:
        labels, name = found["metadata"].get("labels", {}), found["metadata"]["name"]
        wanted = [each.split("=") for each in request.query.get("labelSelector", "").split(",") if each]
        named = request.query.get("fieldSelector", "").removeprefix("metadata.name=")
        return all(labels.get(key) == value for key, value in wanted) and named in ("", name)

    def _list(self, request: web.Request, of: Collection) -> web.StreamResponse:
        self.lists += 1
        begin = int(request.query.get("continue", "0"))
        items = [each for each in of.objects.values() if self._chosen(request, each)]
        metadata: Object = {"resourceVersion": str(self.version)}
        if self.page is not None and begin + self.page < len(items):
            metadata["continue"] = str(begin + self.page)
        end = None if self.page is None else begin + self.page
        return web.json_response({"metadata": metadata, "items": items[begin:end]})

    async def _watch(self, request: web.Request, of: Collection) -> web.StreamResponse:
        self.watches += 1
        if self.refuse_watches is not None:
            return web.json_response({"code": self.refuse_watches, "message": "no"}, status=self.refuse_watches)
        since = int(request.query["resourceVersion"])
        if since < self.compacted:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            if self.watches % 2:  # servers say it either way
                return web.json_response(gone, status=410)
            return web.Response(text=json.dumps({"type": "ERROR", "object": gone}) + "\n")
        response = web.StreamResponse()
        await response.prepare(request)
        self._open.add(response)
        since -= self.replay
        silent = self.silent
        deadline = asyncio.get_running_loop().time() + float(request.query["timeoutSeconds"])
        with contextlib.suppress(ConnectionError, TimeoutError):
            while True:
                news = self._news
                for version, event in [] if silent else [*of.log]:
                    if version > since:
                        since = version
                        if self._chosen(request, event["object"]):
                            await response.write(json.dumps(event).encode() + b"\n")
                async with asyncio.timeout_at(deadline + (1000 if silent else 0)):
                    await news.wait()
        self._open.discard(response)
        return response


@asynccontextmanager
async def api_server(tls: ssl.SSLContext | None = None) -> AsyncGenerator[ApiServer]:
    made = ApiServer()
    app = web.Application()
    app.add_routes([web.get(path, made._answer) for path in PATHS])
    async with served(app, tls=tls) as made.url:
        try:
            yield made
        finally:
            made.drop()
