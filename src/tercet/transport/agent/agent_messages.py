"""Messages to and from an agent.

:data:`Command` comes from the API server's process and is answered; :data:`StepNote` comes from the worker that
computes and is not; :data:`Report` goes to the HTTP edges of this engine.
"""

from __future__ import annotations

import msgspec

from tercet.protocol import Content
from tercet.transport.grants import Grant
from tercet.transport.receive_traces import ReceiveEnd
from tercet.transport.sender import SendDestination


class SendOpening(msgspec.Struct, frozen=True):
    """A send of ``content`` begins: under ``lease``, to each of ``destinations``.

    ``notify`` is the destination of the report of its end: an address, ``#``, and the inbox's key. ``traceparent`` is
    its place in a sampled trace, empty without one.
    """

    send_id: str
    lease: str
    content: Content
    destinations: tuple[SendDestination, ...]
    notify: str
    traceparent: str = ""


class Push(msgspec.Struct, frozen=True):
    """Source ``blocks`` of a group's layers go to the receivers' slots from ``slot`` on."""

    send_id: str
    slot: int
    blocks: tuple[int, ...]
    group: int = 0


class SendComplete(msgspec.Struct, frozen=True):
    """All KV of the tokens ``[begin, end)`` has been pushed."""

    send_id: str
    begin: int
    end: int


# ---- from the API server's process ---------------------------------------------------------------------------


class GrantLease(Grant, frozen=True, tag=True):
    """A grant, and the destination of reports about KV that arrives under it."""

    notify: str


class ExtendLease(Grant, frozen=True, tag=True):
    """An open lease's grant with more tokens and blocks."""


class RevokeLease(msgspec.Struct, frozen=True, tag=True):
    """Refuse ``lease`` from now on, known or not; the answer is the end of the contiguous valid KV, 0 if unknown."""

    lease: str


class CancelSend(msgspec.Struct, frozen=True, tag=True):
    """Stop reading KV for ``send_id``; the answer comes when no thread reads it any more."""

    send_id: str


class PushCached(msgspec.Struct, frozen=True, tag=True):
    """Push blocks of every layer, without a forward pass.

    They are pinned, or the engine's core guarantees them by the number ``word`` of one of its words.
    """

    opening: SendOpening
    pushes: tuple[Push, ...]
    completion: SendComplete
    word: int | None = None


class ReadCounters(msgspec.Struct, frozen=True, tag=True):
    """Read the transport's counters."""


Command = GrantLease | ExtendLease | RevokeLease | CancelSend | PushCached | ReadCounters

# ---- from the worker -----------------------------------------------------------------------------------------


class StepBegins(msgspec.Struct, frozen=True, tag=True):
    """A forward pass: sends that begin with it, and what it will push of every layer."""

    opened: tuple[SendOpening, ...]
    pushes: tuple[Push, ...]


class LayersDone(msgspec.Struct, frozen=True, tag=True):
    """These planes, of one or more layers, hold this step's KV; on a device, after event ``computed``."""

    planes: tuple[int, ...]
    computed: int | None = None


class StepEnds(msgspec.Struct, frozen=True, tag=True):
    """All layers are done; these sends are complete."""

    completed: tuple[SendComplete, ...]


StepNote = StepBegins | LayersDone | StepEnds

# ---- to the edges --------------------------------------------------------------------------------------------


class SendDone(msgspec.Struct, frozen=True):
    """One rank's part of a send ended; ``error`` is ``None`` when it is in place."""

    send_id: str
    rank: int
    bytes: int = 0
    chunks: int = 0
    transport: str = ""
    error: str | None = None


class LeaseFilled(msgspec.Struct, frozen=True):
    """KV arrived under a lease, or its sender was lost; ``valid`` is the valid range and content of its KV now."""

    lease: str
    rank: int
    valid: Content


class ReceiveDone(msgspec.Struct, frozen=True):
    """A receive on one rank ended, whose sender is traced."""

    rank: int
    ended: ReceiveEnd


Report = SendDone | LeaseFilled | ReceiveDone
