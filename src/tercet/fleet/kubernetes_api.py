"""The API server of Kubernetes: access to it, the fields of its objects that discovery reads, and watches.

The access is that of the pod's service account, or of a kubeconfig file. All other fields of objects are ignored. A
:class:`Watch` keeps a :class:`Mirror`, a machine without I/O, equal to a collection. The collection is listed once, and
then watched. A watch that ends, fails, is silent, or is refused by an overloaded server (429, 503) continues from the
last version received. If the server cannot do that (410, or another refusal), the collection is listed again. While the
server does not answer, the copy stays as it is, and requests are retried after growing pauses.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import ssl
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

import aiohttp
import msgspec
import yaml

from tercet import logs
from tercet.aio.files import read_named, stamp_of
from tercet.aio.tasks import Failures
from tercet.protocol import BadRequest
from tercet.protocol.names import bracketed
from tercet.protocol.sse import ItemTooLong, LineSplitter
from tercet.protocol.wire import UNREADABLE
from tercet.wire.callers import bearer
from tercet.wire.client.bounded_answers import reason_of

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True)
class ApiAccess:
    """Address and credentials of the API server."""

    url: str
    namespace: str  # the default one
    # Called for every request, since both may change; they raise ``OSError`` for files that cannot be read.
    token: Callable[[], str] = lambda: ""
    tls: Callable[[], ssl.SSLContext | None] = lambda: None


def in_cluster(directory: Path = SERVICE_ACCOUNT, environment: Mapping[str, str] = os.environ) -> ApiAccess:
    """Return the access that Kubernetes gives to a pod; raise :class:`~tercet.protocol.BadRequest` outside of a pod."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    token, ca, namespace = directory / "token", directory / "ca.crt", directory / "namespace"
    if not host or not token.is_file():
        raise BadRequest(
            "kubeconfig: this process has no service account token; in a pod, enable automountServiceAccountToken; "
            "outside of a pod, set kubeconfig to a kubeconfig file",
            "kubeconfig",
        )
    own = namespace.read_text().strip() if namespace.is_file() else "default"
    url, tls = f"https://{bracketed(host)}:{port}", lambda: _trusting(ca, stamp_of(ca))
    return ApiAccess(url, own, lambda: token.read_text().strip(), tls)


@lru_cache(maxsize=1)
def _trusting(ca: Path, _stamp: object) -> ssl.SSLContext:
    """Return a TLS context, which is expensive, for a CA's file; Kubernetes renews it in place, with another stamp."""
    return ssl.create_default_context(cafile=str(ca))


# ---- kubeconfig ------------------------------------------------------------------------------------------------


def from_kubeconfig(file: Path) -> ApiAccess:
    """Return the access of the current context of a kubeconfig file.

    Raises :class:`~tercet.protocol.BadRequest` for a file that cannot be read and for access that is not supported.
    """
    try:
        content = yaml.safe_load(read_named(file).decode("utf-8"))
        context = _called(content, "contexts", "context", content["current-context"])
        cluster = _called(content, "clusters", "cluster", context["cluster"])
        user: dict[str, Any] = (context.get("user") and _called(content, "users", "user", context["user"])) or {}
        url, fixed = str(cluster["server"]), str(user.get("token") or "")
        named = file.parent / str(user["tokenFile"]) if user.get("tokenFile") else None
    except OSError as error:
        raise BadRequest(f"kubeconfig: {file} cannot be read: {error.strerror}", "kubeconfig") from error
    except (yaml.YAMLError, UnicodeError, KeyError, TypeError, AttributeError) as error:
        raise BadRequest(f"kubeconfig: {file} has no current context with a server: {error}", "kubeconfig") from error
    for unknown in ("exec", "auth-provider", "username"):
        if unknown in user:
            raise BadRequest(
                f"kubeconfig: {file}: {unknown} is not supported; use a token or a client certificate, or run "
                "`kubectl proxy` and name its address as the server",
                "kubeconfig",
            )
    context_tls = _tls_of(cluster, user, file) if url.startswith("https://") else None
    namespace = str(context.get("namespace") or "default")

    def token() -> str:
        return fixed if named is None else read_named(named).decode().strip()

    return ApiAccess(url.rstrip("/"), namespace, token, lambda: context_tls)


def _called(content: Any, several: str, one: str, name: str) -> Any:
    return next(each[one] for each in [*content[several], {"name": name}] if each["name"] == name)


