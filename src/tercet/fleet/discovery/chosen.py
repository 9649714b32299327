"""Choice of the discovery by settings: pods of Kubernetes, or a roster file."""

from __future__ import annotations

from pathlib import Path

from tercet.fleet.discovery.found import Discovery
from tercet.fleet.discovery.pod_discovery import PodDiscovery, access_of
from tercet.fleet.discovery.roster_file import RosterFile
from tercet.settings import DiscoverySettings


def discovery_of(settings: DiscoverySettings) -> Discovery:
    """Return the discovery that is set; raise :class:`~tercet.protocol.BadRequest` for pods without an API server."""
    if settings.roster is not None:
        return RosterFile(Path(settings.roster).expanduser())
    return PodDiscovery(settings, access_of(settings))
