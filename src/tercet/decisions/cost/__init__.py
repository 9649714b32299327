"""Cost of serving, learned by observing engines, and the route of least cost. Pure, without I/O."""

from tercet.decisions.cost.costs import Costs
from tercet.decisions.cost.routes import RouteDecision, RouteOption, Targets

__all__ = ["Costs", "RouteDecision", "RouteOption", "Targets"]
