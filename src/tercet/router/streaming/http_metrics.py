"""Tells vLLM's HTTP metrics of requests that its middleware did not see.

Relies on ``PrometheusInstrumentatorMiddleware`` being one of the application's layers, each with the next one as
``app``, and on its ``instrumentations`` taking what is known of a request as one ``Info``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from prometheus_fastapi_instrumentator.metrics import Info
from prometheus_fastapi_instrumentator.middleware import PrometheusInstrumentatorMiddleware
from starlette.requests import Request
from starlette.responses import Response

from tercet.router.body import Scope

_STREAM = Response()


class HttpMetrics:
    """Counts requests and observes how long they took, as the layers of ``app`` would have."""

    def __init__(self, app: Any) -> None:
        self._observers: Sequence[Callable[[Info], None]] = ()
        layer = app
        while layer is not None:
            if isinstance(layer, PrometheusInstrumentatorMiddleware):
                self._observers = layer.instrumentations
            layer = getattr(layer, "app", None)

    @property
    def found(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self._observers)

    def observe(self, scope: Scope, handler: str, began: float) -> None:
        """A stream of route ``handler`` that began then (seconds of :func:`time.perf_counter`) has ended."""
        seconds = perf_counter() - began
        info = Info(Request(scope), _STREAM, "POST", handler, "2xx", seconds, seconds)
        for observe in self._observers:
            observe(info)
