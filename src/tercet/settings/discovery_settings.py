"""Settings of discovery in Kubernetes or in a roster, for router, rescheduler and endpoint picker."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec

from tercet.protocol import BadRequest
from tercet.settings.declaration import FixedPort, Setting, Settings
from tercet.settings.panels import ENGINES, KUBERNETES

POOL_GROUP, EARLIER_POOL_GROUP = "inference.networking.k8s.io", "inference.networking.x-k8s.io"
"""API groups of InferencePools: that of v1, and the earlier one of v1alpha2."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class DiscoverySettings(Settings, frozen=True):
    """Source of engines: the pods of an InferencePool, the pods with certain labels, or a roster file.

    If none of the three is given, discovery is off.
    """

    roster: Annotated[
        str | None,
        Setting("File with a JSON list of engines, reloaded when it changes; `tercet up` on Ray or a job writes it.",
                metavar="FILE", default="none", panel=ENGINES),
    ] = None  # fmt: skip
    pool_name: Annotated[
        str | None,
        Setting("InferencePool whose selector and ports define the engines.", default="none",
                panel=KUBERNETES),
    ] = None  # fmt: skip
    pool_namespace: Annotated[
        str | None, Setting("Namespace of the pool and of the pods.", default="this pod's namespace", panel=KUBERNETES)
    ] = None
    pool_group: Annotated[
        Literal["inference.networking.k8s.io", "inference.networking.x-k8s.io"],
        Setting(
            "API group of the pool: that of `v1`, or the earlier one of `v1alpha2`. InferenceObjectives of this pool "
            "use the same group.", metavar="GROUP", panel=KUBERNETES
        ),
    ] = POOL_GROUP  # fmt: skip
    endpoint_selector: Annotated[
        str | None,
        Setting(
            "Label selector of engines' pods, such as `app=vllm,tier in (a,b)`.",
            default="none",
            panel=KUBERNETES,
        ),
    ] = None
    endpoint_target_ports: Annotated[
        tuple[FixedPort, ...],
        Setting("Port of an engine in its pod. Repeatable, for pods with several engines.",
                default="the pool's ports, or 8000", flag="--endpoint-target-ports", metavar="PORT", panel=KUBERNETES),
    ] = ()  # fmt: skip
    endpoint_scheme: Annotated[
        Literal["http", "https"], Setting("URL scheme of engines in pods.", panel=KUBERNETES, in_file=True)
    ] = "http"
    kubeconfig: Annotated[
        str | None,
        Setting("Kubeconfig file; its current context is used.", metavar="FILE",
                default="the pod's own service account", panel=KUBERNETES),
    ] = msgspec.field(default=None)  # fmt: skip

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
