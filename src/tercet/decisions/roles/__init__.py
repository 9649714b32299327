"""Roles of engines by their load. Pure: a policy looks at a fleet, and answers with a flip or with why not."""

from tercet.decisions.roles.observed import ObservedEngine
from tercet.decisions.roles.policy import RoleFlip, RoleLook, RolePolicy
from tercet.decisions.roles.pressures import Pressures

__all__ = ["ObservedEngine", "Pressures", "RoleFlip", "RoleLook", "RolePolicy"]
