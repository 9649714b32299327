"""A way out of a deadlock: requests that hold blocks and wait give them back if otherwise none of them could ever run.

A lease may cover only a part of a prompt, so a request that adopted it may need more blocks. If several such requests
together hold all blocks, and no other request runs that would free more, each would wait for the others for ever. Then
the last of them lose their blocks, as a preempted request does, until the first one's need is met; their KV stays in
the prefix cache until the blocks are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from tercet.vllm_plugin.core.cache_groups import GroupTables

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler


def give_way(scheduler: Scheduler, planned: SchedulerOutput) -> int:
    """Take blocks from waiting requests if the ``planned`` step computes nothing; return their number."""
    if planned.total_num_scheduled_tokens or scheduler.running or len(scheduler.kv_holding_waiting) < 2:
        return 0
    first, *others = scheduler.kv_holding_waiting
    others = [request for request in others if request.status == RequestStatus.WAITING]
    pool, tables = scheduler.kv_cache_manager.block_pool, GroupTables(scheduler.kv_cache_manager)
    missing = scheduler._request_remaining_blocks(first) - pool.get_num_free_blocks()
    held = [tables.held(request.request_id) for request in others]
    if not 0 < missing <= sum(held):
        return 0
    given = 0
    while missing > 0:
        request = others.pop()
        missing -= held.pop()
        scheduler.kv_holding_waiting.remove_request(request)
        scheduler._free_request_blocks(request)
        request.num_computed_tokens = 0
        scheduler.waiting.prepend_request(request)
        given += 1
    return given
