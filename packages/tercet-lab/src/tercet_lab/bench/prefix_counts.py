"""The prefix tokens that a router's picks predicted and that its engines found in a run, from its ``/metrics``."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tercet.protocol.wire import UNREADABLE

ASK_SECONDS = 5.0
COUNTERS = {f"tercet_prefix_{what}_tokens_total": what for what in ("predicted", "delivered", "missing")}


async def prefix_counts(base_url: str) -> dict[str, int]:
    """Return the router's counters, summed over programs and engines.

    The dict is empty if the server does not have them or does not answer.
    """
    timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{base_url.rstrip('/')}/metrics") as response,
        ):
            return _read(await response.text()) if response.status == 200 else {}
    except (aiohttp.ClientError, OSError, ValueError, *UNREADABLE):
        return {}


def between(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return the growth of the counters between two reads; empty if nothing grew or the router was restarted."""
    grown = {what: tokens - before.get(what, 0) for what, tokens in after.items()}
    return grown if any(grown.values()) and min(grown.values()) >= 0 else {}


def words(counts: Mapping[str, int]) -> str:
    """Return the counts of a point as one sentence."""
    predicted, delivered, missing = (counts.get(what, 0) for what in COUNTERS.values())
    lacking = f", {missing} of the predicted ({missing / predicted:.0%}) were missing" if predicted else ""
    return f"picks predicted {predicted} prefix tokens in caches, engines found {delivered}{lacking}"


def _read(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            what = COUNTERS.get(sample.name)
            if what is not None:
                found[what] = found.get(what, 0) + round(sample.value)
    return found
