"""The worker's half of the connector: it shares this rank's KV with an agent, and reports finished layers."""

from __future__ import annotations

import os

from msgspec.structs import astuple

from tercet.protocol import KVLayout
from tercet.protocol.addresses import RankRegion
from tercet.transport import AgentProcess, AgentSetup, BlockShape, ControlServer, LayersDone, StepBegins, StepEnds
from tercet.vllm_plugin.core.connector_messages import StepMetadata, WorkerHandshake
from tercet.vllm_plugin.hooks import UnsupportedVLLM
from tercet.vllm_plugin.start.plugin_settings import PluginSettings
from tercet.vllm_plugin.worker.kv_planes import DeviceExport, LayerPlanes, StepLayers


class WorkerSide:
    """One rank: its agent, and the pushes of the current step. The engine's other processes reach it at ``host``."""

    def __init__(self, rank: int, config: PluginSettings, host: str) -> None:
        self._rank = rank
        self._config = config
        self._step = StepMetadata()
        self._device: DeviceExport | None = None
        self._layers = 0
        self._started: AgentProcess | None = None
        # A worker has none of the agents' counters; it answers with the number of layers that it has run.
        self._host = host
        self._life = ControlServer(lambda _: {"layers": self._layers}, host)

    def register(self, planes: LayerPlanes, layout: KVLayout) -> None:
        """Start the agent over the KV cache; called once, before the first forward pass."""
        self._planes_of = planes.planes_of
        self._layout = layout
        self._layers_of_step = StepLayers(len(planes.tensors))
        if planes.device.type != "cpu":
            # The transport of KV on a device that the agent reads directly.
            direct = self._config.transport if self._config.kv_memory == "auto" else "tcp"
            self._device = DeviceExport(planes, direct)
        # On a CPU the cache itself becomes a file that peers map; KV on a device stays there, and the file has only the
        # words by which peers know that a block was not reused.
        kv, shape = planes.share() if self._device is None else planes.share_words()
        try:
            settings = self._config.transport_settings()
            # The parent, the scheduler's process, has all CPUs of the engine; this process only those that compute.
            cpus = self._config.cpus() or os.sched_getaffinity(os.getppid())
            staged, device = self._config.is_staged(planes.device.type), self._device and self._device.handles
            mapped = device is not None and self._config.kv_memory == "auto"
            setup = AgentSetup(
                self._rank, kv, shape, layout.exchange_key, settings, cpus, BlockShape.of(layout), staged, device,
                mapped, self._device and self._device.rdma, self._host,
            )  # fmt: skip
            self._started = AgentProcess(setup)
            self._region = RankRegion(shape.groups or (len(shape.planes),), shape.order and astuple(shape.order))
            self._words = f"/proc/{self._agent.pid}/fd/{kv}", shape.words  # the agent inherits the descriptor's number
        finally:
            os.close(kv)  # the agent has its own; the mapping stays

    @property
    def _agent(self) -> AgentProcess:
        if self._started is None:
            raise UnsupportedVLLM("vLLM has not registered this rank's KV cache with its connector")
        return self._started

    def handshake(self) -> WorkerHandshake:
        ready = self._agent.ready
        agent, life = (ready.control, ready.secret), (self._life.address, self._life.secret)
        return WorkerHandshake(list(ready.addresses), agent, life, self._layout, self._region, self._words)

    def begin_step(self, metadata: StepMetadata) -> None:
        self._step = metadata
        # Before the step computes: its first layer may be pushed as soon as it is done.
        if metadata.opened or metadata.pushes:
            self._agent.send(StepBegins(tuple(metadata.opened), tuple(metadata.pushes)))
        self._layers_of_step.begin(sum(len(push.blocks) for push in metadata.pushes) * self._layout.block_bytes)

    def save_layer(self, layer_name: str) -> None:
        """Push what this step completes in one layer. On a device it is only queued: the agent waits for it."""
        self._layers += 1
        if self._step.pushes:
            self._report_layers(self._layers_of_step.saved(self._planes_of[layer_name]))

    def end_step(self) -> None:
        self._layers += 1  # a step that runs as one graph calls no layer's hook, but is also progress
        self._report_layers(self._layers_of_step.ended())
        if self._step.finish or self._step.pushes:
            self._agent.send(StepEnds(tuple(self._step.finish)))
        self._step = StepMetadata()

    def _report_layers(self, planes: tuple[int, ...]) -> None:
        if planes:
            self._agent.send(LayersDone(planes, None if self._device is None else self._device.computed()))

    def close(self) -> None:
        if self._started is not None:
            self._started.close()
        self._life.close()
