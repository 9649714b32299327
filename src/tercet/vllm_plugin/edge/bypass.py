"""Look-up of running sequences' KV for sends while the core is stuck and cannot answer.

The API server's process knows the tokens of every sequence that decodes here, since they passed through it. It lacks
the place of their KV, which the core has published (:mod:`~tercet.vllm_plugin.core.table_publisher`). The blocks are
not pinned: a send uses one of the core's words, so that a receiver accepts nothing from a block that the core has
reallocated after it continued.
"""

from __future__ import annotations

from collections.abc import Iterable

from tercet.protocol import EngineError
from tercet.transport import CORE_WORDS, Push, core_word
from tercet.vllm_plugin.core.connector_messages import SendParams
from tercet.vllm_plugin.edge.block_tables import BlockTableReader, Residence

# vLLM's null block never contains KV: it stands for tokens that a model no longer looks back at.
NULL_BLOCK = 0


class Bypass:
    """A look-up of KV in the tables that the core has published, with blocks of ``block_size`` tokens."""

    def __init__(self, tables: BlockTableReader, block_size: int) -> None:
        self._tables = tables
        self._block_size = block_size
        self._epoch, self._used = 0, 0

    def find(self, owners: Iterable[int], params: SendParams) -> tuple[list[Push], int]:
        """Return the pushes of a send of KV that one of ``owners`` has, and the core's word for the send.

        The send may begin at once. Raises :class:`~tercet.protocol.EngineError` if the core has not published the place
        of the KV.
        """
        for owner in owners:
            found = self._tables.find_all(owner)
            pushes = None if found is None else self._pushes(found, params)
            if found and pushes is not None:
                return pushes, self._word(found[0].epoch)
        raise EngineError("the engine's core does not answer, and has not published the place of these tokens' KV")

    def _pushes(self, found: list[Residence], params: SendParams) -> list[Push] | None:
        """Return a push for each group with requested KV; None if some of it is missing."""
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
        """Return an unused word of the epoch: each word is used for one send."""
        if epoch != self._epoch:
            self._epoch, self._used = epoch, 0
        if self._used == CORE_WORDS:
            raise EngineError(f"{CORE_WORDS} sends have bypassed the stuck core, which is the limit")
        self._used += 1
        return core_word(epoch, self._used - 1)
