"""One engine's edge: what the verbs share in the process that serves them, and the engine's status.

The verbs are the functions of :mod:`.receiving`, :mod:`.sending` and :mod:`.generating`, with an :class:`Edge` as their
first argument. Every exit gives back the resources that were taken here: a lease's timer, a send, a request.
"""

from __future__ import annotations

import uuid

from tercet import __version__
from tercet.aio import TaskSet
from tercet.engine.agents import AgentCalls, AgentReports
from tercet.engine.block_tables import Bypass, open_table
from tercet.engine.calls import CallReader
from tercet.engine.interface import AdapterTable, EngineDescription, GenerationHalf, SchedulerHalf
from tercet.engine.lease_timers import LeaseTimers
from tercet.engine.liveness_probe import LivenessProbe
from tercet.engine.sequences import SequenceTable, SequenceWork
from tercet.protocol import EngineStatus, KVEvents, Revision
from tercet.protocol.addresses import TextFingerprint

UNKNOWN_TEXT = TextFingerprint()


class Edge:
    """The edge of the engine ``name``: its two halves, its agents, and the ledgers of what the verbs have begun.

    ``secret`` is the fleet's, or empty. ``incarnation`` is the id of this start of the process.
    """

    def __init__(
        self, name: str, description: EngineDescription, core: SchedulerHalf, generation: GenerationHalf,
        agents: AgentCalls, adapters: AdapterTable, probe: LivenessProbe,
        secret: str = "", text: TextFingerprint = UNKNOWN_TEXT,
    ) -> None:  # fmt: skip
        self.name, self.secret = name, secret
        self.incarnation = uuid.uuid4().hex
        self.description, self.layout = description, description.layout
        self.core, self.generation = core, generation
        self.agents, self.adapters, self.probe = agents, adapters, probe
        self.reader = CallReader(generation, adapters)
        self.tasks, self.work = TaskSet(), SequenceWork()
        self.leases = LeaseTimers(core, agents, self.tasks, description.reserve_wait)
        adapters.count_users(self.leases.adapters)
        self.generated = SequenceTable(core.sequences)
        self.reports = AgentReports(len(description.transports), self.leases.note, description.host)
        tables = description.tables
        self.bypass = None if tables is None else Bypass(open_table(tables), self.layout.block_size)
        self.revision = Revision(__version__, generation.version, self.layout.model, text, self.layout)

    async def abort(self, seq_id: str) -> bool:
        """End the sequence's reservation, sends and generation; return whether there was any."""
        found = self.work.stop(seq_id)
        return await self.leases.abort(seq_id) or found

    async def status(self) -> EngineStatus:
        """Return the present load, leases and sends; the last known ones if the core is stuck."""
        await self.probe.news()
        events, generation = self.description.kv_events, self.generation
        return EngineStatus(
            engine=self.name,
            model=generation.model,
            version=self.revision.tercet,
            vllm_version=self.revision.vllm,
            block_size=self.layout.block_size,
            max_model_len=generation.limits.max_model_len,
            kv_events=None if events is None else KVEvents(**events, epoch=self.incarnation),
            incarnation=self.incarnation,
            fingerprint=self.revision.weights,
            layout=self.layout,
            text=self.revision.text,
            dtype=self.layout.dtype,
            model_dtype=generation.model_dtype,
            stalled_s=self.probe.stalled_s,
            counters=self.probe.counters,
            max_adapters=self.adapters.most,
            adapters=await self.adapters.reports(),
            **self.probe.core_status,
        )
