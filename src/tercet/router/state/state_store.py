"""The stores of the state that routers share: a file, or a ConfigMap with a Lease, and the locks among routers.

A store has three operations: read the content, replace it unless it has changed since it was read, and let one process
at a time do a task. Versions, retries and the state itself are above, in :mod:`.fleet_state`. Ray's head is a third
store: `tercet_ray.state_ray` answers the calls that :class:`ConfigMapStore` makes.

A write to a ConfigMap succeeds only if the object's ``resourceVersion`` is still the one that was read; the API server
checks this. A claim on the Lease is decided without a comparison of two machines' clocks. The holder counts from the
time at which it requested its last renewal; others count from the time at which they first saw that renewal, which is
later. So the holder knows that it has lost the lease before another process may take it.
"""

from __future__ import annotations

import fcntl
import http.client
import os
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import urlsplit

import msgspec

from tercet.aio.files import read_whole, stamp_of, write_whole
from tercet.protocol import BadRequest, EngineError
from tercet.protocol.wire import UNREADABLE

if TYPE_CHECKING:
    from tercet.fleet.kubernetes_api import ApiAccess

LOCK_SECONDS = 10.0
RETRY_DELAY_S = 0.01


def name_of_this_process() -> str:
    """Return a name that is unique among all processes of all machines; each call returns another name."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


class Stored(NamedTuple):
    """The content at one moment, None without content, and a ``mark`` that differs for every other content."""

    content: bytes | None
    mark: object


class FileStore:
    """A store in a file that is replaced as a whole; its locks are the kernel's, which end with their process.

    As of each store, every method does I/O, and any process may call it. Errors are
    :class:`~tercet.protocol.TercetError`.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.name = path, str(path)

    def load(self) -> Stored:
        """Return the content, which is also its mark."""
        try:
            content = read_whole(self._path)
        except FileNotFoundError:
            return Stored(None, None)
        except OSError as error:
            raise BadRequest(f"state: {self._path} cannot be read: {error.strerror or error}", "state") from error
        return Stored(content, content)

    def store(self, content: bytes, since: object) -> bool:
        """Replace the content if its mark is still ``since``; return False, without a change, if it is not."""
        # Compare and replace under one lock: two processes that read the same content must not both write.
        with self._locked():
            if self.load().mark != since:
                return False
            try:
                write_whole(self._path, content, lasting=True)
            except OSError as error:
                raise BadRequest(f"state: {self._path} cannot be written: {error.strerror}", "state") from error
            return True

    def stamp(self) -> object:
        """Return a value that differs after a change of the content, maybe with some delay."""
        return stamp_of(self._path)

    def turn(self, what: str) -> FileTurn:
        """Return the lock for the task ``what``."""
        return FileTurn(Path(f"{self._path}.{what}.lock"))

    @contextmanager
    def _locked(self) -> Generator[None]:
        lock, deadline = FileTurn(Path(f"{self._path}.lock")), time.monotonic() + LOCK_SECONDS
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            Path(lock.name).touch(0o600)
        except OSError as error:
            raise BadRequest(f"state: {self._path} cannot be written: {error.strerror}", "state") from error
        try:
            # Never a blocking lock: a holder that was stopped would hold up this thread for ever.
            while not lock.take():
                if time.monotonic() > deadline:
                    raise EngineError(f"another process has held the lock of {self._path} for {LOCK_SECONDS:.0f} s")
                time.sleep(RETRY_DELAY_S)
        except OSError as error:  # of network file systems
            raise EngineError(f"state: {lock.name} cannot be locked: {error.strerror}") from error
        try:
            yield
        finally:
            lock.release()


