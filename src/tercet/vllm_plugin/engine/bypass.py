"""Where the KV of running sequences lies, for sends on which a core that stands still cannot be asked.

The API server's process knows the tokens of every sequence that decodes here, for they came by it. What it lacks is
where their KV lies, and that the core has published (:mod:`~tercet.vllm_plugin.engine.table_publisher`). The blocks are
not pinned: a send goes under a word of the core's, so that a receiver takes nothing of a block that the core, should it
wake up, has handed to somebody else.
"""

from __future__ import annotations

from collections.abc import Iterable

from tercet.protocol import EngineError
from tercet.transport import CORE_WORDS, Push, core_word
from tercet.vllm_plugin.engine.block_tables import BlockTableReader
from tercet.vllm_plugin.engine.connector_messages import SendParams

# No KV is ever in vLLM's null block: it stands for what a model does not look back at any more.
NULL_BLOCK = 0


class Bypass:
    """Finds KV in what the core has published: in ``tables``, with blocks of ``block_size`` tokens."""

    def __init__(self, tables: BlockTableReader, block_size: int) -> None:
        self._tables = tables
        self._block_size = block_size
        self._epoch, self._used = 0, 0

    def find(self, owners: Iterable[int], params: SendParams) -> tuple[Push, int]:
        """What to push for a send of KV that any of ``owners`` has, and under which word; it may begin at once.

        Raises :class:`~tercet.protocol.EngineError` if the core has not published where it is.
        """
        first, until = params.first_block(0, self._block_size), -(-params.end // self._block_size)
        for owner in owners:
            found = self._tables.find(owner)
            if found is None or found.computed < params.end or len(found.blocks) < until:
                continue
            blocks = tuple(found.blocks[first:until])
            if NULL_BLOCK not in blocks:
                slot = first - params.base // self._block_size
                return Push(params.send_id, slot, blocks), self._word(found.epoch)
        raise EngineError("the engine's core does not answer, and has not published where the KV of these tokens is")

    def _word(self, epoch: int) -> int:
        """One of the epoch's words, each of which names one send."""
        if epoch != self._epoch:
            self._epoch, self._used = epoch, 0
        if self._used == CORE_WORDS:
            raise EngineError(f"{CORE_WORDS} sends have bypassed the core since it has stood still; no more can")
        self._used += 1
        return core_word(epoch, self._used - 1)
