"""Engines in pods: found by their labels or by an InferencePool, and followed as they come and go.

The watch on the API server is :class:`~tercet.discovery.watching.Watch`; :func:`~tercet.discovery.pods.engines_of`
returns a pod's engines; :func:`~tercet.discovery.members.with_pods` computes the fleet's members.
"""

from tercet.discovery.api_objects import PoolReference
from tercet.discovery.members import follow_pods, roles_of, until_known, with_pods
from tercet.discovery.objectives import follow_objectives
from tercet.discovery.pod_discovery import PodDiscovery, access_of, discovery_of
from tercet.discovery.pods import PodEngine

__all__ = [
    "PodDiscovery",
    "PodEngine",
    "PoolReference",
    "access_of",
    "discovery_of",
    "follow_objectives",
    "follow_pods",
    "roles_of",
    "until_known",
    "with_pods",
]
