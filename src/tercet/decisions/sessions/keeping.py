"""Rules for pinned KV: whether a context may be pinned between two turns, and which pins end first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from tercet.decisions.sessions.context import Context
from tercet.protocol.revision import UNKNOWN_REVISION, Revision


class EngineSeen(msgspec.Struct, frozen=True):
    """An engine as sessions see it.

    ``is_open`` is True if it may be picked and answers, ``decodes`` if its role decodes, and ``leaving`` if it is to be
    emptied. ``kv_tokens`` is the capacity of its KV cache, 0 if unknown, ``kv_usage`` the share in use, ``waiting`` its
    queue. KV moves between engines whose ``revision`` allows it.
    """

    name: str
    is_open: bool = True
    decodes: bool = True
    leaving: bool = False
    kv_tokens: int = 0
    kv_usage: float = 0.0
    waiting: int = 0
    revision: Revision = UNKNOWN_REVISION

    def share(self, tokens: int) -> float:
        """Return the part of the KV cache that ``tokens`` need; all of it while the capacity is unknown."""
        return tokens / self.kv_tokens if self.kv_tokens else 1.0


def is_within(engine: EngineSeen, kept: Iterable[Context], wanted: Context, share: float) -> bool:
    """Return True if ``wanted`` may be pinned in addition to ``kept``."""
    return engine.share(wanted.num_tokens + sum(each.num_tokens for each in kept)) <= share


def given_up(engine: EngineSeen, ordered: Sequence[Context], give_up_at: float) -> list[Context]:
    """Return the first contexts of ``ordered`` whose pins must end to bring usage below ``give_up_at``.

    While requests wait, at least one is returned.
    """
    usage, found = engine.kv_usage, list[Context]()
    for context in ordered:
        if usage < give_up_at and not (engine.waiting and not found):
            break
        usage -= engine.share(context.num_tokens)
        found.append(context)
    return found
