"""Roles of engines by their load. Pure: from a fleet, a policy returns a change of roles or the reason against it."""

from tercet.decisions.roles.observed import ObservedEngine
from tercet.decisions.roles.policy import RoleFlip, RoleLook, RolePolicy
from tercet.decisions.roles.pressures import Pressures

__all__ = ["ObservedEngine", "Pressures", "RoleFlip", "RoleLook", "RolePolicy"]