def _tls_of(cluster: Mapping[str, Any], user: Mapping[str, Any], file: Path) -> ssl.SSLContext:
    try:
        ca = _content(cluster, "certificate-authority", file)
        context = ssl.create_default_context(cadata=ca.decode() if ca else None)
        if cluster.get("insecure-skip-tls-verify"):
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        certificate, key = (_content(user, what, file) for what in ("client-certificate", "client-key"))
        if certificate and key:
            with tempfile.TemporaryDirectory(prefix="tercet-kube-") as directory:
                pair = Path(directory) / "pair.pem"
                # Before the key is written: no other user may read it in between.
                pair.touch(mode=0o600)
                pair.write_bytes(certificate + b"\n" + key)
                context.load_cert_chain(pair, password="")
    except (OSError, ValueError, ssl.SSLError) as error:
        raise BadRequest(f"kubeconfig: {file}: its certificates cannot be used: {error}", "kubeconfig") from error
    return context


def _content(of: Mapping[str, Any], what: str, file: Path) -> bytes | None:
    """Return the content of an item, from the file that it names or inline in base64; None if it is not set."""
    if data := of.get(f"{what}-data"):
        return base64.b64decode(str(data))
    return read_named(file.parent / str(of[what])) if of.get(what) else None


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """Metadata of any object. ``resource_version`` is opaque: it is sent back and never compared."""

    name: str = ""
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class ApiObject(msgspec.Struct, frozen=True):
    """An object of the API server, of which each kind has further fields."""

    metadata: Metadata


ObjectT = TypeVar("ObjectT", bound=ApiObject)


class Condition(msgspec.Struct, frozen=True):
    """One of a pod's conditions; ``status`` is True, False or Unknown."""

    type: str
    status: str


class PodStatus(msgspec.Struct, frozen=True):
    """The kubelet's status of a pod."""

    phase: str = ""
    conditions: list[Condition] | None = None
    pod_ip: str = msgspec.field(default="", name="podIP")


class Pod(ApiObject, frozen=True):
    """A pod."""

    status: PodStatus = PodStatus()


class TargetPort(msgspec.Struct, frozen=True):
    """A port on which every pod of a pool serves."""

    number: int


class PoolSelector(msgspec.Struct, frozen=True, rename="camel"):
    """The labels that every pod of a pool has."""

    match_labels: dict[str, str] = {}


class PoolSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The selection of a pool's pods."""

    selector: PoolSelector = PoolSelector()
    target_ports: list[TargetPort] = []


class InferencePool(ApiObject, frozen=True):
    """``inference.networking.k8s.io/v1`` InferencePool."""

    spec: PoolSpec = PoolSpec()

    @property
    def pods(self) -> tuple[dict[str, str], list[int]]:
        """Return the labels of its pods, and the ports on which they serve."""
        return self.spec.selector.match_labels, [each.number for each in self.spec.target_ports]


class EarlierPoolSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The selection of a pool's pods before ``v1``."""

    selector: dict[str, str] = {}
    target_port_number: int | None = None


class EarlierInferencePool(ApiObject, frozen=True):
    """``inference.networking.x-k8s.io/v1alpha2`` InferencePool."""

    spec: EarlierPoolSpec = EarlierPoolSpec()

    @property
    def pods(self) -> tuple[dict[str, str], list[int]]:
        """Return the labels of its pods, and the port on which they serve."""
        port = self.spec.target_port_number
        return self.spec.selector, [] if port is None else [port]


class ListMetadata(msgspec.Struct, frozen=True):
    """Metadata of a list: the version from which a watch continues, and the token of the next page."""

    resource_version: str = msgspec.field(default="", name="resourceVersion")
    next_page: str | None = msgspec.field(default=None, name="continue")


class ObjectList(msgspec.Struct, Generic[ObjectT], frozen=True):
    """A page of a list."""

    metadata: ListMetadata
    items: list[ObjectT] | None = None


class Status(msgspec.Struct, frozen=True):
    """Reason of a refusal; ``code`` is the HTTP status."""

    code: int = 0
    reason: str = ""
    message: str = ""


class WatchEvent(msgspec.Struct, frozen=True):
    """One line of a watch; ``type`` decides the kind of ``object``."""

    type: str
    object: msgspec.Raw


GONE = 410
logger = logging.getLogger("tercet.fleet.discovery")
PAGE = 500
# A pod with many annotations has tens of kilobytes.
LONGEST_LINE = 8 * 1024 * 1024
BUSY = 429, 503
HINTS = {
    401: "; check that the token is still valid",
    403: "; its Role must allow get, list and watch",
    404: "; check that the resource definition (CRD) is installed",
}


