"""How engines are found, in Kubernetes or in a roster: for router, rescheduler and endpoint picker."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tercet.protocol import BadRequest
from tercet.settings.declaration import Setting, Settings
from tercet.settings.panels import ENGINES, KUBERNETES

TargetPort = Annotated[int, Meta(ge=1, le=65535)]
POOL_GROUP, EARLIER_POOL_GROUP = "inference.networking.k8s.io", "inference.networking.x-k8s.io"
"""API groups of InferencePools: of v1, and of v1alpha2 before it."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class DiscoverySettings(Settings, frozen=True):
    """Where engines are found: in the pods of an InferencePool, or in those with certain labels, or in a roster.

    Without any of the three, none are looked for.
    """

    roster: Annotated[
        str | None,
        Setting("A JSON list of engines, read again when it changes; Ray's follower writes one, a Slurm job may.",
                metavar="FILE", default="none", panel=ENGINES),
    ] = None  # fmt: skip
    pool_name: Annotated[
        str | None,
        Setting("An InferencePool, whose selector and ports say which pods are engines.", default="none",
                panel=KUBERNETES),
    ] = None  # fmt: skip
    pool_namespace: Annotated[
        str | None, Setting("The namespace of the pool and of the pods.", default="its own", panel=KUBERNETES)
    ] = None
    pool_group: Annotated[
        Literal["inference.networking.k8s.io", "inference.networking.x-k8s.io"],
        Setting(
            "The pool's API group: that of `v1`, or the earlier one of `v1alpha2`. InferenceObjectives of this pool "
            "name the same one.", metavar="GROUP", panel=KUBERNETES
        ),
    ] = POOL_GROUP  # fmt: skip
    endpoint_selector: Annotated[
        str | None,
        Setting("Labels of pods that are engines, such as `app=vllm,tier in (a,b)`.", default="none", panel=KUBERNETES),
    ] = None
    endpoint_target_ports: Annotated[
        tuple[TargetPort, ...],
        Setting("Port of an engine in its pod; repeatable, for pods with several engines.",
                default="the pool's, or 8000", flag="--endpoint-target-ports", metavar="PORT", panel=KUBERNETES),
    ] = ()  # fmt: skip
    endpoint_scheme: Annotated[
        Literal["http", "https"], Setting("URL scheme of engines in pods.", panel=KUBERNETES, in_file=True)
    ] = "http"
    kubeconfig: Annotated[
        str | None,
        Setting("A kubeconfig file, whose current context is used.", metavar="FILE",
                default="the pod's own service account", panel=KUBERNETES),
    ] = msgspec.field(default=None)  # fmt: skip

    @property
    def is_wanted(self) -> bool:
        """Whether engines shall be looked for at all."""
        return any(each is not None for each in (self.pool_name, self.endpoint_selector, self.roster))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool_group != POOL_GROUP and self.pool_name is None:
            raise BadRequest("pool-group: is of a pool; name it with pool-name", "pool-group")
        if self.roster is not None and (self.pool_name is not None or self.endpoint_selector is not None):
            raise BadRequest("roster: engines are found in pods or in a roster; give one of the two", "roster")
        if self.pool_name is not None and self.endpoint_selector is not None:
            raise BadRequest("endpoint-selector: the pool has one; give one of the two", "endpoint-selector")
        for key, name in (("pool-name", self.pool_name), ("pool-namespace", self.pool_namespace)):
            if name is not None and not _NAME.fullmatch(name):
                raise BadRequest(f"{key}: {name!r} is not a name of Kubernetes (lower case, digits, -)", key)
        if self.endpoint_selector is not None and not self.endpoint_selector.strip():
            raise BadRequest("endpoint-selector: must not be empty: every pod would be an engine", "endpoint-selector")
