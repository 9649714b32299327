"""All profiles and deciders of one scheduling file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tercet.protocol import BadRequest, Role
from tercet.scheduling.deciders import AlwaysDisaggregate
from tercet.scheduling.plugin import Decider
from tercet.scheduling.profile import Profile

SCHEDULED = "scheduled"
"""As ``by`` of a pick: the profile that the handler has for the role."""


@dataclass(frozen=True)
class Scheduling:
    """How a fleet chooses engines.

    ``by_role`` says which profile serves a role; ``decider`` whether a second engine shall prefill.
    """

    profiles: Mapping[str, Profile] = field(default_factory=dict[str, Profile])
    by_role: Mapping[Role, str] = field(default_factory=dict[Role, str])
    deciders: Mapping[str, Decider] = field(default_factory=dict[str, Decider])
    decider: Decider = field(default_factory=AlwaysDisaggregate)

    def profile(self, by: str, role: Role) -> Profile | None:
        """The profile called ``by``, or that of the role if ``by`` is ``scheduled``; None if there is none."""
        return self.profiles.get(self.by_role.get(role, "") if by == SCHEDULED else by)

    def decider_called(self, name: str | None) -> Decider:
        """The decider of that name, or the handler's for None. Raises :class:`~tercet.protocol.BadRequest`."""
        if name is None:
            return self.decider
        found = self.deciders.get(name)
        if found is None:
            known = ", ".join(self.deciders) or "none"
            raise BadRequest(f"by: there is no decider {name!r}; the scheduling file has {known}", "by")
        return found
