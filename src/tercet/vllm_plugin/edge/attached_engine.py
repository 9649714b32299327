"""Tercet's part of one vLLM API server: the verbs' edge on vLLM's client, and the connections to routers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY

from tercet.engine import generating
from tercet.engine.agent_metrics import ProbeCollector
from tercet.engine.agents import AgentCalls
from tercet.engine.edge import UNKNOWN_TEXT, Edge
from tercet.engine.liveness_probe import LivenessProbe
from tercet.engine.text_fingerprint import text_fingerprint
from tercet.protocol.wire import StartGenerateCall, StreamDestination
from tercet.transport import AsyncControlClient, ReadCounters
from tercet.vllm_plugin.core import core_methods
from tercet.vllm_plugin.core.core_methods import CoreCalls
from tercet.vllm_plugin.edge.adapters import Adapters
from tercet.vllm_plugin.edge.first_uses import practise_first_uses
from tercet.vllm_plugin.edge.llm_requests import LLMGeneration
from tercet.vllm_plugin.edge.load_meter import LoadMeter
from tercet.vllm_plugin.start.plugin_settings import MAX_REQUEST_BYTES
from tercet.wire.streams import RouterConnections

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class AttachedEngine:
    """The engine behind ``client`` with its ``edge``. A call of a router has at most ``longest_call`` bytes."""

    def __init__(
        self, client: AsyncLLM, edge: Edge, adapters: Adapters, longest_call: int = MAX_REQUEST_BYTES
    ) -> None:  # fmt: skip
        self.edge, self.adapters = edge, adapters
        self._client = client
        self.meter = LoadMeter(client, edge.probe, adapters)
        self.router_connections = RouterConnections(
            edge.name, edge.incarnation, self.meter.load, self.stream_generate, longest_call
        )  # fmt: skip

    @classmethod
    async def attach(
        cls, client: AsyncLLM, name: str, secret: str, adapters: Adapters, longest_call: int
    ) -> AttachedEngine:  # fmt: skip
        """Return the engine behind ``client``. Raises ``EngineError`` without the connector.

        ``secret`` is the fleet's, or empty.
        """
        core = CoreCalls(client)
        description = await core.call(core_methods.describe)
        agents = [AsyncControlClient(*endpoint) for endpoint in description.agents]
        workers = [AsyncControlClient(*endpoint) for endpoint in description.workers]
        counters = [[partial(each.call, ReadCounters()) for each in asked] for asked in (agents, workers)]
        probe = LivenessProbe(partial(core.call, core_methods.status), *counters)
        await probe.start()
        await practise_first_uses(client, core, description.token)
        REGISTRY.register(ProbeCollector(probe))  # vLLM serves it
        has_text = not client.vllm_config.model_config.skip_tokenizer_init
        text = text_fingerprint(client.get_tokenizer()) if has_text else UNKNOWN_TEXT
        generation = LLMGeneration(client, description.token)
        edge = Edge(name, description, core, generation, AgentCalls(agents), adapters, probe, secret, text)
        return cls(client, edge, adapters, longest_call)

    async def stream_generate(self, call: StartGenerateCall, router: StreamDestination) -> None:
        """Decode, and send the outputs to a router; return once the engine has the request."""
        connection = await self.router_connections.connect(router.address, router.key)
        await generating.stream(self.edge, call, connection, router)

    def announce_stop(self) -> int:
        """Notify the routers that this engine stops when it is empty; return their number."""
        self.meter.stopping = True
        return self.router_connections.tell_now()

    @property
    def core_is_lost(self) -> bool:
        """True if the engine's core has ended by itself or was killed."""
        return self._client.errored

    @property
    def is_empty(self) -> bool:
        """True if the engine has no leases and no work, by the verbs or vLLM's own API; or if its core has ended."""
        running = self._client.output_processor.get_num_unfinished_requests()
        return self.core_is_lost or not (running or len(self.edge.work) or len(self.edge.leases))
