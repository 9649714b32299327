"""Publication of the core's running sequences with each step, so that they are known when the core is stuck.

This code runs on the scheduler's thread. KV of a running request is rewritten only after its blocks were freed and
allocated again from the block pool. Therefore, before the pool allocates anything, the published tables are revoked
(:meth:`~tercet.engine.block_tables.BlockTableWriter.revoke`); they are guaranteed again once the step that
took the blocks is planned.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import is_
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from tercet.engine.block_tables import BlockTableWriter, TablePlace, TableShape, create_table, row_owner
from tercet.transport import CoreWords
from tercet.vllm_plugin.core.cache_groups import GroupTables

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request as VLLMRequest

logger = logging.getLogger(__name__)
EPOCH_BITS = 48


@dataclass
class Followed:
    """A request that decodes for a sequence. ``blocks`` are those in ``rows``; each group of layers has one row.

    ``since`` is the number of computed tokens when the request was first seen running, after ``preemptions``.
    """

    request: VLLMRequest
    owner: int
    preemptions: int = 0
    since: int | None = None
    rows: list[int] = field(default_factory=list)
    blocks: list[list[KVCacheBlock]] = field(default_factory=list)


class TablePublisher:
    """Publisher of the block tables of the requests that it follows, at ``place``."""

    def __init__(self, scheduler: Scheduler, writer: BlockTableWriter, place: TablePlace) -> None:
        self.place = place
        self._writer = writer
        self._followed: dict[str, Followed] = {}
        groups = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._blocks_of = [group.req_to_blocks for group in groups]
        pool = scheduler.kv_cache_manager.block_pool
        hand_out = pool.get_new_blocks

        def revoke_and_hand_out(num_blocks: int) -> list[KVCacheBlock]:
            writer.revoke()
            return hand_out(num_blocks)

        pool.get_new_blocks = revoke_and_hand_out

    @classmethod
    def begin(cls, scheduler: Scheduler, words: Sequence[tuple[str, int]], machines: int) -> TablePublisher | None:
        """Return a publisher for the core of ``scheduler``; ``words`` are the places of the core's words, by rank.

        Returns None, with a warning, if the words cannot be written from here, as on several ``machines``, or if the
        model's layers keep states, which a stuck step may have changed in some layers: then nothing is published.
        """
        tables = GroupTables(scheduler.kv_cache_manager)
        if tables.states:
            logger.warning(
                "sequences of this engine cannot be moved with their KV while its core is stuck: "
                "the model's layers keep states"
            )
            return None
        if machines > 1:  # the same path may be another file on this machine
            logger.warning(
                "sequences of this engine cannot be moved with their KV while its core is stuck: "
                "it has ranks on other machines"
            )
            return None
        try:
            mapped = [CoreWords(*place) for place in words]
        except (OSError, ValueError) as error:
            logger.warning(
                "sequences of this engine cannot be moved with their KV while its core is stuck: "
                "the memory of its workers' KV cannot be reached from the core: %s", error
            )  # fmt: skip
            return None

        def turn(epoch: int) -> None:
            for each in mapped:
                each.turn(epoch)

        groups, row_blocks = len(tables.groups), -(-scheduler.max_model_len // tables.block_size) + 1
        table, place = create_table(TableShape(scheduler.max_num_running_reqs * groups, row_blocks, groups))
        return cls(scheduler, BlockTableWriter(table, place.shape, turn, 1 + secrets.randbits(EPOCH_BITS)), place)

    def follow(self, request: VLLMRequest, owner: int) -> None:
        """Publish a request from its first step on, under the API server's number for it."""
        self._followed[request.request_id] = Followed(request, owner)

    def forget(self, request_id: str) -> None:
        """Stop publishing a request that has ended."""
        found = self._followed.pop(request_id, None)
        if found is not None and found.rows:
            # This may be late: its KV stays until a block is allocated again, which revokes the table.
            self._withdraw(found)

    def publish_planned(self) -> None:
        """Publish the tables after a step was planned and has its blocks, unless they are still valid."""
        if not self._writer.stands:
            self.publish()

    def publish(self) -> None:
        """Publish the tokens computed so far."""
        if self._followed:
            verify = not self._writer.stands
            self._writer.begin()
            for each in self._followed.values():
                self._publish(each, verify)
            self._writer.end()

    def _publish(self, each: Followed, verify: bool) -> None:
        request = each.request
        running = request.status is RequestStatus.RUNNING
        if not running or request.num_preemptions != each.preemptions:
            self._withdraw(each)
            each.preemptions = request.num_preemptions
            if not running:
                return
        # Under asynchronous scheduling, blocks that the request found in the prefix cache may belong to another
        # request's step that has not run. Its own step adds tokens after them; once that step has run, the earlier
        # steps have run, too.
        if each.since is None:
            each.since = request.num_computed_tokens
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        if not each.rows and (computed <= each.since or not self._enter(each)):
            return
        for row, known, blocks_of in zip(each.rows, each.blocks, self._blocks_of, strict=True):
            blocks = blocks_of.get(request.request_id, ())
            if len(known) > len(blocks) or (verify and not all(map(is_, known, blocks))):
                known.clear()
            if len(known) != len(blocks):
                first = len(known)
                known += blocks[first:]
                if not self._writer.blocks(row, first, (block.block_id for block in islice(blocks, first, None))):
                    self._withdraw(each)
                    return
            self._writer.computed(row, computed)

    def _enter(self, each: Followed) -> bool:
        """Add the rows of a sequence, for all of its groups or for none; return whether there was room."""
        for group in range(len(self._blocks_of)):
            row = self._writer.enter(row_owner(each.owner, group, self.place.shape))
            if row is None:
                self._withdraw(each)
                return False
            each.rows.append(row)
            each.blocks.append([])
        return True

    def _withdraw(self, each: Followed) -> None:
        each.since = None
        for row in each.rows:
            self._writer.leave(row)
        each.rows, each.blocks = [], []
