"""Tercet's part of one vLLM API server: the verbs' edge on vLLM's client, its load, and the connections to routers.

Code of vLLM that is slow the first time (compiled sampling, grammars) runs before an engine accepts requests, so that
no client waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import REGISTRY

from tercet.engine import verbs
from tercet.engine.agents import AgentCalls, ProbeCollector
from tercet.engine.edge import UNKNOWN_TEXT, Edge
from tercet.engine.interface import KeyedPrompt
from tercet.engine.liveness_probe import LivenessProbe
from tercet.protocol import EngineLoad, TercetError
from tercet.transport import AsyncControlClient, ReadCounters
from tercet.vllm_plugin.core import core_methods
from tercet.vllm_plugin.core.connector_messages import BACKGROUND_PREFIX, TercetParams
from tercet.vllm_plugin.core.core_methods import CoreCalls
from tercet.vllm_plugin.edge.adapters import Adapters
from tercet.vllm_plugin.edge.llm_requests import LLMGeneration, LLMRequest
from tercet.vllm_plugin.start import process_output
from tercet.vllm_plugin.start.before_forks import text_fingerprint
from tercet.wire.streams import RouterConnections

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import SchedulerStats


logger = logging.getLogger(__name__)
FIRST_USE_SECONDS = 120.0
PROMPT = [0, 0]


class FirstUse(NamedTuple):
    """Requests with ``params``, ``at_once`` of them at a time; ``what`` names the code that is slow the first time."""

    what: str
    at_once: int
    params: Mapping[str, Any]


GRAMMAR = FirstUse("structured output", 1, {"structured_outputs": {"regex": "a"}, "max_tokens": 1, "temperature": 0})
SAMPLING = (
    # vLLM compiles sampling, and the ranking of log probabilities, at their first use.
    FirstUse("sampling", 1, {"temperature": 1.0, "max_tokens": 1, "logprobs": 1}),
    # Code that was compiled for one row is compiled again for several. The second token is sampled for both together.
    FirstUse("sampling of several", 2, {"temperature": 1.0, "max_tokens": 2, "ignore_eos": True}),
)


async def practise_first_uses(client: AsyncLLM, core: CoreCalls, token: str) -> None:
    """Run the first uses, before any other request is accepted. A failure is logged, and the engine serves."""
    began = time.monotonic()
    process_output.begin(process_output.FIRST_REQUESTS)
    for use in SAMPLING:
        await _practise(use, client, token)
    if not client.vllm_config.model_config.skip_tokenizer_init:  # grammars need a tokenizer
        try:
            await _practise(GRAMMAR, client, token)
        finally:
            await core.call(core_methods.forget_grammar_backend)
    logger.info("ran the slow first uses in %.1f s", time.monotonic() - began)


async def _practise(use: FirstUse, client: AsyncLLM, token: str) -> None:
    async def one() -> None:
        async for _ in LLMRequest(client, KeyedPrompt(PROMPT), use.params, TercetParams(token)).outputs():
            pass

    try:
        async with asyncio.timeout(FIRST_USE_SECONDS), asyncio.TaskGroup() as group:
            for _ in range(use.at_once):
                group.create_task(one())
    except* (TercetError, TimeoutError) as failures:
        why = str(failures.exceptions[0]) or "no answer"
        logger.warning("the first use of %s will be slow: a practice request failed: %s", use.what, why)


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
        count. ``tokens`` are the prompts without a first token, but for those of others and of the background.
        """
        processor = self._client.output_processor
        requests = processor.get_num_unfinished_requests()
        stats, core = self._stats, self._probe.core_status
        states = [(key, state) for key, state in processor.request_states.items() if state.is_prefilling]
        tokens = sum(state.prompt_len for key, state in states if not key.startswith(BACKGROUND_PREFIX))
        # The statistics are those of the last step; requests that have ended or were aborted since are gone already.
        running = min(stats.num_running_reqs if stats is not None else core["running"], requests)
        return EngineLoad(
            waiting=requests - running,
            running=running,
            kv_usage=stats.kv_cache_usage if stats is not None else core["kv_cache_usage"],
            tokens=max(0, tokens - self._elsewhere),  # aborted requests are in the latter only
            step_time=self._step_time,
            stalled_s=self._probe.stalled_s,
            stopping=self.stopping,
            adapters=self._adapters.load_of(processor),
            paused=core.get("paused", ""),
        )

    def _step(self, stats: SchedulerStats, now: float) -> None:
        # From one step's outputs to the next one's: what a decode waits for each token, scheduling included.
        if self._step_at is not None:
            seconds = now - self._step_at
            before = seconds if self._step_time is None else self._step_time
            self._step_time = before + NEWEST * (seconds - before)
        # Between the last step of some requests and the first step of others no step ran.
        self._step_at = now if stats.num_running_reqs else None
        self._stats = stats


class AttachedEngine:
    """The engine behind ``client`` with its ``edge``. A call of a router has at most ``longest_call`` bytes."""

    def __init__(self, client: AsyncLLM, edge: Edge, adapters: Adapters, longest_call: int) -> None:
        self.edge, self.adapters = edge, adapters
        self._client = client
        self.meter = LoadMeter(client, edge.probe, adapters)
        start = partial(verbs.stream, edge)
        self.router_connections = RouterConnections(edge.name, edge.incarnation, self.meter.load, start, longest_call)

    @classmethod
    async def attach(
        cls, client: AsyncLLM, name: str, secret: str, adapters: Adapters, longest_call: int
    ) -> AttachedEngine:  # fmt: skip
        """Return the engine behind ``client``. Raises ``EngineError`` without the connector."""
        core = CoreCalls(client)
        description = await core.call(core_methods.describe)
        agents = [AsyncControlClient(*endpoint) for endpoint in description.agents]
        workers = [AsyncControlClient(*endpoint) for endpoint in description.workers]
        counters = [[partial(each.call, ReadCounters()) for each in asked] for asked in (agents, workers)]
        probe = LivenessProbe(partial(core.call, core_methods.status), *counters)
        await probe.start()
        # Before the verbs are served: the first request of a client must not wait for code that is compiled once.
        await practise_first_uses(client, core, description.token)
        REGISTRY.register(ProbeCollector(probe))  # vLLM serves it
        has_text = not client.vllm_config.model_config.skip_tokenizer_init
        text = text_fingerprint(client.get_tokenizer()) if has_text else UNKNOWN_TEXT
        generation = LLMGeneration(client, description.token)
        edge = Edge(name, description, core, generation, AgentCalls(agents), adapters, probe, secret, text)
        return cls(client, edge, adapters, longest_call)

    def announce_stop(self) -> int:
        """Notify the routers that this engine stops when it is empty; return their number."""
        self.meter.stopping = True
        return self.router_connections.tell_now()

    @property
    def core_is_lost(self) -> bool:
        return self._client.errored

    @property
    def is_empty(self) -> bool:
        """True if the engine has no leases and no work, by the verbs or vLLM's own API; or if its core has ended."""
        running = self._client.output_processor.get_num_unfinished_requests()
        return self.core_is_lost or not (running or len(self.edge.work) or len(self.edge.leases))
