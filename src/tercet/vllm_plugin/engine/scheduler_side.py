"""The scheduler's half: what requests of ours become, and what each step orders the workers to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet.vllm_plugin.engine.connector_messages import StepMetadata, TercetParams
from tercet.vllm_plugin.engine.giving_way import give_way
from tercet.vllm_plugin.engine.reservation_queue import ReservationQueue
from tercet.vllm_plugin.engine.reservations import Reservations
from tercet.vllm_plugin.engine.resume import ResumedRequests
from tercet.vllm_plugin.engine.send_planner import SendPlanner
from tercet.vllm_plugin.engine.table_publisher import TablePublisher

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request as VLLMRequest


class SchedulerSide:
    """What one scheduler holds for others. Everything here runs on the scheduler's thread.

    ``max_lease_blocks`` caps what leases pin together; ``tables`` publishes where sequences lie, if that can be had.
    """

    def __init__(self, scheduler: Scheduler, max_lease_blocks: int, tables: TablePublisher | None) -> None:
        self._scheduler = scheduler
        self.reservations = Reservations(scheduler, max_lease_blocks)
        self.queue = ReservationQueue(scheduler, self.reservations)
        self.sends = SendPlanner(scheduler)
        self.resumed = ResumedRequests(scheduler)
        self.tables = tables

    def begin(self, request: VLLMRequest, params: TercetParams) -> None:
        """A request arrived that sends its KV, stands on a reservation, or goes on with output from elsewhere."""
        if params.send is not None:
            self.sends.begin(request, params.send)
        if params.seq is not None and params.seq.output:
            self.resumed.begin(request, params.seq.output)
        if params.seq is not None and params.seq.lease is not None:
            self.reservations.adopt(params.seq.lease, params.seq.valid_end, request)
        if params.seq is not None and params.seq.number and self.tables is not None:
            self.tables.follow(request, params.seq.number)

    def plan(self, output: SchedulerOutput) -> StepMetadata:
        """The orders of the step that ``output`` describes."""
        metadata = StepMetadata()
        if not give_way(self._scheduler, output):
            self.queue.admit()
        self.sends.plan(output, metadata)
        self.resumed.plan(output, metadata)
        if self.tables is not None:
            self.tables.publish_planned()
        return metadata

    def stepped(self) -> None:
        """A step is over, and what it has computed is counted."""
        self.sends.stepped()
        if self.tables is not None:
            self.tables.publish()

    def finished(self, request_id: str) -> None:
        """A request is over. Its blocks are vLLM's to free; those on their way to a peer stay pinned by its send."""
        self.resumed.forget(request_id)
        if self.tables is not None:
            self.tables.forget(request_id)
