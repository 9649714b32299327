"""Decisions of a keeper about its owners' reports, as pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tercet.fleet.discovery.roster import RosterEntry
from tercet_ray.wanted import OwnerReport, WantedEngine

READY, STARTING = "ready", "starting"


def roster_of(
    wanted: Sequence[WantedEngine], reports: Mapping[str, OwnerReport], draining: Collection[str]
) -> list[RosterEntry]:
    """Return the roster: each wanted engine that has an address, with its newest start.

    ``draining`` are the ids of nodes that Ray will remove. An engine whose owner does not answer keeps its last report;
    the router itself checks that the engine serves.
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
    """Return the roster that follows ``before``: an engine that is not in ``now`` keeps its entry.

    Entries are missing while an engine's owner restarts, or while the keeper restarts, which then knows no engines.
    """
    found = {each.name: each for each in (*before, *now)}
    return [found[each.spec.name] for each in wanted if each.spec.name in found]


def unwanted(fleet: str, wanted: Sequence[WantedEngine], owners: Collection[str], keeper: str) -> list[str]:
    """Return the names of this fleet's actors without a wanted engine, such as those of an earlier, larger fleet."""
    kept = {f"{fleet}/{each.spec.name}" for each in wanted} | {keeper}
    return sorted(name for name in owners if name.startswith(f"{fleet}/") and name not in kept)
