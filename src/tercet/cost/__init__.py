"""Cost of serving: learned by observing engines, and the route of least cost. Pure, without I/O."""

from tercet.cost.costs import Costs
from tercet.cost.routes import RouteDecision, RouteOption, Targets

__all__ = ["Costs", "RouteDecision", "RouteOption", "Targets"]
