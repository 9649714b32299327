"""Discovery of engines, which the members of a fleet follow as they come and go.

Engines are listed in a roster, a JSON list that Ray's follower, a Slurm job or an operator writes and replaces, or they
are in pods, selected by labels or by an InferencePool, whose objectives have priorities. While the source is missing or
invalid, the engines stay as they are.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from tercet import logs
from tercet.aio.files import FileThread, read_whole, stamp_of
from tercet.aio.tasks import TaskSet
from tercet.fleet.kubernetes_api import (
    WAITS,
    ApiAccess,
    EarlierInferencePool,
    InferencePool,
    Pod,
    Waits,
    Watch,
    from_kubeconfig,
    in_cluster,
)
from tercet.fleet.members import JOINED, MemberState, member_changes
from tercet.fleet.membership import Membership
from tercet.protocol import BadRequest, EngineUnreachable, MemberRole
from tercet.protocol.names import bracketed, require_uid
from tercet.settings import DiscoverySettings, EngineAddress
from tercet.settings.engine_addresses import EARLIER_POOL_GROUP, POOL_GROUP

KNOWN_SECONDS = 60.0


class FoundEngine(msgspec.Struct, frozen=True):
    """An engine that was found."""

    address: EngineAddress
    uid: str  # that of its pod or of its start: a later engine may have the same name
    serves: bool  # it is ready and not about to end
    withheld: str = ""  # why it gets no new requests, or empty


class Discovery(Protocol):
    """A source of engines, for one reader at a time."""

    @property
    def source(self) -> str: ...

    def changes(self) -> AsyncGenerator[Sequence[FoundEngine]]:
        """Yield the engines once they are known, and again at each change. The caller closes the generator."""
        ...


def with_found(
    members: Sequence[MemberState], found: Sequence[FoundEngine], reported: Mapping[str, MemberRole] | None = None
) -> tuple[MemberState, ...]:
    """Return the members for the engines ``found``; members that were named in settings or joined themselves stay.

    An engine joins when it is ready. When it is no longer ready, or is about to end, it stays a member until discovery
    does not find it any more: it gets no new requests, and its sequences can be followed and moved. ``reported`` are
    the roles with which the engines were found before: a role that was changed since is kept until discovery reports
    another role.
    """
    # Discovery decides only about engines that it found: others stay whatever it finds.
    named = [each for each in members if not each.uid or each.joined]
    names = {each.address.name for each in named}
    urls = {each.address.url.rstrip("/") for each in named}
    known = {each.address.name: each for each in members if each.uid and not each.joined}
    joined: dict[str, MemberState] = {}
    for engine in sorted(found, key=lambda each: (not each.serves, each.address.name)):
        address = engine.address
        if address.name in names or address.url in urls:
            continue
        before = known.get(address.name)
        # A pod or entry with the same name and another uid is a new start: its role and drain begin again.
        if before is not None and before.uid != engine.uid:
            before = None
        # Until it is ready it would only fail requests; members that are no longer ready stay for their sequences.
        if before is None and not engine.serves:
            continue
        if before is None:
            joined[address.name] = MemberState(address, uid=engine.uid, withheld=engine.withheld)
        else:
            if reported is not None and reported.get(address.name) == address.role:
                address = msgspec.structs.replace(address, role=before.address.role)
            joined[address.name] = msgspec.structs.replace(before, address=address, withheld=engine.withheld)
        urls.add(address.url)
    # Existing members keep their places, so that an unchanged list compares equal.
    order = [*(name for name in known if name in joined), *sorted(joined.keys() - known.keys())]
    return (*named, *(joined[name] for name in order))


def roles_of(found: Sequence[FoundEngine]) -> dict[str, MemberRole]:
    """Return the role that discovery reports for each engine, by name."""
    return {each.address.name: each.address.role for each in found}


async def follow_found(
    discovery: Discovery, membership: Membership, named: Sequence[EngineAddress], known: asyncio.Event
) -> None:
    """Keep a fleet's members equal to those ``named`` and those found, until cancelled; changes are logged.

    ``known`` is set once discovery has answered for the first time.
    """
    members: tuple[MemberState, ...] = tuple(MemberState(address) for address in named)
    reported: dict[str, MemberRole] = {}
    async with aclosing(discovery.changes()) as changes:
        async for found in changes:
            after = with_found(members, found, reported)
            reported = roles_of(found)
            # Before the log lines: they say what has happened, not what was planned.
            await membership.become(after)
            for event, fields, reason in member_changes(members, after):
                event.tell(**fields, reason=reason or f"reported by {discovery.source}")
            members = after
            known.set()


async def until_known(known: asyncio.Event, source: str, seconds: float = KNOWN_SECONDS) -> None:
    """Wait until a source's engines are known; raise :class:`~tercet.protocol.EngineUnreachable` after ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            await known.wait()
    except TimeoutError:
        raise EngineUnreachable(f"{source} are not known after {seconds:g} s") from None


