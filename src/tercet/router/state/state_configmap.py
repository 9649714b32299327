"""The state of routers on several machines in a ConfigMap of Kubernetes, with a Lease as lock.

A write succeeds only if the object's ``resourceVersion`` is still the one that was read; the API server checks this.

A claim on the Lease is decided without a comparison of two machines' clocks. The holder counts from the time at which
it requested its last renewal; others count from the time at which they first saw that renewal, which is later. So the
holder knows that it has lost the lease before another process may take it.
"""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import msgspec

from tercet.fleet.kubernetes_api import ApiAccess
from tercet.protocol import BadRequest, EngineError
from tercet.protocol.wire import UNREADABLE
from tercet.router.state.state_store import SharedTurn, Stored, name_of_this_process

LEASE_SECONDS = 15
RENEW_SECONDS = 3.0
MARGIN_SECONDS = 2.0
"""Seconds by which a holder stops earlier, since two machines' clocks do not run at exactly the same speed."""


class LeaseRecord(NamedTuple):
    """A lease that was read: its holder, empty if it was released, and the version of the object."""

    holder: str
    version: str


class LeaseClaim:
    """The claim of ``holder`` on one lease. Times are seconds of a clock that only this process reads."""

    def __init__(self, holder: str) -> None:
        self.holder = holder
        self._renewed: float | None = None
        self._seen: LeaseRecord | None = None
        self._seen_at = 0.0

    def holds(self, now: float) -> bool:
        """True if this process holds the lease at the time ``now``."""
        return self._renewed is not None and now < self._renewed + LEASE_SECONDS - MARGIN_SECONDS

    def needs_renewal(self, now: float) -> bool:
        """True if it is time to renew the lease."""
        return self._renewed is None or now >= self._renewed + RENEW_SECONDS

    def may_write(self, found: LeaseRecord | None, now: float) -> bool:
        """True if this process may take or renew the lease ``found``, which is None if it does not exist."""
        if found != self._seen:
            self._seen, self._seen_at = found, now
        if found is None or found.holder in ("", self.holder):
            return True
        return now >= self._seen_at + LEASE_SECONDS

    def written(self, asked: float) -> None:
        """Record that this process took or renewed the lease by a call that began at ``asked``."""
        self._renewed = asked

    def lost(self) -> None:
        """Record that another process holds the lease, or that it was released."""
        self._renewed = None


KEY = "state.json"
MOST_BYTES = 900 * 1024
"""Largest size of a state in bytes: Kubernetes refuses objects of more than 1 MiB."""
ANSWER_SECONDS = 2.0
LOOK_SECONDS = 1.0
"""Seconds between two polls for changes of other processes."""
OK, CREATED, NOT_FOUND, FORBIDDEN, CONFLICT = 200, 201, 404, 403, 409
Json = dict[str, Any]
Ask = Callable[[str, str, Json | None], tuple[int, Json]]


def asking(api: ApiAccess) -> Ask:
    """Return a function for blocking calls of the API server.

    It raises :class:`~tercet.protocol.EngineError` if the server does not answer.
    """

    def ask(method: str, path: str, body: Json | None) -> tuple[int, Json]:
        headers = {"accept": "application/json"}
        if body is not None:
            headers["content-type"] = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            if token := api.token():
                headers["authorization"] = f"Bearer {token}"
            return _call(api.url, api.tls(), method, path, None if body is None else msgspec.json.encode(body), headers)
        except (OSError, http.client.HTTPException, *UNREADABLE) as error:
            raise EngineError(f"state: the API server at {api.url} does not answer: {error}") from error
        except ValueError as error:  # a token that is not text of one line, or a port that is not one
            raise BadRequest(f"kubeconfig: {api.url} cannot be called: {error}", "kubeconfig") from error

    return ask


def _call(
    url: str, tls: ssl.SSLContext | None, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
) -> tuple[int, Json]:
    at = urlsplit(url)
    host, port = at.hostname or "", at.port
    if at.scheme == "https":
        connection = http.client.HTTPSConnection(host, port, timeout=ANSWER_SECONDS, context=tls)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
    try:
        connection.request(method, at.path.rstrip("/") + path, body, dict(headers))
        answer = connection.getresponse()
        return answer.status, msgspec.json.decode(answer.read(), type=Json)
    finally:
        connection.close()


