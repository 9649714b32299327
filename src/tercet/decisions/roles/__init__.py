"""Roles of engines by their load. Pure: a policy looks at a fleet, and returns a change of roles or the reason for none."""

from tercet.decisions.roles.observed import ObservedEngine
from tercet.decisions.roles.policy import RoleFlip, RoleLook, RolePolicy
from tercet.decisions.roles.pressures import Pressures

__all__ = ["ObservedEngine", "Pressures", "RoleFlip", "RoleLook", "RolePolicy"]
