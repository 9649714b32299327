"""Discovery of engines in Kubernetes pods or in a roster file, which follows them as they come and go.

The watch on the API server is :class:`.watching.Watch`; :func:`.pods.engines_of` returns a pod's engines,
:func:`.roster.read_roster` those of a roster;
:func:`.members.with_found` computes the fleet's members.
"""

from tercet.fleet.discovery.found import Discovery, FoundEngine, follow_found, roles_of, until_known, with_found
from tercet.fleet.discovery.kubernetes_api import PoolReference
from tercet.fleet.discovery.pod_discovery import PodDiscovery, access_of, discovery_of, follow_objectives

__all__ = [
    "Discovery",
    "FoundEngine",
    "PodDiscovery",
    "PoolReference",
    "access_of",
    "discovery_of",
    "follow_found",
    "follow_objectives",
    "roles_of",
    "until_known",
    "with_found",
]
