"""How a process that copies KV is to be started, so that it copies past the caches.

Of what is copied nobody reads a byte soon, so it need not push out of the caches what the engine computes with. Stores
past the caches also save reading each line before it is overwritten, a third of the traffic on the way to memory. The
C library has such a copy, but takes it for pieces only that are about as large as a cache, and several hundred KiB with
``rep movsb`` instead. Both limits are tunables that it reads when a process starts: see "Hardware Capability Tunables"
in the glibc manual. Other C libraries and processors ignore them, and copy as ever.
"""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"
# From the first size on past the caches (glibc takes no less than 0x4040), and up to there never by ``rep movsb``.
TUNABLES = {
    "glibc.cpu.x86_non_temporal_threshold": "0x4800",
    "glibc.cpu.x86_rep_movsb_threshold": "0x10000000",
}


def past_the_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` with these tunables; one that its user has set stays as it is."""
    found = [part for part in environment.get(VARIABLE, "").split(":") if part]
    known = {part.partition("=")[0] for part in found}
    added = [f"{name}={value}" for name, value in TUNABLES.items() if name not in known]
    return {**environment, VARIABLE: ":".join([*found, *added])}
