"""Adds to vLLM's metrics what its own path did not see: requests that bypassed its layers, and streamed tokens.

Relies on ``PrometheusInstrumentatorMiddleware`` being one of the application's layers, each with the next one as
``app``, and on its ``instrumentations`` taking the data of a request as one ``Info``; and on the updates of
``IterationStats.update_from_output`` for a token after the first: the request's token count and time of last token, the
gap between the two, and the iteration's token count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_fastapi_instrumentator.metrics import Info
from prometheus_fastapi_instrumentator.middleware import PrometheusInstrumentatorMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope
from vllm.v1.metrics.stats import IterationStats, RequestStateStats

# One "iteration" of vLLM's metrics is what was streamed in this time: recording costs as much as several tokens.
RECORD_SECONDS = 0.5
_STREAM = Response()


class HttpMetrics:
    """Counts requests and their durations, as the layers of ``app`` would have."""

    def __init__(self, app: Any) -> None:
        self._observers: Sequence[Callable[[Info], None]] = ()
        layer = app
        while layer is not None:
            if isinstance(layer, PrometheusInstrumentatorMiddleware):
                self._observers = layer.instrumentations
            layer = getattr(layer, "app", None)

    @property
    def found(self) -> bool:
        """Whether there are metrics to update."""
        return bool(self._observers)

    def observe(self, scope: Scope, handler: str, seconds: float) -> None:
        """Record that a stream of route ``handler`` has ended after ``seconds``."""
        info = Info(Request(scope), _STREAM, "POST", handler, "2xx", seconds, seconds)
        for observe in self._observers:
            observe(info)


class StreamStats:
    """Collects statistics of tokens and passes them to vLLM's loggers at intervals; does nothing without loggers."""

    def __init__(self, loggers: Any | None) -> None:
        self._loggers = loggers
        self._iteration: IterationStats | None = None

    def iteration(self) -> IterationStats | None:
        """The object in which vLLM's own path records now; None without loggers."""
        if self._loggers is None:
            return None
        gathered = self._gather(0)
        gathered.iteration_timestamp = time.time()  # latencies are measured up to it
        return gathered

    def observe(self, request: RequestStateStats | None, num_tokens: int) -> None:
        """Record ``num_tokens`` more of a request, in one output."""
        if self._loggers is None or request is None:
            return
        now = time.monotonic()
        self._gather(num_tokens).inter_token_latencies_iter.append(now - request.last_token_ts)
        request.last_token_ts = now
        request.num_generation_tokens += num_tokens

    def count(self, request: RequestStateStats | None, num_tokens: int) -> None:
        """As :meth:`observe`, for tokens whose output vLLM's own path will observe."""
        if self._loggers is not None and request is not None:
            self._gather(num_tokens)
            request.num_generation_tokens += num_tokens

    def record(self) -> None:
        """Pass on what was collected."""
        gathered, self._iteration = self._iteration, None
        if gathered is not None and self._loggers is not None:
            self._loggers.record(scheduler_stats=None, iteration_stats=gathered)

    def _gather(self, num_tokens: int) -> IterationStats:
        if self._iteration is None:
            self._iteration = IterationStats()
            asyncio.get_running_loop().call_later(RECORD_SECONDS, self.record)
        self._iteration.num_generation_tokens += num_tokens
        return self._iteration
