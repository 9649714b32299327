"""The engines of a pod: their addresses and roles, and the reason why they get no requests, if there is one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tercet.fleet.discovery.api_objects import Pod
from tercet.fleet.discovery.found import FoundEngine
from tercet.protocol import BadRequest, Role
from tercet.settings import EngineAddress

ROLE, LLM_D_ROLE, PORT, DRAIN = "tercet/role", "llm-d.ai/role", "tercet/port", "tercet/drain"
"""Labels or annotations of a pod. A label overrides an annotation, and Tercet's names override llm-d's."""
ROLES: Mapping[str, Role] = {
    "prefill": "prefill",
    "encode-prefill": "prefill",
    "decode": "decode",
    "both": "both",
    "prefill-decode": "both",
    "encode-prefill-decode": "both",
}
_PORT = re.compile("[0-9]{1,5}")
OVER = ("Succeeded", "Failed")


def engines_of(pod: Pod, ports: Sequence[int], scheme: str = "http") -> Sequence[FoundEngine]:
    """Return a pod's engines, one for each of ``ports``; none before the pod has an address or after it has ended.

    Raises :class:`~tercet.protocol.BadRequest` for a pod with invalid labels or annotations.
    """
    if not pod.status.pod_ip or pod.status.phase in OVER:
        return ()
    told = {**(pod.metadata.annotations or {}), **(pod.metadata.labels or {})}
    role, own, withheld = role_of(told), _ports(told) or ports, why_withheld(pod, told)
    serves = _is_ready(pod) and pod.metadata.deletion_timestamp is None
    host, name = _host(pod.status.pod_ip), pod.metadata.name
    names = [name] if len(own) == 1 else [f"{name}-rank-{index}" for index in range(len(own))]
    addresses = (
        EngineAddress(each, f"{scheme}://{host}:{port}", role, pod.metadata.labels or {})
        for each, port in zip(names, own, strict=True)
    )
    return [FoundEngine(address, pod.metadata.uid, serves, withheld) for address in addresses]


def role_of(told: Mapping[str, str]) -> Role:
    """Return the role in a pod's labels, or ``both``; raise :class:`~tercet.protocol.BadRequest` if it is unknown."""
    for label in (ROLE, LLM_D_ROLE):
        if label in told:
            role = ROLES.get(told[label])
            if role is None:
                raise BadRequest(
                    f"{label}: {told[label]!r} is not a role that generates; choose one of {', '.join(ROLES)}"
                )
            return role
    return "both"


def why_withheld(pod: Pod, told: Mapping[str, str]) -> str:
    """Return the reason why the pod gets no new requests; empty if it gets them."""
    if pod.metadata.deletion_timestamp is not None:
        return "its pod is being deleted"
    if not _is_ready(pod):
        return "its pod is not ready"
    return f"its pod is marked {DRAIN}" if told.get(DRAIN) == "true" else ""


def _is_ready(pod: Pod) -> bool:
    return any(each.type == "Ready" and each.status == "True" for each in pod.status.conditions or ())


def _ports(told: Mapping[str, str]) -> Sequence[int]:
    """Return the ports in a pod's labels, one or several separated by commas; empty if it names none."""
    text = told.get(PORT)
    if text is None:
        return ()
    found = text.replace(" ", "").split(",")
    if not all(_PORT.fullmatch(each) and 0 < int(each) < 65536 for each in found):
        raise BadRequest(f"{PORT}: {text!r} is not a port")
    return [int(each) for each in found]


def _host(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip
