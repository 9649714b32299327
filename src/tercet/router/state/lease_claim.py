"""The claim on a Kubernetes lease, decided without a comparison of two machines' clocks. No I/O.

The holder counts from the time at which it requested its last renewal; others count from the time at which they first
saw that renewal, which is later. So the holder knows that it has lost the lease before another process may take it.
"""

from __future__ import annotations

from typing import NamedTuple

LEASE_SECONDS = 15
RENEW_SECONDS = 3.0
MARGIN_SECONDS = 2.0
"""Seconds by which a holder stops earlier, since two machines' clocks do not run at exactly the same speed."""


class LeaseRecord(NamedTuple):
    """A lease that was read: its holder, empty if it was released, and the version of the object."""

    holder: str
    version: str


class LeaseClaim:
    """The claim of ``holder`` on one lease. Times are seconds of a clock that only this process reads."""

    def __init__(self, holder: str) -> None:
        self.holder = holder
        self._renewed: float | None = None
        self._seen: LeaseRecord | None = None
        self._seen_at = 0.0

    def holds(self, now: float) -> bool:
        """True if this process holds the lease at the time ``now``."""
        return self._renewed is not None and now < self._renewed + LEASE_SECONDS - MARGIN_SECONDS

    def needs_renewal(self, now: float) -> bool:
        """True if it is time to renew the lease."""
        return self._renewed is None or now >= self._renewed + RENEW_SECONDS

    def may_write(self, found: LeaseRecord | None, now: float) -> bool:
        """True if this process may take or renew the lease ``found``, which is None if it does not exist."""
        if found != self._seen:
            self._seen, self._seen_at = found, now
        if found is None or found.holder in ("", self.holder):
            return True
        return now >= self._seen_at + LEASE_SECONDS

    def written(self, asked: float) -> None:
        """Record that this process took or renewed the lease by a call that began at ``asked``."""
        self._renewed = asked

    def lost(self) -> None:
        """Record that another process holds the lease, or that it was released."""
        self._renewed = None
