"""Tells vLLM's metrics of tokens that its own path did not see.

Relies on what ``IterationStats.update_from_output`` does for a token after the first: the request's token count and
time of last token, the gap between the two, and the iteration's token count.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from vllm.v1.metrics.stats import IterationStats, RequestStateStats

# One "iteration" of vLLM's metrics is what was streamed in this time: recording costs as much as several tokens do.
RECORD_SECONDS = 0.5


class StreamStats:
    """Gathers what tokens took and hands it to vLLM's loggers now and then; does nothing without loggers."""

    def __init__(self, loggers: Any | None) -> None:
        self._loggers = loggers
        self._iteration: IterationStats | None = None

    def iteration(self) -> IterationStats | None:
        """Where vLLM's own path notes what it sees now; None without loggers."""
        if self._loggers is None:
            return None
        gathered = self._gather(0)
        gathered.iteration_timestamp = time.time()  # latencies are counted to it
        return gathered

    def observe(self, request: RequestStateStats | None, num_tokens: int) -> None:
        """A request had ``num_tokens`` more, in one output."""
        if self._loggers is None or request is None:
            return
        now = time.monotonic()
        self._gather(num_tokens).inter_token_latencies_iter.append(now - request.last_token_ts)
        request.last_token_ts = now
        request.num_generation_tokens += num_tokens

    def count(self, request: RequestStateStats | None, num_tokens: int) -> None:
        """As :meth:`observe`, for tokens whose output vLLM's own path is going to observe."""
        if self._loggers is not None and request is not None:
            self._gather(num_tokens)
            request.num_generation_tokens += num_tokens

    def record(self) -> None:
        """Hand over what was gathered."""
        gathered, self._iteration = self._iteration, None
        if gathered is not None and self._loggers is not None:
            self._loggers.record(scheduler_stats=None, iteration_stats=gathered)

    def _gather(self, num_tokens: int) -> IterationStats:
        if self._iteration is None:
            self._iteration = IterationStats()
            asyncio.get_running_loop().call_later(RECORD_SECONDS, self.record)
        self._iteration.num_generation_tokens += num_tokens
        return self._iteration
