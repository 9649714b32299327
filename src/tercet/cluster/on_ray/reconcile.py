"""What a keeper makes of its owners' reports: pure decisions, so that tests compare lists."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tercet.cluster.on_ray.wanted import OwnerReport, WantedEngine
from tercet.fleet.discovery.roster import RosterEntry

READY, STARTING = "ready", "starting"


def roster_of(
    wanted: Sequence[WantedEngine], reports: Mapping[str, OwnerReport], draining: Collection[str]
) -> list[RosterEntry]:
    """The roster: each wanted engine that has an address, under its newest start alone.

    ``draining`` are the ids of nodes that Ray is about to take away. An engine whose owner has not answered stays as it
    was reported: whether it serves, the router finds out by itself.
    """
    return [
        RosterEntry(
            name=each.spec.name,
            url=report.url,
            uid=report.uid,
            role=each.role,
            draining=report.node in draining,
            withheld="" if report.state == READY else report.state[:256],
        )
        for each in wanted
        if (report := reports.get(each.spec.name)) is not None and report.url
    ]


def merged(
    wanted: Sequence[WantedEngine], before: Sequence[RosterEntry], now: Sequence[RosterEntry]
) -> list[RosterEntry]:
    """The roster after ``before``: an engine of which nothing is known now stays as it was.

    That is so while its owner restarts, or the keeper, which then knows of none.
    """
    found = {each.name: each for each in (*before, *now)}
    return [found[each.spec.name] for each in wanted if each.spec.name in found]


def unwanted(fleet: str, wanted: Sequence[WantedEngine], owners: Collection[str], keeper: str) -> list[str]:
    """Names of actors of this fleet that own no wanted engine, such as those of an earlier start with more engines."""
    kept = {f"{fleet}/{each.spec.name}" for each in wanted} | {keeper}
    return sorted(name for name in owners if name.startswith(f"{fleet}/") and name not in kept)