class FileTurn:
    """A lock by a file. One thread calls its methods, also for callers that have stopped waiting."""

    def __init__(self, path: Path) -> None:
        self._path, self.name = path, str(path)
        self._held: int | None = None

    def take(self) -> bool:
        """Take or keep the lock; return True if this process holds it now, and for some seconds: until it ends.

        Call it again before these seconds are over. Raises ``OSError`` or :class:`~tercet.protocol.TercetError` if the
        holder is not known.
        """
        if self._held is None:
            found = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException as error:
                os.close(found)
                if isinstance(error, BlockingIOError):
                    return False
                raise
            self._held = found
        return True

    def release(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None


# ---- a ConfigMap and its Lease -----------------------------------------------------------------------------------


# Seconds after which others may take a lease that is not renewed; it is renewed several times in that time, so a failed
# call does not lose it.
LEASE_SECONDS = 15
RENEW_SECONDS = 3.0
MARGIN_SECONDS = 2.0
"""Seconds by which a holder stops earlier, since two machines' clocks do not run at exactly the same speed."""


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
        self._ask, self._clock, (kind, self._kind_of_lease) = ask, clock, kinds
        self._namespace, self._called, self.name = namespace, name, f"the {kind} {namespace}/{name}"
        self._objects = f"/api/v1/namespaces/{namespace}/configmaps"
        self._stamp: object = None
        self._looked: float | None = None

    def load(self) -> Stored:
        """Return the content with the object's version as mark."""
        status, found = self._ask("GET", f"{self._objects}/{self._called}", None)
        if status == NOT_FOUND:
            return self._noted(Stored(None, None))
        require(status, found, self.name, "get")
        content = part(found, "data").get(KEY)
        return self._noted(Stored(None if content is None else str(content).encode(), version_of(found)))

    def store(self, content: bytes, since: object) -> bool:
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
        # Asked several times a second by each process: the API server is asked once a second, so a change is seen that
        # much later.
        if self._looked is None or self._clock() >= self._looked + LOOK_SECONDS:
            self.load()
        return self._stamp

    def _noted(self, found: Stored) -> Stored:
        self._looked, self._stamp = self._clock(), found.mark
        return found

    def turn(self, what: str) -> LeaseTurn:
        name, holder = f"{self._called}-{what}", name_of_this_process()
        return LeaseTurn(self._ask, self._namespace, name, holder, self._clock, self._kind_of_lease)


class LeaseTurn:
    """The lock by the Lease ``name`` of a namespace; times are seconds of a clock that only this ``holder`` reads."""

    def __init__(
        self, ask: Ask, namespace: str, name: str, holder: str, clock: Callable[[], float], kind: str = "Lease"
    ) -> None:
        self._ask, self._holder, self._clock = ask, holder, clock
        self._called, self.name = name, f"the {kind} {namespace}/{name}"
        self._objects = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._renewed: float | None = None  # None: another process holds it, or none does
        # Its holder (empty: released) and version as they were read last, None without a lease; and since when.
        self._seen: tuple[str, str] | None = None
        self._seen_at = 0.0

    def holds(self, now: float) -> bool:
        """True if this process holds the lease at the time ``now``."""
        return self._renewed is not None and now < self._renewed + LEASE_SECONDS - MARGIN_SECONDS

    def take(self) -> bool:
        """Take or keep the lock, as :meth:`FileTurn.take`; a short failure of the API server does not lose it."""
        # Asked before each decision: the API server is called only when a renewal is due.
        now = self._clock()
        if self._renewed is not None and now < self._renewed + RENEW_SECONDS:
            return True
        try:
            self._look(now)
        # An error does not end a claim that others have to respect for some seconds more.
        except EngineError:
            if not self.holds(self._clock()):
                self._renewed = None
                raise
        return self.holds(self._clock())

    def _look(self, asked: float) -> None:
        status, found = self._ask("GET", f"{self._objects}/{self._called}", None)
        if status != NOT_FOUND:
            require(status, found, self.name, "get")
        spec, now = part(found, "spec"), self._clock()
        holder = "" if status == NOT_FOUND else str(spec.get("holderIdentity") or "")
        seen = None if status == NOT_FOUND else (holder, version_of(found))
        # The time of the holder's clock in the lease says nothing here. A lease is out of date when this process has
        # seen the same version for as long as it lasts, by its own clock.
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        if holder not in ("", self._holder) and now < self._seen_at + LEASE_SECONDS:
            self._renewed = None
            return
        changes = int(spec.get("leaseTransitions") or 0) + (seen is not None and holder != self._holder)
        self._write(self._holder, None if seen is None else seen[1], asked, changes)

    def _write(self, holder: str, since: object, asked: float, changes: int) -> None:
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: Json = {
            "holderIdentity": holder, "leaseDurationSeconds": LEASE_SECONDS, "renewTime": at,
            "leaseTransitions": changes,
        }  # fmt: skip
        kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        body = {"metadata": {"name": self._called}, "spec": spec}
        written = write(self._ask, self._objects, self._called, kind, body, since)
        if written is None:
            self._renewed = None
            return
        require(*written, self.name, "create and patch")
        # From the beginning of the call: others count from when they see the new version, which is later.
        self._renewed = asked

    def release(self) -> None:
        """Release the Lease if this process holds it, so that the next process need not wait for its timeout."""
        if not self.holds(self._clock()):
            return
        status, found = self._ask("GET", f"{self._objects}/{self._called}", None)
        spec = part(found, "spec")
        if status == OK and spec.get("holderIdentity") == self._holder:
            self._write("", version_of(found), self._clock(), int(spec.get("leaseTransitions") or 0))
        self._renewed = None


def write(ask: Ask, objects: str, name: str, kind: Json, body: Json, since: object) -> tuple[int, Json] | None:
    """Create an object (``since`` None), or change its version ``since``; None if it has changed in the meantime."""
    if since is None:
        answer = ask("POST", objects, {**kind, **body})
    else:
        answer = ask("PATCH", f"{objects}/{name}", {**body, "metadata": {"name": name, "resourceVersion": since}})
    # Kubernetes refuses a version that is not the newest, and one of an object that was removed: both mean read again.
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


StateStore = FileStore | ConfigMapStore


def configmap_store(api: ApiAccess, given: str) -> ConfigMapStore:
    """Return the store in the ConfigMap ``[NAMESPACE/]NAME``."""
    namespace, slash, name = given.rpartition("/")
    return ConfigMapStore(asking(api), namespace if slash else api.namespace, name)
