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
from tercet.vllm_plugin.engine.block_tables import BlockTableReader, Residence
from tercet.vllm_plugin.engine.connector_messages import SendParams

# No KV is ever in vLLM's null block: it stands for what a model does not look back at any more.
NULL_BLOCK = 0


class Bypass:
    """Finds KV in what the core has published: in ``tables``, with blocks of ``block_size`` tokens."""

    def __init__(self, tables: BlockTableReader, block_size: int) -> None:
        self._tables = tables
        self._block_size = block_size
        self._epoch, self._used = 0, 0

    def find(self, owners: Iterable[int], params: SendParams) -> tuple[list[Push], int]:
        """What to push for a send of KV that any of ``owners`` has, and under which word; it may begin at once.

        Raises :class:`~tercet.protocol.EngineError` if the core has not published where it is.
        """
        for owner in owners:
            found = self._tables.find_all(owner)
            pushes = None if found is None else self._pushes(found, params)
            if found and pushes is not None:
                return pushes, self._word(found[0].epoch)
        raise EngineError("the engine's core does not answer, and has not published where the KV of these tokens is")

    def _pushes(self, found: list[Residence], params: SendParams) -> list[Push] | None:
        """A push for each group of which anything is wanted; None if some of it is not there."""
        base, until, pushes = params.base // self._block_size, -(-params.end // self._block_size), list[Push]()
        for group, each in enumerate(found):
            first = params.first_block(group, self._block_size)
            blocks = tuple(each.blocks[first:until])
            if each.computed < params.end or len(blocks) < until - first or NULL_BLOCK in blocks:
                return None
            if blocks:
                pushes.append(Push(params.send_id, first - base, blocks, group))
        return pushes

    def _word(self, epoch: int) -> int:
        """One of the epoch's words, each of which names one send."""
        if epoch != self._epoch:
            self._epoch, self._used = epoch, 0
        if self._used == CORE_WORDS:
            raise EngineError(f"{CORE_WORDS} sends have bypassed the core since it has stood still; no more can")
        self._used += 1
        return core_word(epoch, self._used - 1)
