"""The engine's load, from data of its API server's process, without a call to the engine's core."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tercet.engine.liveness_probe import LivenessProbe
from tercet.protocol import EngineLoad
from tercet.vllm_plugin.edge.adapters import Adapters

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import SchedulerStats

# Weight of the newest step in the mean of step times.
NEWEST = 0.2


class LoadMeter:
    """A meter of the engine's load, from the scheduler's statistics that come with every step's outputs.

    Relies on ``AsyncLLM``'s output handler passing them to ``output_processor.update_scheduler_stats``, looked up on
    the instance for each step. vLLM keeps no statistics with ``--disable-log-stats``; then the last answer to ``probe``
    is reported. ``stopping`` is True if the engine stops. ``adapters`` in use are reported unless vLLM keeps no
    statistics. ``probe`` has what the engine has paused.
    """

    def __init__(self, client: AsyncLLM, probe: LivenessProbe, adapters: Adapters) -> None:
        self._client = client
        self._adapters = adapters
        self._probe = probe
        self._stats: SchedulerStats | None = None
        self._step_at: float | None = None
        self._step_time: float | None = None
        self._elsewhere = 0
        self.stopping = False
        processor = client.output_processor
        update = processor.update_scheduler_stats

        def listen(stats: SchedulerStats | None) -> None:
            update(stats)
            probe.core_progressed()
            if stats is not None:
                self._step(stats, time.monotonic())

        processor.update_scheduler_stats = listen  # type: ignore[method-assign]

    @contextmanager
    def computed_elsewhere(self, tokens: int) -> Generator[None]:
        """Count ``tokens`` of a waiting prompt as computed by another engine in this context."""
        self._elsewhere += tokens
        try:
            yield
        finally:
            self._elsewhere -= tokens

    def load(self) -> EngineLoad:
        """Return the load now.

        Requests that the core has not seen yet count as waiting; requests that it has lost since its last step do not
        count. ``tokens`` are the prompts that have no first token yet, except those that other engines compute.
        """
        processor = self._client.output_processor
        requests = processor.get_num_unfinished_requests()
        stats, core = self._stats, self._probe.core_status
        running = min(stats.num_running_reqs if stats is not None else core["running"], requests)
        return EngineLoad(
            waiting=requests - running,
            running=running,
            kv_usage=stats.kv_cache_usage if stats is not None else core["kv_cache_usage"],
            tokens=max(0, processor.get_num_queued_tokens() - self._elsewhere),  # the queue lacks aborted requests
            step_time=self._step_time,
            stalled_s=self._probe.stalled_s,
            stopping=self.stopping,
            adapters=self._adapters.load_of(processor),
            paused=core.get("paused", ""),
        )

    def _step(self, stats: SchedulerStats, now: float) -> None:
        if self._step_at is not None:
            seconds = now - self._step_at
            before = seconds if self._step_time is None else self._step_time
            self._step_time = before + NEWEST * (seconds - before)
        # Between the last step of some requests and the first step of others no step ran.
        self._step_at = now if stats.num_running_reqs else None
        self._stats = stats