class ConfigMapStore:
    """The ConfigMap ``name`` of a namespace, which the first change creates. ``clock`` is monotonic, in seconds.

    ``kinds`` are the names of its kind and the Lease's kind in messages; :mod:`.state_ray` has other kinds.
    """

    def __init__(
        self,
        ask: Ask,
        namespace: str,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        kinds: tuple[str, str] = ("ConfigMap", "Lease"),
    ) -> None:
        self._ask, self._clock, self._kinds = ask, clock, kinds
        self._namespace, self._called = namespace, name
        self._objects = f"/api/v1/namespaces/{namespace}/configmaps"
        self._stamp: object = None
        self._looked: float | None = None

    @property
    def name(self) -> str:
        """Name of the ConfigMap in messages."""
        return f"the {self._kinds[0]} {self._namespace}/{self._called}"

    def load(self) -> Stored:
        """Return the content with the object's version as mark."""
        status, found = self._ask("GET", f"{self._objects}/{self._called}", None)
        if status == NOT_FOUND:
            return self._noted(Stored(None, None))
        require(status, found, self.name, "get")
        content = part(found, "data").get(KEY)
        return self._noted(Stored(None if content is None else str(content).encode(), version_of(found)))

    def store(self, content: bytes, since: object) -> bool:
        """Replace the content; see :meth:`~tercet.router.state.state_store.StateStore.store`."""
        if len(content) > MOST_BYTES:
            raise BadRequest(
                f"state: has {len(content)} bytes, and {self.name} may have {MOST_BYTES}; remove engines, or use "
                "a file (--state)", "state"
            )  # fmt: skip
        body: Json = {"metadata": {"name": self._called}, "data": {KEY: content.decode()}}
        written = write(self._ask, self._objects, self._called, {"apiVersion": "v1", "kind": "ConfigMap"}, body, since)
        if written is None:
            return False
        require(*written, self.name, "create and patch")
        self._looked = None
        return True

    def stamp(self) -> object:
        """Return the object's version, which may be up to one second old."""
        if self._looked is None or self._clock() >= self._looked + LOOK_SECONDS:
            self.load()
        return self._stamp

    def _noted(self, found: Stored) -> Stored:
        self._looked, self._stamp = self._clock(), found.mark
        return found

    def turn(self, what: str) -> SharedTurn:
        """Return a lock: a Lease in the ConfigMap's namespace."""
        claim = LeaseClaim(name_of_this_process())
        return LeaseTurn(self._ask, self._namespace, f"{self._called}-{what}", claim, self._clock, self._kinds[1])


class LeaseTurn:
    """The lock by the Lease ``name`` of a namespace."""

    def __init__(
        self, ask: Ask, namespace: str, name: str, claim: LeaseClaim, clock: Callable[[], float], kind: str = "Lease"
    ) -> None:
        self._ask, self._claim, self._clock, self._kind = ask, claim, clock, kind
        self._namespace, self._called = namespace, name
        self._objects = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._changes = 0

    @property
    def name(self) -> str:
        """Name of the Lease in messages."""
        return f"the {self._kind} {self._namespace}/{self._called}"

    def take(self) -> bool:
        """Take or keep the lock, see :meth:`.SharedTurn.take`; a short failure of the API server does not lose it."""
        now = self._clock()
        if self._claim.holds(now) and not self._claim.needs_renewal(now):
            return True
        try:
            self._look(now)
        except EngineError:
            if not self._claim.holds(self._clock()):
                self._claim.lost()
                raise
        return self._claim.holds(self._clock())

    def _look(self, now: float) -> None:
        status, found = self._ask("GET", f"{self._objects}/{self._called}", None)
        if status != NOT_FOUND:
            require(status, found, self.name, "get")
        spec = part(found, "spec")
        seen = None if status == NOT_FOUND else LeaseRecord(str(spec.get("holderIdentity") or ""), version_of(found))
        if not self._claim.may_write(seen, self._clock()):
            self._claim.lost()
            return
        self._changes = int(spec.get("leaseTransitions") or 0) + (
            seen is not None and seen.holder != self._claim.holder
        )
        self._write(self._claim.holder, None if seen is None else seen.version, now)

    def _write(self, holder: str, since: object, asked: float) -> None:
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: Json = {
            "holderIdentity": holder, "leaseDurationSeconds": LEASE_SECONDS, "renewTime": at,
            "leaseTransitions": self._changes,
        }  # fmt: skip
        kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        body = {"metadata": {"name": self._called}, "spec": spec}
        written = write(self._ask, self._objects, self._called, kind, body, since)
        if written is None:
            self._claim.lost()
            return
        require(*written, self.name, "create and patch")
        self._claim.written(asked)

    def release(self) -> None:
        """Release the Lease if this process holds it, so that the next process need not wait for its timeout."""
        if not self._claim.holds(self._clock()):
            return
        status, found = self._ask("GET", f"{self._objects}/{self._called}", None)
        if status == OK and part(found, "spec").get("holderIdentity") == self._claim.holder:
            self._write("", version_of(found), self._clock())
        self._claim.lost()


def write(ask: Ask, objects: str, name: str, kind: Json, body: Json, since: object) -> tuple[int, Json] | None:
    """Create an object (``since`` None), or change its version ``since``; None if it has changed in the meantime."""
    if since is None:
        answer = ask("POST", objects, {**kind, **body})
    else:
        answer = ask("PATCH", f"{objects}/{name}", {**body, "metadata": {"name": name, "resourceVersion": since}})
    return None if answer[0] in (CONFLICT, NOT_FOUND) else answer


def version_of(found: Json) -> str:
    """Return the version of an object, which differs after each change."""
    return str(part(found, "metadata").get("resourceVersion", ""))


def part(found: Json, name: str) -> Json:
    """Return a part of an object; empty if the object does not have it."""
    return cast("Json", found.get(name) or {})


def require(status: int, found: Json, name: str, verbs: str) -> None:
    """Raise :class:`~tercet.protocol.EngineError` for an answer with an error status."""
    if status not in (OK, CREATED):
        hint = f"; its Role must allow {verbs}" if status == FORBIDDEN else ""
        raise EngineError(f"state: {name} cannot be used: HTTP {status}{hint}: {str(found.get('message', ''))[:300]}")


def configmap_store(api: ApiAccess, given: str) -> ConfigMapStore:
    """Return the store in the ConfigMap ``[NAMESPACE/]NAME``."""
    namespace, slash, name = given.rpartition("/")
    return ConfigMapStore(asking(api), namespace if slash else api.namespace, name)
