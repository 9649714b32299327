"""The scheduler's half of the connector: handling of Tercet's requests, and each step's orders to the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet.vllm_plugin.core.connector_messages import StepMetadata, TercetParams
from tercet.vllm_plugin.core.giving_way import give_way
from tercet.vllm_plugin.core.reservation_queue import ReservationQueue
from tercet.vllm_plugin.core.reservations import Reservations
from tercet.vllm_plugin.core.resume import ResumedRequests
from tercet.vllm_plugin.core.send_planner import SendPlanner
from tercet.vllm_plugin.core.table_publisher import TablePublisher

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request as VLLMRequest


class SchedulerSide:
    """State of one scheduler for other engines. All methods run on the scheduler's thread.

    ``max_lease_blocks`` limits the blocks that leases pin together; ``tables`` publishes where the KV of sequences is,
    if that is possible.
    """

    def __init__(self, scheduler: Scheduler, max_lease_blocks: int, tables: TablePublisher | None) -> None:
        self._scheduler = scheduler
        self.reservations = Reservations(scheduler, max_lease_blocks)
        self.queue = ReservationQueue(scheduler, self.reservations)
        self.sends = SendPlanner(scheduler)
        self.resumed = ResumedRequests(scheduler)
        self.tables = tables

    def begin(self, request: VLLMRequest, params: TercetParams) -> None:
        """Begin a request that sends its KV, uses a reservation, or continues output from another engine."""
        if params.send is not None:
            self.sends.begin(request, params.send)
        if params.seq is not None and params.seq.output:
            self.resumed.begin(request, params.seq.output)
        if params.seq is not None and params.seq.lease is not None:
            self.reservations.adopt(params.seq.lease, params.seq.valid_end, request)
        if params.seq is not None and params.seq.number and self.tables is not None:
            self.tables.follow(request, params.seq.number)

    def plan(self, output: SchedulerOutput) -> StepMetadata:
        """Return the orders of the step that ``output`` describes."""
        metadata = StepMetadata()
        if not give_way(self._scheduler, output):
            self.queue.admit()
        self.sends.plan(output, metadata)
        self.resumed.plan(output, metadata)
        if self.tables is not None:
            self.tables.publish_planned()
        return metadata

    def stepped(self) -> None:
        """Record that a step has ended and that its results are counted."""
        self.sends.stepped()
        if self.tables is not None:
            self.tables.publish()

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended. vLLM frees its blocks; a send keeps its own blocks pinned."""
        self.resumed.forget(request_id)
        if self.tables is not None:
            self.tables.forget(request_id)
