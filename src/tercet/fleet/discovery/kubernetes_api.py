"""The API server of Kubernetes: its address and credentials, and the fields of its objects that discovery reads.

The access is that of the pod's service account, or of a kubeconfig file. All other fields of objects are ignored.
"""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import yaml

from tercet.aio.files import read_named
from tercet.protocol import BadRequest
from tercet.protocol.names import bracketed

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
T = TypeVar("T")


@dataclass(frozen=True)
class ApiAccess:
    """Address and credentials of the API server at ``url``.

    ``token`` and ``tls`` are called for every request, since both may change; they raise ``OSError`` for files that
    cannot be read. ``namespace`` is the default namespace.
    """

    url: str
    namespace: str
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
    return ApiAccess(f"https://{bracketed(host)}:{port}", own, lambda: token.read_text().strip(), _TrustedBy(ca))


class _TrustedBy:
    """TLS context for the file of a CA, created again when the file changes."""

    def __init__(self, ca: Path) -> None:
        self._ca = ca
        self._made_of: object = None
        self._context: ssl.SSLContext | None = None

    def __call__(self) -> ssl.SSLContext | None:
        stamp = self._ca.stat()
        made_of = stamp.st_mtime_ns, stamp.st_ino, stamp.st_size
        if self._context is None or made_of != self._made_of:
            self._context = ssl.create_default_context(cafile=str(self._ca))
            self._made_of = made_of
        return self._context


# ---- kubeconfig ------------------------------------------------------------------------------------------------


def from_kubeconfig(file: Path) -> ApiAccess:
    """Return the access of the current context of a kubeconfig file.

    Raises :class:`~tercet.protocol.BadRequest` for a file that cannot be read and for access that is not supported.
    """
    try:
        content = yaml.safe_load(read_named(file).decode("utf-8"))
        context = _called(content, "contexts", "context", content["current-context"])
        cluster = _called(content, "clusters", "cluster", context["cluster"])
        user: Mapping[str, Any] = (
            _called(content, "users", "user", context["user"]) if context.get("user") else None
        ) or {}
        url, token = str(cluster["server"]), _token_of(user, file)
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
    return ApiAccess(url.rstrip("/"), namespace, token, lambda: context_tls)


def _called(content: Any, several: str, one: str, name: str) -> Any:
    return next(each[one] for each in [*content[several], {"name": name}] if each["name"] == name)


def _token_of(user: Mapping[str, Any], file: Path) -> Callable[[], str]:
    if user.get("tokenFile"):
        path = file.parent / str(user["tokenFile"])
        return lambda: read_named(path).decode().strip()
    token = str(user.get("token") or "")
    return lambda: token


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
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class Condition(msgspec.Struct, frozen=True):
    """One of a pod's conditions; ``status`` is True, False or Unknown."""

    type: str
    status: str


class PodStatus(msgspec.Struct, frozen=True):
    """The kubelet's status of a pod."""

    phase: str = ""
    conditions: list[Condition] | None = None
    pod_ip: str = msgspec.field(default="", name="podIP")


class Pod(msgspec.Struct, frozen=True):
    """A pod."""

    metadata: Metadata
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


class InferencePool(msgspec.Struct, frozen=True):
    """``inference.networking.k8s.io/v1`` InferencePool."""

    metadata: Metadata
    spec: PoolSpec = PoolSpec()

    @property
    def pods(self) -> tuple[dict[str, str], list[int]]:
        """Return the labels of its pods, and the ports on which they serve."""
        return self.spec.selector.match_labels, [each.number for each in self.spec.target_ports]


class EarlierPoolSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The selection of a pool's pods before ``v1``."""

    selector: dict[str, str] = {}
    target_port_number: int | None = None


class EarlierInferencePool(msgspec.Struct, frozen=True):
    """``inference.networking.x-k8s.io/v1alpha2`` InferencePool."""

    metadata: Metadata
    spec: EarlierPoolSpec = EarlierPoolSpec()

    @property
    def pods(self) -> tuple[dict[str, str], list[int]]:
        """Return the labels of its pods, and the port on which they serve."""
        port = self.spec.target_port_number
        return self.spec.selector, [] if port is None else [port]


class PoolReference(msgspec.Struct, frozen=True):
    """The pool that an object refers to, in the object's namespace."""

    name: str = ""
    kind: str = "InferencePool"
    group: str = "inference.networking.k8s.io"


class ObjectiveSpec(msgspec.Struct, frozen=True, rename="camel"):
    """Priority of requests that name an objective; higher is more important."""

    priority: int | None = None
    pool_ref: PoolReference = PoolReference()


class InferenceObjective(msgspec.Struct, frozen=True):
    """``inference.networking.x-k8s.io/v1alpha2`` InferenceObjective."""

    metadata: Metadata
    spec: ObjectiveSpec = ObjectiveSpec()


class ListMetadata(msgspec.Struct, frozen=True):
    """Metadata of a list: the version from which a watch continues, and the token of the next page."""

    resource_version: str = msgspec.field(default="", name="resourceVersion")
    next_page: str | None = msgspec.field(default=None, name="continue")


class ObjectList(msgspec.Struct, Generic[T], frozen=True):
    """A page of a list."""

    metadata: ListMetadata
    items: list[T] | None = None


class Status(msgspec.Struct, frozen=True):
    """Reason of a refusal; ``code`` is the HTTP status."""

    code: int = 0
    reason: str = ""
    message: str = ""


class WatchEvent(msgspec.Struct, frozen=True):
    """One line of a watch; ``type`` decides the kind of ``object``."""

    type: str
    object: msgspec.Raw


class Marked(msgspec.Struct, frozen=True):
    """Content of a bookmark."""

    metadata: Metadata
