"""Keeps workers of one mind: every change is made by all of them, one change after the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from tercet.router.workers.messages import Call, Reply

logger = logging.getLogger("tercet.router")


class Lost(Exception):
    """A worker ended, or did not answer in time."""


class Peer(Protocol):
    """A worker, as far as agreements go."""

    async def perform(self, call: Call) -> Reply:
        """Have it answer a call; raises :class:`Lost`."""
        ...

    def end(self, why: str) -> None:
        """It is out of step: end it. Another one takes its place."""
        ...


class Agreement:
    """The changes so far, and the workers that have made all of them."""

    def __init__(self) -> None:
        self._peers: list[Peer] = []
        self._changes: list[tuple[Call, int]] = []
        self._turn = asyncio.Lock()

    @property
    def peers(self) -> Sequence[Peer]:
        """Workers that are up to date."""
        return self._peers

    async def join(self, peer: Peer) -> None:
        """Bring a new worker up to date by having it make every change there was; raises :class:`Lost`."""
        async with self._turn:
            for call, status in self._changes:
                reply = await peer.perform(call)
                if reply.status != status:
                    logger.error(
                        "workers: a new one answers %s %s with %d, and it was %d", call.method, call.path,
                        reply.status, status,
                    )  # fmt: skip
            self._peers.append(peer)

    def leave(self, peer: Peer) -> None:
        """The worker has ended; one that never joined is fine."""
        if peer in self._peers:
            self._peers.remove(peer)

    async def settle(self, first: Peer, call: Call) -> list[Reply]:
        """Have ``first`` answer the call, then, unless that is an error, all others; returns the replies.

        A worker that cannot make a change that ``first`` has made is ended. Raises :class:`Lost` if ``first`` ends.
        """
        async with self._turn:
            own = await first.perform(call)
            if own.is_error:
                return [own]
            if call.changes:
                self._changes.append((call, own.status))
            others = [peer for peer in self._peers if peer is not first]
            replies = await asyncio.gather(*(self._follow(peer, call, own) for peer in others))
            return [own, *(reply for reply in replies if reply is not None)]

    async def _follow(self, peer: Peer, call: Call, wanted: Reply) -> Reply | None:
        try:
            reply = await peer.perform(call)
        except Lost:
            return None
        if reply.status == wanted.status:
            return reply
        if call.changes:
            peer.end(f"it answers {call.method} {call.path} with {reply.status}, the others with {wanted.status}")
        return None
