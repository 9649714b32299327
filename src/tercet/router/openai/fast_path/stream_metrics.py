"""Updates of vLLM's metrics for requests and tokens that bypassed vLLM's own path.

Relies on ``PrometheusInstrumentatorMiddleware`` being one of the application's layers, each with the next one as
``app``, and on its ``instrumentations`` taking the data of a request as one ``Info``; and on the updates of
``IterationStats.update_from_output`` for a token after the first: the request's token count and time of last token, the
gap between the two, and the iteration's token count.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_fastapi_instrumentator.metrics import Info
from prometheus_fastapi_instrumentator.middleware import PrometheusInstrumentatorMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Scope
from vllm.entrypoints.serve.middleware.x_request_id import XRequestIdMiddleware
from vllm.v1.metrics.stats import IterationStats, RequestStateStats

# Length in seconds of one "iteration" in vLLM's metrics. One record costs as much as several tokens.
RECORD_SECONDS = 0.5
_STREAM = Response()


class HttpMetrics:
    """Counter of requests and their durations, in the metrics of ``app``'s layers."""

    def __init__(self, app: Any) -> None:
        self._observers: Sequence[Callable[[Info], None]] = ()
        layer = app
        while layer is not None:
            if isinstance(layer, PrometheusInstrumentatorMiddleware):
                self._observers = layer.instrumentations
            layer = getattr(layer, "app", None)

    @property
    def found(self) -> bool:
        """True if ``app`` has metrics to update."""
        return bool(self._observers)

    def observe(self, scope: Scope, handler: str, seconds: float) -> None:
        """Record that a stream of the route ``handler`` has ended after ``seconds``."""
        info = Info(Request(scope), _STREAM, "POST", handler, "2xx", seconds, seconds)
        for observe in self._observers:
            observe(info)


class StreamStats:
    """Token statistics, passed to vLLM's loggers every ``RECORD_SECONDS``; without loggers, nothing is recorded."""

    def __init__(self, loggers: Any | None) -> None:
        self._loggers = loggers
        self._iteration: IterationStats | None = None

    def iteration(self) -> IterationStats | None:
        """Return the object in which vLLM's own path records now; None without loggers."""
        if self._loggers is None:
            return None
        gathered = self._gather(0)
        gathered.iteration_timestamp = time.time()  # the end of the latencies that vLLM measures
        return gathered

    def observe(self, request: RequestStateStats | None, num_tokens: int) -> None:
        """Record one output with ``num_tokens`` more tokens of a request."""
        if self._loggers is None or request is None:
            return
        now = time.monotonic()
        if (gathered := self._iteration) is None:
            gathered = self._gather(0)
        gathered.num_generation_tokens += num_tokens
        gathered.inter_token_latencies_iter.append(now - request.last_token_ts)
        request.last_token_ts = now
        request.num_generation_tokens += num_tokens

    def count(self, request: RequestStateStats | None, num_tokens: int) -> None:
        """Count ``num_tokens`` more tokens of a request; vLLM's own path records the latency of their output."""
        if self._loggers is not None and request is not None:
            self._gather(num_tokens)
            request.num_generation_tokens += num_tokens

    def record(self) -> None:
        """Pass the collected statistics to the loggers."""
        gathered, self._iteration = self._iteration, None
        if gathered is not None and self._loggers is not None:
            self._loggers.record(scheduler_stats=None, iteration_stats=gathered)

    def _gather(self, num_tokens: int) -> IterationStats:
        if self._iteration is None:
            self._iteration = IterationStats()
            asyncio.get_running_loop().call_later(RECORD_SECONDS, self.record)
        self._iteration.num_generation_tokens += num_tokens
        return self._iteration


# ---- headers ---------------------------------------------------------------------------------------------------------

# vLLM's layers that only add headers to an answer: the fast path's answers pass through copies of them.
#
# Relies on ``CORSMiddleware`` and ``XRequestIdMiddleware`` being among the application's layers, each with the next one
# as ``app``, and on both changing only the headers of an answer.


def with_header_layers(app: Any, answer: ASGIApp) -> ASGIApp:
    """Return ``answer`` wrapped in copies of those layers of ``app`` that add headers."""
    layers: list[Any] = []
    while app is not None:
        if isinstance(app, (CORSMiddleware, XRequestIdMiddleware)):
            layers.append(app)
        app = getattr(app, "app", None)
    for layer in reversed(layers):
        outer = copy.copy(layer)
        outer.app = answer
        answer = outer
    return answer
