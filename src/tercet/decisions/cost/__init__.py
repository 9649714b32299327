"""Cost of serving, learned by observing engines, and the route of least cost. Pure, without I/O."""

from tercet.decisions.cost.costs import Costs, RouteDecision, RouteOption, Targets
from tercet.decisions.cost.pulls import Pull

__all__ = ["Costs", "Pull", "RouteDecision", "RouteOption", "Targets"]
