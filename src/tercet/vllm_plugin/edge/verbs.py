"""The verbs, carried out in the API server's process; the core owns the blocks, and is called from here to free them.

Every exit gives back the resources that were taken here: a lease's timer, a send, a request.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING

from tercet import __version__
from tercet.aio import TaskSet
from tercet.protocol import EngineStatus, Output, Request, Reservation, Revision, Sent, SequenceReport
from tercet.protocol.addresses import TextFingerprint
from tercet.protocol.wire import (
    MoveCall,
    PrepRecvAnswer,
    PrepRecvCall,
    RemoteSendCall,
    StartGenerateCall,
    StreamDestination,
)
from tercet.transport import AsyncControlClient, ReadCounters
from tercet.vllm_plugin.core import core_methods
from tercet.vllm_plugin.core.connector_messages import TercetParams
from tercet.vllm_plugin.core.core_methods import CoreCalls, EngineDescription
from tercet.vllm_plugin.edge import agent_metrics
from tercet.vllm_plugin.edge.adapters import Adapters
from tercet.vllm_plugin.edge.agent_calls import AgentCalls
from tercet.vllm_plugin.edge.agent_reports import AgentReports
from tercet.vllm_plugin.edge.call_reader import Call, CallReader
from tercet.vllm_plugin.edge.first_uses import practise_first_uses
from tercet.vllm_plugin.edge.generating import GeneratingVerb
from tercet.vllm_plugin.edge.lease_timers import LeaseTimers
from tercet.vllm_plugin.edge.liveness_probe import LivenessProbe
from tercet.vllm_plugin.edge.load_meter import LoadMeter
from tercet.vllm_plugin.edge.receiving import ReceivingVerb
from tercet.vllm_plugin.edge.sending import SendingVerb
from tercet.vllm_plugin.edge.sequence_table import SequenceTable
from tercet.vllm_plugin.edge.sequence_work import SequenceWork
from tercet.vllm_plugin.edge.status_report import StatusReport
from tercet.vllm_plugin.edge.text_fingerprint import text_fingerprint
from tercet.vllm_plugin.hooks import vllm_version
from tercet.vllm_plugin.start.plugin_settings import MAX_REQUEST_BYTES
from tercet.wire.streams import RouterConnections

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

UNKNOWN_TEXT = TextFingerprint()


class EngineVerbs:
    """One engine's verbs, by subject: receiving, sending, generating, and reports of the engine."""

    def __init__(
        self,
        client: AsyncLLM,
        name: str,
        core: CoreCalls,
        description: EngineDescription,
        agents: AgentCalls,
        probe: LivenessProbe,
        adapters: Adapters,
        secret: str = "",
        longest_call: int = MAX_REQUEST_BYTES,
        text: TextFingerprint = UNKNOWN_TEXT,
    ) -> None:
        self.name = name
        self.incarnation = uuid.uuid4().hex
        self.revision = Revision(__version__, vllm_version(), description.layout.model, text, description.layout)
        self.adapters = adapters
        self._client = client
        self._tasks, self._work = TaskSet(), SequenceWork()
        self._reader = CallReader(client, adapters)
        self.leases = LeaseTimers(core, agents, self._tasks, description.reserve_wait)
        adapters.count_users(self.leases.adapters)
        self._generated = SequenceTable(partial(core.call, core_methods.sequences))
        self._reports = AgentReports(len(description.transports), self.leases.note, description.host)
        reader, reports, work = self._reader, self._reports, self._work
        self._receiving = ReceivingVerb(name, secret, description, reader, self.leases, work, reports.address)
        self._sending = SendingVerb(
            client, secret, description, reader, core, agents, reports, probe, self._generated, work, self._tasks
        )  # fmt: skip
        self._generating = GeneratingVerb(
            client, description.token, reader, adapters, self.leases, self._generated, work
        )  # fmt: skip
        self._status = StatusReport(client, name, self.incarnation, description, reader, probe, adapters, self.revision)
        self.meter = LoadMeter(client, probe, adapters)
        self.router_connections = RouterConnections(
            name, self.incarnation, self.meter.load, self.stream_generate, longest_call
        )  # fmt: skip

    @classmethod
    async def attach(cls, client: AsyncLLM, name: str, secret: str, adapters: Adapters, longest: int) -> EngineVerbs:
        """Return the verbs of the engine behind ``client``. Raises ``EngineError`` without the connector.

        ``secret`` is the fleet's, or empty. A call has at most ``longest`` bytes.
        """
        core = CoreCalls(client)
        description = await core.call(core_methods.describe)
        agents = [AsyncControlClient(*endpoint) for endpoint in description.agents]
        workers = [AsyncControlClient(*endpoint) for endpoint in description.workers]
        counters = [[partial(each.call, ReadCounters()) for each in asked] for asked in (agents, workers)]
        probe = LivenessProbe(partial(core.call, core_methods.status), *counters)
        await probe.start()
        await practise_first_uses(client, core, description.token)
        agent_metrics.export(probe)
        has_text = not client.vllm_config.model_config.skip_tokenizer_init
        text = text_fingerprint(client.get_tokenizer()) if has_text else UNKNOWN_TEXT
        return cls(client, name, core, description, AgentCalls(agents), probe, adapters, secret, longest, text)

    # ---- the three verbs ---------------------------------------------------------------------------------------

    async def prep_recv(self, call: PrepRecvCall) -> PrepRecvAnswer:
        """Match the prompt's prefix and reserve blocks for the rest; or extend a lease."""
        return await self._receiving.prep_recv(call)

    async def remote_send(self, call: RemoteSendCall) -> Sent:
        """Get the KV and push it; return when every rank has acknowledged it."""
        return await self._sending.remote_send(call)

    def start_generate(self, call: StartGenerateCall) -> AsyncGenerator[Output, None]:
        """Decode, on the sequence's reservation if there is one; yield outputs, including the last one."""
        return self._generating.start_generate(call)

    async def stream_generate(self, call: StartGenerateCall, router: StreamDestination) -> None:
        """Decode, and send the outputs to a router; return once the engine has the request."""
        connection = await self.router_connections.connect(router.address, router.key)
        await self._generating.stream(call, connection, router)

    # ---- their end -----------------------------------------------------------------------------------------------

    async def release(self, lease: str) -> int:
        """End a lease; return the number of tokens whose KV is valid.

        Raises ``UnknownSequence`` if it has ended already.
        """
        return await self.leases.release(lease)

    async def abort(self, seq_id: str) -> bool:
        """End the sequence's reservation, sends and generation; return whether there was any."""
        found = self._work.stop(seq_id)
        return await self.leases.abort(seq_id) or found

    # ---- for requests of vLLM's own API ----------------------------------------------------------------------

    def reserved(self, request: Request, end: int | None) -> AbstractAsyncContextManager[Reservation]:
        """Reserve as :meth:`prep_recv` does; the lease ends with the context unless it is adopted."""
        return self._receiving.reserved(request, end)

    def adopted(self, request: Request) -> AbstractAsyncContextManager[TercetParams | None]:
        """Provide the core's parameters for a request of vLLM's API that decodes on its reservation; None without one.

        The context ends with the request: then all resources that the core has not taken are given back.
        """
        return self._generating.adopted(request)

    # ---- what the engine reports -------------------------------------------------------------------------------

    def model_of(self, call: Call) -> str:
        """Return the name of the LoRA adapter of a call, or of the model."""
        return self._reader.model_of(call)

    async def status(self) -> EngineStatus:
        """Return this engine's present load, leases and sends; the last known ones if the core is stuck."""
        return await self._status.now()

    async def sequences(self) -> list[SequenceReport]:
        """Return the sequences that this engine generates; if the core is stuck, with its last answer."""
        return await self._generated.reports()

    def propose_move(self, seq_id: str, call: MoveCall) -> None:
        """Pass a proposal to move a sequence on to the router that runs the sequence.

        ``seq_id`` is this engine's id for it, or its client's. Raises ``UnknownSequence``, and ``Conflict`` if no
        router receives its tokens.
        """
        self._generated.propose_move(seq_id, call)

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
        return self.core_is_lost or not (running or len(self._work) or len(self.leases))