MOST_BYTES = 4 * 1024 * 1024
DRAINING = "the roster says that it is draining"
Text = Annotated[str, Meta(max_length=256)]
POLL_INTERVAL_S = 0.5


class RosterEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One engine."""

    name: str
    url: str
    # Each start has another one, so that a replacement with the same name is another engine.
    uid: str
    role: MemberRole = "both"
    # It gets no new requests, and its sequences move elsewhere.
    draining: bool = False
    # A reason for the same, such as a start that is not complete: until it is empty, an engine that was not a member
    # does not become one.
    withheld: Text = ""
    labels: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        require_uid(self.uid)
        if self.uid.startswith(JOINED):
            raise BadRequest(f"uid: must not begin with {JOINED}, as those of engines that join do", "uid")

    def found(self) -> FoundEngine:
        """Return the engine as a fleet uses it; raise :class:`~tercet.protocol.BadRequest` for a wrong name or URL."""
        address = EngineAddress(self.name, self.url.rstrip("/"), self.role, self.labels)
        return FoundEngine(address, self.uid, not self.withheld, self.withheld or (DRAINING if self.draining else ""))


def read_roster(content: bytes) -> Sequence[FoundEngine]:
    """Return the engines of a roster; an empty list is a valid roster without engines.

    Raises :class:`~tercet.protocol.BadRequest` for other content, and for two engines with one name or one URL.
    """
    try:
        entries = msgspec.json.decode(content, type=list[RosterEntry])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the content is not a list of engines: {error}") from error
    found = [entry.found() for entry in entries]
    for what in ("name", "URL"):
        values = Counter(each.address.name if what == "name" else each.address.url for each in found)
        if twice := [value for value, times in values.items() if times > 1]:
            raise BadRequest(f"two engines have the {what} {twice[0]}")
    return found


def write_roster(entries: Sequence[RosterEntry]) -> bytes:
    """Return a roster of these engines in the order of their names, one per line."""
    lines = [msgspec.json.encode(each) for each in sorted(entries, key=lambda each: each.name)]
    return b"[" + b",\n ".join(lines) + b"]\n"


class RosterFile:
    """The engines in the roster at ``path``, which is polled every ``interval`` seconds."""

    def __init__(self, path: Path, interval: float = POLL_INTERVAL_S) -> None:
        self._path = path
        self._interval = interval
        self._files: FileThread
        self._failure = ""
        self._stamp: object = None
        self._last: Sequence[FoundEngine] | None = None

    @property
    def source(self) -> str:
        return f"the lines of the roster {self._path}"

    async def changes(self) -> AsyncGenerator[Sequence[FoundEngine]]:
        # A new reader gets all engines, also if the file has not changed since the last reader.
        self._files, self._stamp, self._last = FileThread(), None, None
        try:
            while True:
                found = await self._look()
                if found is not None and found != self._last:
                    self._last = found
                    yield found
                await asyncio.sleep(self._interval)
        finally:
            self._files.close()

    async def _look(self) -> Sequence[FoundEngine] | None:
        """Return the engines if the file has changed; None for an unchanged file and for one that cannot be used."""
        failure, stamp = "", None
        try:
            stamp = await self._files.run(stamp_of, self._path)
            # A file with the same stamp was read, or refused, already.
            if stamp is not None and stamp == self._stamp:
                return None
            found = read_roster(await self._files.run(read_whole, self._path, MOST_BYTES))
        except TimeoutError:  # before OSError, its base class
            failure = "its file system does not answer"
        except OSError as error:
            failure = error.strerror or str(error)
        except BadRequest as error:
            # It is not read again until it changes: it would be refused again.
            failure, self._stamp = error.message, stamp
        else:
            self._stamp = stamp
            if self._failure:
                logs.DISCOVERY_BACK.tell(path=self._path, reason="the file can be read")
                self._failure = ""
            return found
        # Each different failure once, not at every poll.
        if self._failure != failure:
            self._failure = failure
            logs.DISCOVERY_LOST.tell(path=self._path, reason=failure)
        return None


ROLE, LLM_D_ROLE, PORT, DRAIN = "tercet/role", "llm-d.ai/role", "tercet/port", "tercet/drain"
"""Labels or annotations of a pod. A label overrides an annotation, and Tercet's names override llm-d's."""
ROLES: Mapping[str, MemberRole] = {
    "prefill": "prefill",
    "encode-prefill": "prefill",
    "decode": "decode",
    "both": "both",
    "prefill-decode": "both",
    "encode-prefill-decode": "both",
    "store": "store",
}
_PORT = re.compile("[0-9]{1,5}")
OVER = ("Succeeded", "Failed")
logger = logging.getLogger("tercet.fleet.discovery")
POOLS = f"/apis/{POOL_GROUP}/v1/namespaces/{{}}/inferencepools"
EARLIER_POOLS = f"/apis/{EARLIER_POOL_GROUP}/v1alpha2/namespaces/{{}}/inferencepools"
PODS = "/api/v1/namespaces/{}/pods"
DEFAULT_PORT = 8000
Wanted = tuple[str, Sequence[int]]
"""A label selector for pods, and the ports of their engines."""


def engines_of(pod: Pod, ports: Sequence[int], scheme: str = "http") -> Sequence[FoundEngine]:
    """Return a pod's engines, one for each of ``ports``; none before the pod has an address or after it has ended.

    Raises :class:`~tercet.protocol.BadRequest` for a pod with invalid labels or annotations.
    """
    if not pod.status.pod_ip or pod.status.phase in OVER:
        return ()
    marks = {**(pod.metadata.annotations or {}), **(pod.metadata.labels or {})}
    role: MemberRole | None = "both"
    if (label := next((label for label in (ROLE, LLM_D_ROLE) if label in marks), None)) is not None:
        role = ROLES.get(marks[label])
        if role is None:
            known = ", ".join(ROLES)
            raise BadRequest(f"{label}: {marks[label]!r} is not a role that generates; choose one of {known}")
    if (text := marks.get(PORT)) is not None:
        numbers = text.replace(" ", "").split(",")
        if not all(_PORT.fullmatch(each) and 0 < int(each) < 65536 for each in numbers):
            raise BadRequest(f"{PORT}: {text!r} is not a port")
        ports = [int(each) for each in numbers]
    # A pod that is deleted or not ready keeps its engines: their sequences run on, or move, until it is gone.
    deleted = pod.metadata.deletion_timestamp is not None
    ready = any(each.type == "Ready" and each.status == "True" for each in pod.status.conditions or ())
    withheld = f"its pod is marked {DRAIN}" if marks.get(DRAIN) == "true" else ""
    withheld = "its pod is being deleted" if deleted else withheld if ready else "its pod is not ready"
    host, name, labels = bracketed(pod.status.pod_ip), pod.metadata.name, pod.metadata.labels or {}
    engines = list[FoundEngine]()
    for index, port in enumerate(ports):
        named = name if len(ports) == 1 else f"{name}-rank-{index}"
        address = EngineAddress(named, f"{scheme}://{host}:{port}", role, labels)
        engines.append(FoundEngine(address, pod.metadata.uid, ready and not deleted, withheld))
    return engines


def access_of(settings: DiscoverySettings) -> ApiAccess:
    """Return the API server that ``settings`` name; raise :class:`~tercet.protocol.BadRequest` without one."""
    if settings.kubeconfig is None:
        return in_cluster()
    return from_kubeconfig(Path(settings.kubeconfig).expanduser())


class PodDiscovery:
    """The engines of a namespace's pods, for one reader of :meth:`changes` at a time."""

    def __init__(self, settings: DiscoverySettings, api: ApiAccess, waits: Waits = WAITS) -> None:
        self._settings = settings
        self._api = api
        self._waits = waits
        self._namespace = settings.pool_namespace or api.namespace
        self._pods: asyncio.Task[None] | None = None
        self._wanted: Wanted | None = None
        self._tasks = TaskSet()
        self._engines: Sequence[FoundEngine] = ()
        self._changed = asyncio.Event()
        self._refused = set[tuple[str, str]]()

    @property
    def source(self) -> str:
        if self._settings.pool_name is not None:
            return f"the pods of the InferencePool {self._namespace}/{self._settings.pool_name}"
        return f"the pods of {self._namespace} with {self._settings.endpoint_selector}"

    async def changes(self) -> AsyncGenerator[Sequence[FoundEngine]]:
        """Yield the engines once the pods are known, and again at each change; of fast changes only the newest.

        The caller must close the generator (``aclosing``), which ends its watches: garbage collection is too late.
        """
        self._pods = self._wanted = None  # an earlier reader's watches have ended
        if self._settings.pool_name is not None:
            earlier = self._settings.pool_group == EARLIER_POOL_GROUP
            path = (EARLIER_POOLS if earlier else POOLS).format(self._namespace)
            # With this selector, a Role may allow one pool by its name.
            query = {"fieldSelector": f"metadata.name={self._settings.pool_name}"}
            kind = EarlierInferencePool if earlier else InferencePool
            watch = Watch[InferencePool | EarlierInferencePool](
                self._api, path, kind, query, self._pool_changed, self._waits
            )
            self._tasks.keep(watch.run, "watch on the pool")
        else:
            self._want((self._settings.endpoint_selector or "", self._ports(())))
        try:
            while True:
                await self._changed.wait()
                # Cleared before the list is given out: a change that comes while the reader works is not lost.
                self._changed.clear()
                yield self._engines
        finally:
            await self._tasks.close()

    def _pool_changed(self, pools: Sequence[InferencePool | EarlierInferencePool]) -> None:
        if not pools:
            logs.POOL_MISSING.tell(pool=f"{self._namespace}/{self._settings.pool_name}", reason="it does not exist")
            self._want(None)
            return
        labels, ports = pools[0].pods
        selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        # An empty selector would match every pod of the namespace.
        self._want((selector, self._ports(ports)) if selector else None)

    def _ports(self, of_pool: Sequence[int]) -> Sequence[int]:
        return tuple(self._settings.endpoint_target_ports or of_pool or (DEFAULT_PORT,))

    def _want(self, wanted: Wanted | None) -> None:
        # The pool changed in what is not read here: the watch on its pods goes on.
        if wanted is not None and wanted == self._wanted:
            return
        if self._pods is not None:
            self._pods.cancel()
            self._pods = None
        self._wanted = wanted
        # Without a pool there are no pods to know: an empty list is the answer, not silence.
        if wanted is None:
            self._publish(())
            return
        selector, ports = wanted

        def changed(pods: Sequence[Pod]) -> None:
            engines = list[FoundEngine]()
            for pod in pods:
                try:
                    engines += engines_of(pod, ports, self._settings.endpoint_scheme)
                except BadRequest as error:
                    # Pods are read again at each change: each reason is logged once, not with every event.
                    if (pod.metadata.uid, error.message) not in self._refused:
                        self._refused.add((pod.metadata.uid, error.message))
                        logger.warning("the pod %s is not an engine: %s", pod.metadata.name, error.message)
            self._publish(engines)

        path = PODS.format(self._namespace)
        watch = Watch(self._api, path, Pod, {"labelSelector": selector}, changed, self._waits)
        self._pods = self._tasks.keep(watch.run, "watch on pods")

    def _publish(self, engines: Sequence[FoundEngine]) -> None:
        self._engines = engines
        self._changed.set()


def discovery_of(settings: DiscoverySettings) -> Discovery:
    """Return the discovery that is set; raise :class:`~tercet.protocol.BadRequest` for pods without an API server."""
    if settings.roster is not None:
        return RosterFile(Path(settings.roster).expanduser())
    return PodDiscovery(settings, access_of(settings))
