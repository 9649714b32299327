"""Profile handlers: which profile serves which role, and who decides whether two engines do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from tercet.protocol import BadRequest, Role
from tercet.scheduling.deciders import AlwaysDisaggregate
from tercet.scheduling.plugin import Decider, Plugin
from tercet.scheduling.profiles import SchedulingProfile


@dataclass(frozen=True)
class Assignment:
    """The profile's name for each role, and the decider."""

    by_role: Mapping[Role, str]
    decider: Decider


class Handler(Plugin, frozen=True):
    """Assigns the profiles of a file."""

    def assign(self, profiles: Mapping[str, SchedulingProfile], deciders: Mapping[str, Decider], at: str) -> Assignment:
        """``at`` is the handler's place in the file. Raises :class:`~tercet.protocol.BadRequest`."""
        raise NotImplementedError(f"{type(self).__name__} has no assign()")


class SingleProfileHandler(Handler, frozen=True):
    """One profile for every role."""

    def assign(self, profiles: Mapping[str, SchedulingProfile], deciders: Mapping[str, Decider], at: str) -> Assignment:
        if len(profiles) != 1:
            field = "schedulingProfiles"
            raise BadRequest(
                f"{field}: a single-profile-handler takes one profile, and there are {len(profiles)}", field
            )
        return of_one_profile(profiles)


class DeciderNames(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``prefill`` is the name of the decider plugin that is asked whether a second engine shall prefill."""

    prefill: str | None = None


class ProfileNames(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name of the profile for each role."""

    prefill: str = "prefill"
    decode: str = "decode"


class DisaggProfileHandler(Handler, frozen=True):
    """One profile for decode engines, one for prefill engines, and a decider; without one, always both."""

    profiles: ProfileNames = ProfileNames()
    deciders: DeciderNames = DeciderNames()

    def assign(self, profiles: Mapping[str, SchedulingProfile], deciders: Mapping[str, Decider], at: str) -> Assignment:
        prefill, decode, wanted = self.profiles.prefill, self.profiles.decode, self.deciders.prefill
        _require(prefill in profiles, f"{at}.profiles.prefill", "profile", prefill, profiles)
        _require(decode in profiles, f"{at}.profiles.decode", "profile", decode, profiles)
        by_role: Mapping[Role, str] = {"prefill": prefill, "decode": decode, "both": decode}
        if wanted is None:
            return Assignment(by_role, AlwaysDisaggregate())
        _require(wanted in deciders, f"{at}.deciders.prefill", "decider", wanted, deciders)
        return Assignment(by_role, deciders[wanted])


def of_one_profile(profiles: Mapping[str, SchedulingProfile]) -> Assignment:
    """Every role by the only profile; with several and no handler, none by any."""
    if len(profiles) != 1:
        return Assignment({}, AlwaysDisaggregate())
    (name,) = profiles
    return Assignment({"prefill": name, "decode": name, "both": name}, AlwaysDisaggregate())


def _require(there: bool, field: str, kind: str, name: str, known: Mapping[str, object]) -> None:
    if not there:
        raise BadRequest(f"{field}: there is no {kind} {name!r}; there are {', '.join(known) or 'none'}", field)
