"""The fleet: which engines there are, in which role, and how busy this front door keeps each of them."""

from tercet.fleet.fleet import Fleet, Member, Role
from tercet.fleet.trace import Trace, TraceEvent

__all__ = ["Fleet", "Member", "Role", "Trace", "TraceEvent"]