class WatchBroken(Exception):
    """Raised if a watch cannot continue, so that the collection must be listed again.

    Its input is invalid, or the server reports an error; ``code`` is the server's, or 0.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class Mirror(Generic[ObjectT]):
    """Objects of one ``kind`` by name, as of ``version``, from which a watch continues.

    ``version`` is empty while a list is needed.
    """

    def __init__(self, kind: type[ObjectT]) -> None:
        self.version = ""
        self._decoder = msgspec.json.Decoder(kind)
        self._objects: dict[str, ObjectT] = {}

    @property
    def objects(self) -> Sequence[ObjectT]:
        return [self._objects[name] for name in sorted(self._objects)]

    def listed(self, objects: Iterable[ObjectT], version: str) -> None:
        """Replace all objects by the objects of a list as of ``version``."""
        self._objects = {each.metadata.name: each for each in objects}
        self.version = version

    def void(self) -> None:
        """Mark that a watch cannot continue from here; the objects stay until the next list."""
        self.version = ""

    def heard(self, line: bytes) -> bool:
        """Apply one event of a watch; return True if objects may have changed.

        Raises :class:`WatchBroken` for an invalid line and for an error of the server.
        """
        try:
            event = msgspec.json.decode(line, type=WatchEvent)
            match event.type:
                case "ADDED" | "MODIFIED":
                    found = self._decoder.decode(event.object)
                    self._objects[found.metadata.name] = found
                    self.version = found.metadata.resource_version
                    return True
                case "DELETED":
                    gone = self._decoder.decode(event.object).metadata
                    self.version = gone.resource_version
                    known = self._objects.get(gone.name)
                    # A deletion may arrive after the list that has the replacement.
                    if known is None or known.metadata.uid != gone.uid:  # another object has replaced it
                        return False
                    del self._objects[gone.name]
                    return True
                case "BOOKMARK":
                    self.version = msgspec.json.decode(event.object, type=ApiObject).metadata.resource_version
                    return False
                case "ERROR":
                    status = msgspec.json.decode(event.object, type=Status)
                    raise WatchBroken(status.message or status.reason or "an error without a message", status.code)
                case other:
                    raise WatchBroken(f"the watch sent an event of the unknown type {other!r}")
        except UNREADABLE as error:
            raise WatchBroken(f"the watch sent a line that is not an event: {error}") from error


@dataclass(frozen=True)
class Waits:
    """Timeouts and pauses of a watch, in seconds."""

    list_s: float = 30.0
    watch_s: float = 60.0  # after which the server should end a watch
    grace_s: float = 10.0  # after which then the client ends it
    first_pause_s: float = 0.2  # before a retry; it doubles, and a random part of up to half is subtracted
    longest_pause_s: float = 15.0


WAITS = Waits()


class ApiRefused(Exception):
    """Raised if the server answers with an error. ``retry_after`` is the pause in seconds that the server requests."""

    def __init__(self, message: str, code: int, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after


class Watch(Generic[ObjectT]):
    """A watch on the collection of ``kind`` at ``path`` of the API; ``query`` narrows it.

    ``on_change`` is called with all objects after each list, and after each event that may have changed them.
    """

    def __init__(
        self, api: ApiAccess, path: str, kind: type[ObjectT], query: dict[str, str],
        on_change: Callable[[Sequence[ObjectT]], object], waits: Waits = WAITS,
    ) -> None:  # fmt: skip
        self._api = api
        self._path = path
        self._query = query
        self._page = msgspec.json.Decoder(ObjectList[kind])
        self._mirror = Mirror(kind)
        self._on_change = on_change
        self._waits = waits
        self._pause_s = waits.first_pause_s
        self._random = Random()
        self._lost = False
        self._failures = Failures(f"the watch on {path}")

    async def run(self) -> None:
        async with aiohttp.ClientSession(auto_decompress=True) as session:
            while True:
                if pause := await self._list_or_watch(session):
                    await asyncio.sleep(pause)

    async def _list_or_watch(self, session: aiohttp.ClientSession) -> float:
        """Make one list or one watch; return how many seconds to pause after it."""
        # How it ends, and what that means for the objects that are known:
        #
        #   a list is complete, a watch has ended   they are up to date; go on from their version
        #   the stream is broken, or version gone   changes were missed: list again
        #   the server is busy                      nothing was missed: watch again, later
        #   the server does not answer              the same; the log says once that discovery is lost
        #
        # In all of them the known objects stay in use: a failing API server must not empty a fleet.
        try:
            # No version: nothing was listed yet, or the server cannot continue from the last one.
            if not self._mirror.version:
                await self._list(session)
                return 0.0
            lasted = await self._watch(session)
        except WatchBroken as error:
            logger.debug("listing %s again: %s", self._path, error)
            self._mirror.void()
            return self._next_pause()
        except ApiRefused as error:
            if error.code not in BUSY:  # a list would cost the server more, and nothing was missed
                self._mirror.void()
            if error.code != GONE:
                self._is_lost(f"{error}{HINTS.get(error.code, '')}")
            return max(self._next_pause(), min(error.retry_after, self._waits.longest_pause_s))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._is_lost(reason_of(error))
            return self._next_pause()
        except Exception as error:  # discovery must continue after any error
            self._failures.log(error)
            self._mirror.void()
            return self._next_pause()
        # Without a pause this loop would ask as fast as the server refuses.
        if lasted < self._waits.first_pause_s:  # the server, or a proxy before it, ends every watch at once
            return self._next_pause()
        self._pause_s = self._waits.first_pause_s
        self._failures.works()
        return 0.0

    def _next_pause(self) -> float:
        pause, self._pause_s = self._pause_s, min(2 * self._pause_s, self._waits.longest_pause_s)
        return pause * (1 - self._random.random() / 2)

    def _is_lost(self, reason: str) -> None:
        if not self._lost:
            self._lost = True
            logs.DISCOVERY_LOST.tell(path=self._path, reason=reason)

    # ---- listing ---------------------------------------------------------------------------------------------

    async def _list(self, session: aiohttp.ClientSession) -> None:
        objects, page = list[ObjectT](), None
        async with asyncio.timeout(self._waits.list_s):
            while True:
                # In pages, so that a server need not hold an answer with thousands of pods.
                query = {**self._query, "limit": str(PAGE), **({"continue": page} if page else {})}
                async with self._get(session, query) as response:
                    await self._require_ok(response)
                    try:
                        found = self._page.decode(await response.read())
                    except UNREADABLE as error:
                        why = f"the server at this address is not a Kubernetes API server: {error}"
                        raise ApiRefused(why, 200) from error
                objects += found.items or ()
                page = found.metadata.next_page
                if not page:
                    break
        # A watch without a version starts anywhere, so changes in between would be lost.
        if not found.metadata.resource_version:
            raise WatchBroken("the server sent a list without a resourceVersion")
        self._mirror.listed(objects, found.metadata.resource_version)
        self._on_change(self._mirror.objects)

    # ---- watching --------------------------------------------------------------------------------------------

    async def _watch(self, session: aiohttp.ClientSession) -> float:
        """Follow one watch until it ends or is silent for too long; return how many seconds it lasted."""
        seconds = str(max(1, round(self._waits.watch_s)))
        query = {**self._query, "watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": seconds}
        query["resourceVersion"] = self._mirror.version
        splitter, opened = LineSplitter(LONGEST_LINE), 0.0
        try:
            most = self._waits.watch_s + self._waits.grace_s  # a server that is silent does not end its watch itself
            async with asyncio.timeout(most), self._get(session, query) as response:
                await self._require_ok(response)
                if self._lost:
                    self._lost = False
                    logs.DISCOVERY_BACK.tell(path=self._path, reason="the API server answers")
                opened = time.monotonic()
                async for piece in response.content.iter_any():
                    changed = False
                    try:
                        for line in filter(bytes.strip, splitter.split(piece)):
                            changed |= self._mirror.heard(line)
                            self._pause_s = self._waits.first_pause_s
                    except ItemTooLong as error:
                        raise WatchBroken(str(error)) from error
                    finally:  # also if a later line breaks the watch: what was applied before it counts
                        if changed:
                            self._on_change(self._mirror.objects)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if not opened:
                raise
            logger.debug("the watch on %s continues after an interruption: %s", self._path, reason_of(error))
        return time.monotonic() - opened

    # ---- asking ----------------------------------------------------------------------------------------------

    def _get(
        self, session: aiohttp.ClientSession, query: dict[str, str]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return session.get(
            f"{self._api.url}{self._path}?{urlencode(query)}",
            # Read for each request: the kubelet replaces a service account's token while the pod runs.
            headers={"accept": "application/json", **bearer(self._api.token())},
            ssl=self._api.tls() or True,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
            allow_redirects=False,  # the token is for this server only
        )

    async def _require_ok(self, response: aiohttp.ClientResponse) -> None:
        if response.status == 200:
            return
        try:
            status = msgspec.json.decode(await response.content.read(65536), type=Status)
            message = status.message or status.reason
        except UNREADABLE:
            message = ""
        after = response.headers.get("retry-after", "")
        why = f"HTTP {response.status}{f': {message}' if message else ''}"
        raise ApiRefused(why, response.status, float(after) if after.isdecimal() else 0.0)
