"""The sequences that an engine generates, with data of its API server's process and of the core."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from tercet.aio import TaskSet
from tercet.protocol import SequenceReport
from tercet.protocol.wire import MoveCall
from tercet.vllm_plugin.core.core_methods import RequestInCore
from tercet.vllm_plugin.core.keyed_prompt import KeyedPrompt
from tercet.vllm_plugin.edge.llm_requests import DecodingSequence
from tercet.wire.streams import propose_move

logger = logging.getLogger(__name__)
ANSWER_SECONDS = 0.25
"""Longest wait of a caller for a report, in seconds."""


class SequenceTable:
    """A table of the sequences that an engine generates.

    It has their tokens, age and router. Only the core knows their blocks, and whether they run. ``ask`` polls the core,
    one poll at a time. A stuck core blocks no caller: then its last answer is reported. Relies on vLLM making its id
    from a request's id and a suffix.
    """

    def __init__(self, ask: Callable[[], Awaitable[Sequence[RequestInCore]]]) -> None:
        self._ask = ask
        self._sequences: dict[str, DecodingSequence] = {}  # by Tercet's request ids
        self._in_core: dict[str, RequestInCore] = {}  # by Tercet's request ids
        self._asking: asyncio.Task[None] | None = None
        self._tasks = TaskSet()

    def add(self, sequence: DecodingSequence) -> None:
        """Add a sequence."""
        self._sequences[sequence.request.request_id] = sequence

    def remove(self, sequence: DecodingSequence) -> None:
        """Remove a sequence."""
        self._sequences.pop(sequence.request.request_id, None)

    def beginning_with(self, prompt: KeyedPrompt) -> list[DecodingSequence]:
        """Return the sequences that begin with this prompt."""
        return [each for each in self._sequences.values() if each.begins_with(prompt)]

    async def reports(self) -> list[SequenceReport]:
        """Return every sequence, in order of arrival; one that has not reached the core yet waits, without blocks."""
        if self._sequences:
            if self._asking is None or self._asking.done():
                self._asking = self._tasks.spawn(self._ask_core())
            await asyncio.wait({self._asking}, timeout=ANSWER_SECONDS)
        return [self._report(request_id, sequence) for request_id, sequence in self._sequences.items()]

    def propose_move(self, seq_id: str, call: MoveCall) -> None:
        """Propose a move: see :meth:`tercet.vllm_plugin.edge.verbs.EngineVerbs.propose_move`."""
        senders = {sequence.seq_id: sequence.sender for sequence in self._sequences.values()}
        propose_move(senders, seq_id, call)

    def _report(self, request_id: str, sequence: DecodingSequence) -> SequenceReport:
        found, sender = self._in_core.get(request_id), sequence.sender
        return SequenceReport(
            seq_id=sequence.seq_id,
            tokens=len(sequence.tokens),
            blocks=found.blocks if found is not None else 0,
            running=found is not None and found.running,
            age=sequence.age,
            router=sender.connection.address if sender is not None else "",
        )

    async def _ask_core(self) -> None:
        try:
            answer = await self._ask()
        except Exception as error:  # vLLM raises this for a core that has ended
            logger.debug("the engine's core cannot be polled for its sequences: %s", error)
            return
        self._in_core = {_ours(found.request_id): found for found in answer}


def _ours(request_id: str) -> str:
    """Return Tercet's id of the request: vLLM appends a dash and random characters."""
    prefix, _, rest = request_id.partition("-")
    return f"{prefix}-{rest.partition('-')[0]}"
