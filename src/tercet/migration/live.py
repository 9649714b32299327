"""Live migration: a sequence goes on at another engine, with its KV, and its client does not notice.

It is a program over the verbs. While the source decodes, what it has computed is sent in stages, each of which brings
what came while the one before was on its way. A stage goes in portions with rests between them, so that both engines
decode for others almost as if nothing were copied. Once few enough tokens are left, the sequence is cut over: nothing
more is taken from the source, and the destination goes on behind the last token that was; it computes the few positions
that no stage has brought in the step that makes the next token. The source is not asked, so it cannot be waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from tercet.protocol import Engine, Request, Reservation, Sent
from tercet.settings import MoveSettings


class Stage(msgspec.Struct, frozen=True):
    """One stage: KV of the token positions ``[begin, end)``; ``seconds`` are those of its sends, without the rests."""

    begin: int
    end: int
    bytes: int = 0
    seconds: float = 0.0
    transport: str = ""

    def and_then(self, sent: Sent) -> Stage:
        """This one, with a portion more."""
        return Stage(self.begin, sent.end, self.bytes + sent.bytes, self.seconds + sent.seconds, sent.transport)


class Movable(Protocol):
    """A sequence that an engine works on, as a move sees it."""

    @property
    def engine(self) -> Engine:
        """Who works on it."""
        ...

    @property
    def computed(self) -> int:
        """Tokens of it, from the first on, whose KV is in the engine for certain: 0 while it waits there."""
        ...

    def context(self) -> Request:
        """A request whose prompt are the first :attr:`computed` tokens, under the id that it shall have next."""
        ...

    async def cut_over(self, to: Engine, begin: int) -> None:
        """Have ``to`` go on with it, where the KV of ``[0, begin)`` is; returns when its first output is here.

        Raises :class:`~tercet.protocol.TercetError` if the sequence has ended, or ``to`` does not begin.
        """
        ...


async def migrate(
    sequence: Movable, to: Engine, settings: MoveSettings, stages: list[Stage], share: Callable[[], float] | None = None
) -> None:
    """Move a sequence to another engine. ``stages`` gets what is sent, as it arrives, whatever becomes of the move.

    One that waits is moved without KV. ``share`` says after each portion for what share of the time KV may be sent;
    without it that is ``settings.share``.

    Whatever ends this before the cut-over, cancellation included, leaves the sequence where it is and nothing behind at
    the destination. Raises :class:`~tercet.protocol.TercetError`.
    """
    if not sequence.computed:
        await sequence.cut_over(to, 0)
        return
    context = sequence.context()
    share_now = share or (lambda: settings.share)
    async with to.prep_recv(context) as space:
        await _send(sequence, context, space, settings, stages, share_now)
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
        stages[-1] = stages[-1].and_then(sent)
        if end < space.end:
            await asyncio.sleep(sent.seconds / share() - sent.seconds)
