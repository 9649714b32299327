"""Addresses that people give: URLs and their checks, engines one by one or by discovery, the admin server's own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from ipaddress import IPv6Address
from typing import Annotated, Any, ClassVar, Literal, cast
from urllib.parse import urlsplit

import msgspec

from tercet.protocol import BadRequest, MemberRole
from tercet.protocol.names import LAST_PORT, require_engine_name, require_text, shown
from tercet.settings.declaration import ENGINES, KUBERNETES, FixedPort, Setting, Settings, complaint, key_values

POOL_GROUP, EARLIER_POOL_GROUP = "inference.networking.k8s.io", "inference.networking.x-k8s.io"
"""API groups of InferencePools: that of v1, and the earlier one of v1alpha2."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class DiscoverySettings(Settings, frozen=True):
    """Source of engines: the pods of an InferencePool, the pods with certain labels, or a roster file.

    If none of the three is given, discovery is off.
    """

    panel: ClassVar[str] = KUBERNETES
    roster: Annotated[
        str | None,
        Setting("File with a JSON list of engines, reloaded when it changes; `tercet up` on Ray or a job writes it.",
                metavar="FILE", default="none", panel=ENGINES)
    ] = None  # fmt: skip
    pool_name: Annotated[
        str | None, Setting("InferencePool whose selector and ports define the engines.", default="none")
    ] = None
    pool_namespace: Annotated[
        str | None, Setting("Namespace of the pool and of the pods.", default="this pod's namespace")
    ] = None
    pool_group: Annotated[
        Literal["inference.networking.k8s.io", "inference.networking.x-k8s.io"],
        Setting(
            "API group of the pool: that of `v1`, or the earlier one of `v1alpha2`. InferenceObjectives of this pool "
            "use the same group.", metavar="GROUP"
        )
    ] = POOL_GROUP  # fmt: skip
    endpoint_selector: Annotated[
        str | None, Setting("Label selector of engines' pods, such as `app=vllm,tier in (a,b)`.", default="none")
    ] = None
    endpoint_target_ports: Annotated[
        tuple[FixedPort, ...],
        Setting("Port of an engine in its pod. Repeatable, for pods with several engines.",
                default="the pool's ports, or 8000", flag="--endpoint-target-ports", metavar="PORT")
    ] = ()  # fmt: skip
    endpoint_scheme: Annotated[Literal["http", "https"], Setting("URL scheme of engines in pods.", in_file=True)] = (
        "http"
    )
    kubeconfig: Annotated[
        str | None,
        Setting(
            "Kubeconfig file; its current context is used.", metavar="FILE", default="the pod's own service account"
        ),
    ] = None

    @property
    def is_wanted(self) -> bool:
        """True if a source of engines is set."""
        return any(each is not None for each in (self.pool_name, self.endpoint_selector, self.roster))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool_group != POOL_GROUP and self.pool_name is None:
            raise BadRequest("pool-group: needs a pool; set pool-name", "pool-group")
        if self.roster is not None and (self.pool_name is not None or self.endpoint_selector is not None):
            raise BadRequest("roster: cannot be combined with pool-name or endpoint-selector; remove one", "roster")
        if self.pool_name is not None and self.endpoint_selector is not None:
            raise BadRequest(
                "endpoint-selector: the pool has its own selector; remove pool-name or endpoint-selector",
                "endpoint-selector",
            )
        for key, name in (("pool-name", self.pool_name), ("pool-namespace", self.pool_namespace)):
            if name is not None and not _NAME.fullmatch(name):
                raise BadRequest(f"{key}: {name!r} is not a Kubernetes name (lower case, digits, -)", key)
        if self.endpoint_selector is not None and not self.endpoint_selector.strip():
            raise BadRequest("endpoint-selector: must not be empty: every pod would be an engine", "endpoint-selector")


LONGEST_URL = 2048
_HOST = re.compile(r"[\w.-]+")


def require_url(given: str, name: str, example: str = "http://127.0.0.1:8001") -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if ``given`` is not an http or https URL with a host."""
    if not _is_url(given):
        raise BadRequest(f"{name}: {shown(given)} is not a URL such as {example}", name)


def require_engine_url(given: str, name: str, example: str = "http://127.0.0.1:8001") -> None:
    """Check as :func:`require_url` does, and refuse what does not belong to an address.

    That is a user or password, since logs and metrics show an engine's URL, and a query or fragment, since paths of
    routes are appended to the URL.
    """
    require_url(given, name, example)
    if "@" in urlsplit(given).netloc:
        raise BadRequest(
            f"{name}: must not have a user or password, which logs would show; engines check TERCET_SECRET", name
        )
    if "?" in given or "#" in given:
        raise BadRequest(f"{name}: {shown(given)} must not have a query or fragment", name)


def _is_url(given: str) -> bool:
    # urlsplit removes line breaks and tabs instead of refusing them.
    if len(given) > LONGEST_URL or not given.isprintable() or " " in given or "\\" in given:
        return False
    try:
        parts = urlsplit(given)
        host = parts.hostname or ""
        if parts.scheme not in ("http", "https") or parts.port == 0 or not host:
            return False
        if "[" in parts.netloc:
            return bool(IPv6Address(host))
        return _HOST.fullmatch(host) is not None and bool(host.encode("idna"))  # it refuses parts of wrong length
    except ValueError:  # brackets that do not match, a port that is not a number, a host that is not a name
        return False


LABEL = "label."
MOST_LABELS_BYTES = 16 * 1024
"""Largest size of an engine's labels, keys and values together, in characters."""


class EngineAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine of the fleet: its name, its server's base URL, and the role that the router gives it.

    ``labels`` are given by operators; scheduling plugins may use them. Every source of engines makes this record, which
    raises :class:`~tercet.protocol.BadRequest` for a name, URL or label that cannot be used.
    """

    name: str
    url: str
    role: MemberRole = "both"
    labels: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        require_engine_name(self.name)
        require_engine_url(self.url, "url")
        if not self.labels:
            return
        for key, value in self.labels.items():
            require_text(key, "labels")
            if value:
                require_text(value, f"labels.{key}")
        if sum(len(key) + len(value) for key, value in self.labels.items()) > MOST_LABELS_BYTES:
            raise BadRequest(f"labels: have more than {MOST_LABELS_BYTES} characters", "labels")


def engine_fields(given: Any, index: int) -> Any:
    """Return the fields of an :class:`EngineAddress`.

    ``given`` is a mapping, or a text ``URL[,role=...][,name=...][,label.KEY=...]``. An engine without a name is called
    ``engine-`` and its ``index``. Raises :class:`~tercet.protocol.BadRequest`.
    """
    unnamed = {"name": f"engine-{index}"}
    if not isinstance(given, str):
        return {**unnamed, **cast("dict[str, Any]", given)} if isinstance(given, Mapping) else given
    url, *rest = given.split(",")
    if not url.startswith(("http://", "https://")):
        raise BadRequest(f"{url!r} is not a URL such as http://127.0.0.1:8001", "url")
    pairs = key_values(rest, given)
    labels = {key.removeprefix(LABEL): value for key, value in pairs.items() if key.startswith(LABEL)}
    fields = {key: value for key, value in pairs.items() if not key.startswith(LABEL)}
    return {**unnamed, "url": url.rstrip("/"), "labels": labels, **fields}


def engine_address(given: str, index: int) -> EngineAddress:
    """Parse one ``--engine`` of a command line; raise :class:`~tercet.protocol.BadRequest`."""
    try:
        return msgspec.convert(engine_fields(given, index), EngineAddress)
    except msgspec.ValidationError as error:
        raise complaint("--engine", EngineAddress, given, error) from None
    except BadRequest as error:
        raise BadRequest(f"--engine: {error.message}", "--engine") from None


def require_unlike(engines: Sequence[EngineAddress], discovery: DiscoverySettings, awaited: bool = False) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if two engines have the same name or URL, or there are no engines.

    An empty list is allowed if discovery is on, or if engines are ``awaited``.
    """
    if not engines and not discovery.is_wanted and not awaited:
        raise BadRequest(
            "engines: there are none; give --engine, or --endpoint-selector, --pool-name or --roster to find engines, "
            "or --await-engines to wait for engines that join",
            "engines",
        )
    twice = [name for name, times in Counter(engine.name for engine in engines).items() if times > 1]
    if twice:
        raise BadRequest(f"engines: two engines are called {twice[0]}; give them different names", "engines")
    again = [url for url, times in Counter(engine.url.rstrip("/") for engine in engines).items() if times > 1]
    if again:
        raise BadRequest(f"engines: {again[0]} is given twice", "engines")


FILE_PREFIX = "unix:"
LONGEST_SOCKET_PATH = 107


class AdminAddress(msgspec.Struct, frozen=True):
    """Address at which only `/tercet/v1` is served: a ``host`` and a ``port``, or the ``path`` of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"{FILE_PREFIX}{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def of(cls, text: str) -> AdminAddress:
        """Parse ``HOST:PORT``, ``[IPv6]:PORT`` or ``unix:PATH``; raise :class:`~tercet.protocol.BadRequest`."""
        if text.startswith(FILE_PREFIX):
            path = text.removeprefix(FILE_PREFIX)
            if path.startswith("/") and len(path.encode()) <= LONGEST_SOCKET_PATH:
                return cls(path=path)
        else:
            host, _, port = text.rpartition(":")
            bracketed = host.startswith("[") and host.endswith("]")
            bare = host[1:-1] if bracketed else host
            is_host = ":" in bare if bracketed else bool(bare) and not set(bare) & set(":[]/ ")
            if is_host and port.isascii() and port.isdigit() and 0 < int(port) <= LAST_PORT:
                return cls(bare, int(port))
        raise BadRequest(
            f"admin-listen: must be HOST:PORT, [IPv6]:PORT or unix:/PATH of at most {LONGEST_SOCKET_PATH} bytes, is "
            f"{text[:200]!r}",
            "admin-listen",
        )
