"""An engine's description and present load, in the form that routers get."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet.protocol import EngineStatus, KVEvents, Revision
from tercet.vllm_plugin.core.core_methods import EngineDescription
from tercet.vllm_plugin.edge.adapters import Adapters
from tercet.vllm_plugin.edge.call_reader import CallReader
from tercet.vllm_plugin.edge.liveness_probe import LivenessProbe

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class StatusReport:
    """The status of the engine ``name``. ``incarnation`` is the id of this start of its API server."""

    def __init__(
        self, client: AsyncLLM, name: str, incarnation: str, description: EngineDescription, reader: CallReader,
        probe: LivenessProbe, adapters: Adapters, revision: Revision,
    ) -> None:  # fmt: skip
        self._client = client
        self._name = name
        self._incarnation = incarnation
        self._layout = description.layout
        self._reader = reader
        self._probe = probe
        self._adapters = adapters
        self._revision = revision
        events = description.kv_events
        self._kv_events = None if events is None else KVEvents(**events, epoch=incarnation)

    async def now(self) -> EngineStatus:
        """Return the present load, leases and sends; the last known ones if the core is stuck."""
        await self._probe.news()
        return EngineStatus(
            engine=self._name,
            model=self._reader.served_name,
            version=self._revision.tercet,
            vllm_version=self._revision.vllm,
            block_size=self._layout.block_size,
            max_model_len=self._reader.limits.max_model_len,
            kv_events=self._kv_events,
            incarnation=self._incarnation,
            fingerprint=self._revision.weights,
            layout=self._layout,
            text=self._revision.text,
            dtype=self._layout.dtype,
            model_dtype=str(self._client.vllm_config.model_config.dtype).removeprefix("torch."),
            stalled_s=self._probe.stalled_s,
            counters=self._probe.counters,
            max_adapters=self._adapters.most,
            adapters=await self._adapters.reports(),
            **self._probe.core_status,
        )
