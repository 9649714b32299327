"""Engines in pods: found by their labels or by an InferencePool, and followed as they come and go.

The watch on the API server is :class:`.watching.Watch`; :func:`.pods.engines_of` returns a pod's engines;
:func:`.members.with_pods` computes the fleet's members.
"""

from tercet.fleet.discovery.api_objects import PoolReference
from tercet.fleet.discovery.members import follow_pods, roles_of, until_known, with_pods
from tercet.fleet.discovery.objectives import follow_objectives
from tercet.fleet.discovery.pod_discovery import PodDiscovery, access_of, discovery_of
from tercet.fleet.discovery.pods import PodEngine

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
