"""Live migration: a sequence continues on another engine, with its KV, without its client noticing.

It is a program over the verbs. While the source decodes, the computed KV is sent in stages; each stage sends the KV
that was computed during the stage before. A stage is sent in portions with pauses between them, so that both engines
decode other sequences almost as fast as without a copy. When few tokens are left, the sequence is cut over: no more
tokens are taken from the source, and the destination continues after the last token that was taken. In its first step
it computes the few positions that no stage has sent. The source is not asked, so the cut-over cannot wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from tercet.protocol import Engine, Request, Reservation
from tercet.settings import MoveSettings


class Stage(msgspec.Struct, frozen=True):
    """One stage: KV of the token positions ``[begin, end)``; ``seconds`` is the time of its sends only."""

    begin: int
    end: int
    bytes: int = 0
    seconds: float = 0.0
    transport: str = ""


class Movable(Protocol):
    """A sequence that runs on an engine, in the form that a move needs."""

    @property
    def engine(self) -> Engine:
        """The engine that the sequence runs on."""
        ...

    @property
    def computed(self) -> int:
        """Number of first tokens whose KV is certainly in the engine: 0 while the sequence waits there."""
        ...

    def context(self) -> Request:
        """Return a request whose prompt are the first :attr:`computed` tokens, with the id of the next attempt."""
        ...

    async def cut_over(self, to: Engine, begin: int) -> None:
        """Continue the sequence on ``to``, which has the KV of ``[0, begin)``; return at the first output from there.

        Raises :class:`~tercet.protocol.TercetError` if the sequence has ended, or ``to`` does not start.
        """
        ...


async def migrate(
    sequence: Movable, to: Engine, settings: MoveSettings, stages: list[Stage], share: Callable[[], float] | None = None
) -> None:
    """Move a sequence to another engine. Each stage is added to ``stages`` as it arrives, even if the move fails.

    A waiting sequence is moved without KV. ``share`` returns, after each portion, the share of the time in which KV may
    be sent; if it is None, ``settings.share`` applies.

    An error before the cut-over, cancellation included, leaves the sequence on its source and frees the reservation at
    the destination. Raises :class:`~tercet.protocol.TercetError`.
    """
    if not sequence.computed:
        await sequence.cut_over(to, 0)
        return
    context = sequence.context()
    share_now = share or (lambda: settings.share)
    async with to.prep_recv(context) as space:
        await _send(sequence, context, space, settings, stages, share_now)
        # The source goes on decoding while a stage is sent, so each stage leaves a shorter rest. What is left when it
        # is short, or after the last stage, is computed again by the destination: the sequence stands still meanwhile.
        while sequence.computed - space.end > settings.tail and len(stages) < settings.stages:
            context = sequence.context()
            space = await to.extend_recv(space, context)
            await _send(sequence, context, space, settings, stages, share_now)
        await sequence.cut_over(to, space.end)


async def _send(
    sequence: Movable, context: Request, space: Reservation, settings: MoveSettings, stages: list[Stage],
    share: Callable[[], float],
) -> None:  # fmt: skip
    stages.append(Stage(space.matched_len, space.matched_len))
    while stages[-1].end < space.end:
        end = min(stages[-1].end + settings.portion, space.end)
        sent = await sequence.engine.remote_send(context, space, stages[-1].end, end)
        # After each portion, so that a move that fails in the middle still reports what it sent.
        stage = stages[-1]
        sums = stage.bytes + sent.bytes, stage.seconds + sent.seconds
        stages[-1] = Stage(stage.begin, sent.end, *sums, sent.transport)
        if end < space.end:
            await asyncio.sleep(sent.seconds / share() - sent.seconds)
