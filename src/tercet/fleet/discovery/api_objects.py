"""The fields of Kubernetes' objects that discovery reads; all other fields are ignored."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


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
