"""Whose a lease of Kubernetes is, decided without comparing the clocks of two machines. Pure.

A holder counts from when it asked for its last renewal; others count from when they first saw that renewal, which is
later. So the holder knows that it has lost the lease before anybody else may take it.
"""

from __future__ import annotations

from typing import NamedTuple

LEASE_SECONDS = 15
RENEW_SECONDS = 3.0
MARGIN_SECONDS = 2.0
"""By which a holder stops earlier: clocks of two machines do not run at exactly the same speed."""


class LeaseRecord(NamedTuple):
    """A lease as it was read: its holder, empty if it was given back, and the version of the object."""

    holder: str
    version: str


class LeaseClaim:
    """The claim of ``holder`` on one lease. Times are those of a clock that only this process reads."""

    def __init__(self, holder: str) -> None:
        self.holder = holder
        self._renewed: float | None = None
        self._seen: LeaseRecord | None = None
        self._seen_at = 0.0

    def holds(self, now: float) -> bool:
        """Whether it is this process's at this moment."""
        return self._renewed is not None and now < self._renewed + LEASE_SECONDS - MARGIN_SECONDS

    def needs_renewal(self, now: float) -> bool:
        """Whether it is time to write it again."""
        return self._renewed is None or now >= self._renewed + RENEW_SECONDS

    def may_write(self, found: LeaseRecord | None, now: float) -> bool:
        """Whether a lease that was read as ``found`` may be taken or renewed; None is one that does not exist."""
        if found != self._seen:
            self._seen, self._seen_at = found, now
        if found is None or found.holder in ("", self.holder):
            return True
        return now >= self._seen_at + LEASE_SECONDS

    def written(self, asked: float) -> None:
        """It was written as this process's, in a call that began at ``asked``."""
        self._renewed = asked

    def lost(self) -> None:
        """It is another one's, or given back."""
        self._renewed = None
