"""Metrics of routes that were chosen by their predicted cost, on ``/metrics``."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from tercet.fleet import Trace

RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)


class RouteMetrics:
    """How often which kind of route was chosen, and how far off its prediction was."""

    def __init__(self) -> None:
        self._routes = Counter("tercet_routes", "Routes chosen by cost, by kind and why.", ["kind", "why"])
        self._ratio = Histogram(
            "tercet_route_prediction_ratio", "Measured over predicted, by what.", ["what"], buckets=RATIOS
        )

    def finished(self, trace: Trace) -> None:
        """A sequence was served to its end; one without a decision counts nowhere."""
        decision = trace.decision
        if decision is None:
            return
        self._routes.labels(decision.kind, "to_learn" if decision.explored else "cheapest").inc()
        chosen = decision.chosen
        if trace.events and trace.events[-1].engine != chosen.decode:
            return  # it ended elsewhere: what was measured is not what was predicted
        for what, measured, predicted in (("ttft", trace.ttft, chosen.ttft), ("tpot", trace.tpot, chosen.tpot)):
            if measured is not None and predicted > 0:
                self._ratio.labels(what).observe(measured / predicted)
