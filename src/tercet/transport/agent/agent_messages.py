"""Messages to and from an agent.

The API server's process sends a :data:`Command` and gets an answer. The computing worker sends a :data:`StepNote` and
gets none. The agent sends a :data:`Report` to the HTTP edges of this engine.
"""

from __future__ import annotations

import msgspec

from tercet.protocol import Content
from tercet.transport.grant import Grant
from tercet.transport.receive_traces import ReceiveEnd
from tercet.transport.sender import SendDestination


class SendOpening(msgspec.Struct, frozen=True):
    """The start of a send of ``content`` under ``lease``, to each of ``destinations``.

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
    """Order to send ``blocks`` of a group's layers to the receivers' slots from ``slot`` on."""

    send_id: str
    slot: int
    blocks: tuple[int, ...]
    group: int = 0


class SendComplete(msgspec.Struct, frozen=True):
    """Note that all KV of the tokens ``[begin, end)`` has been pushed."""

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
    """Command to refuse ``lease`` from now on, known or not.

    The answer is the end of the contiguous valid KV, 0 for an unknown lease.
    """

    lease: str


class CancelSend(msgspec.Struct, frozen=True, tag=True):
    """Command to stop reading KV for ``send_id``; the answer arrives after all threads have stopped reading it."""

    send_id: str


class PushCached(msgspec.Struct, frozen=True, tag=True):
    """Command to push blocks of every layer, without a forward pass.

    The blocks are pinned, or the engine's core guarantees them by the number ``word`` of one of its words.
    """

    opening: SendOpening
    pushes: tuple[Push, ...]
    completion: SendComplete
    word: int | None = None


class ReadCounters(msgspec.Struct, frozen=True, tag=True):
    """Command to read the transport's counters."""


Command = GrantLease | ExtendLease | RevokeLease | CancelSend | PushCached | ReadCounters

# ---- from the worker -----------------------------------------------------------------------------------------


class StepBegins(msgspec.Struct, frozen=True, tag=True):
    """Note of the start of a forward pass: the sends that begin with it, and the pushes for each layer."""

    opened: tuple[SendOpening, ...]
    pushes: tuple[Push, ...]


class LayersDone(msgspec.Struct, frozen=True, tag=True):
    """Note that these planes, of one or more layers, hold this step's KV; on a device, after event ``computed``."""

    planes: tuple[int, ...]
    computed: int | None = None


class StepEnds(msgspec.Struct, frozen=True, tag=True):
    """Note that all layers are done; the sends in ``completed`` are complete."""

    completed: tuple[SendComplete, ...]


StepNote = StepBegins | LayersDone | StepEnds

# ---- to the edges --------------------------------------------------------------------------------------------


class SendDone(msgspec.Struct, frozen=True):
    """Report that one rank's part of a send has ended; ``error`` is None if its KV is in place."""

    send_id: str
    rank: int
    bytes: int = 0
    chunks: int = 0
    transport: str = ""
    error: str | None = None


class LeaseFilled(msgspec.Struct, frozen=True):
    """Report that KV arrived under a lease, or that its sender was lost; ``valid`` is the content that is valid now."""

    lease: str
    rank: int
    valid: Content


class ReceiveDone(msgspec.Struct, frozen=True):
    """Report that a receive from a traced sender has ended on one rank."""

    rank: int
    ended: ReceiveEnd


Report = SendDone | LeaseFilled | ReceiveDone
