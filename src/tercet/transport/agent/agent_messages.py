"""Messages to and from an agent, and the control channel on which commands travel.

The API server's process sends a :data:`Command` over the channel and gets an answer; it also polls there whether the
agents are alive. The computing worker sends a :data:`StepNote` and gets none. The agent sends a :data:`Report` to the
HTTP edges of this engine.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tercet.aio.tasks import TaskSet
from tercet.protocol import Content, EngineError, TercetError
from tercet.protocol.wire import UNREADABLE
from tercet.transport.grants import Grant, ReceiveEnd
from tercet.transport.rank import SendDestination
from tercet.transport.sockets import LOOPBACK, bind_at, bounded, with_ipv6


class SendPlan(msgspec.Struct, frozen=True):
    """One send, as the edge plans it: the core finds its blocks, and every rank's agent opens its part of it."""

    send_id: str
    lease: str
    content: Content  # of the tokens [0, end)
    base: int  # token position of the receiver's slot 0 under the lease
    begin: int
    end: int
    destinations: list[list[SendDestination]]  # the receiving ranks of each rank of this engine
    notify: str  # the destination of agents' reports: an address, "#", and the inbox's key
    # The first token whose KV the receiver needs, for each group of layers; if empty, it needs all.
    group_begins: tuple[int, ...] = ()
    traceparent: str = ""  # its span in a sampled trace, or empty

    def first_block(self, group: int, block_size: int) -> int:
        """Return the first of a group's blocks to send, as its position in the block table."""
        wanted = self.group_begins[group] if self.group_begins else 0
        return max(self.begin, wanted) // block_size


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


# ---- from the API server's process -----------------------------------------------------------------------------------


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
    """Command to push all of a send, in blocks of every layer, without a forward pass.

    The blocks are pinned, or the engine's core guarantees them by the number ``word`` of one of its words.
    """

    plan: SendPlan
    pushes: tuple[Push, ...]
    word: int | None = None


class ReadCounters(msgspec.Struct, frozen=True, tag=True):
    """Command to read the transport's counters."""


Command = GrantLease | ExtendLease | RevokeLease | CancelSend | PushCached | ReadCounters

# ---- from the worker -------------------------------------------------------------------------------------------------


class StepBegins(msgspec.Struct, frozen=True, tag=True):
    """Note of the start of a forward pass: the sends that begin with it, and the pushes for each layer."""

    opened: tuple[SendPlan, ...]
    pushes: tuple[Push, ...]


class LayersDone(msgspec.Struct, frozen=True, tag=True):
    """Note that these planes, of one or more layers, hold this step's KV; on a device, after event ``computed``."""

    planes: tuple[int, ...]
    computed: int | None = None


class StepEnds(msgspec.Struct, frozen=True, tag=True):
    """Note that all layers are done; the sends in ``completed`` are complete."""

    completed: tuple[SendComplete, ...]


StepNote = StepBegins | LayersDone | StepEnds

# ---- to the edges ----------------------------------------------------------------------------------------------------


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


# ---- The control channel ---------------------------------------------------------------------------------------------


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """One command with a serial number, so that a late answer is recognised.

    ``secret`` is the agent's. vLLM passes it to the API server's process; other processes on this machine do not have
    it.
    """

    secret: str
    serial: int
    command: Command


class ControlAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to ``serial``: a value, or an error."""

    serial: int
    value: Any = None
    error: str | None = None


class ControlServer:
    """An agent's end of the channel: it runs ``handle`` for each command, in a separate thread.

    Clients connect to ``address``, at ``host``, and must send ``secret``.
    """

    def __init__(self, handle: Callable[[Command], Any], host: str = LOOPBACK) -> None:
        self._handle = handle
        self.secret = secrets.token_hex(16)
        self._context = zmq.Context()
        self._socket = bounded(self._context.socket(zmq.ROUTER))
        self._socket.linger = 0
        self._socket.sndhwm = 0  # a ROUTER drops messages beyond its queue, and no answer may be lost
        self.address = bind_at(self._socket, host)
        self._thread = threading.Thread(target=self._serve, name="tercet-control", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        decoder = msgspec.msgpack.Decoder(Envelope)
        # close() ends the running call, and waits until the socket is closed.
        with self._socket, suppress(zmq.ContextTerminated):
            while True:
                try:
                    peer, body = self._socket.recv_multipart()
                    envelope = decoder.decode(body)
                except (ValueError, *UNREADABLE):
                    continue  # sent by another process that found the port
                if secrets.compare_digest(envelope.secret.encode(), self.secret.encode()):
                    self._socket.send_multipart([peer, msgspec.msgpack.encode(self._answer(envelope))])

    def _answer(self, envelope: Envelope) -> ControlAnswer:
        try:
            return ControlAnswer(envelope.serial, self._handle(envelope.command))
        except TercetError as error:
            return ControlAnswer(envelope.serial, error=error.message)
        except Exception as error:  # the thread must survive a failed command
            return ControlAnswer(envelope.serial, error=f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Stop answering and join the thread."""
        self._context.term()
        self._thread.join()


class AsyncControlClient:
    """Client of one agent for an event loop. It never blocks the loop, and any number of commands may be pending.

    The agent runs them in the order of the calls, including those whose caller was cancelled. A stopped agent answers
    when it continues: the caller decides how long to wait.
    """

    def __init__(self, address: str, secret: str) -> None:
        self._secret = secret
        self._serial = 0
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._tasks = TaskSet()
        self._socket = bounded(zmq.asyncio.Context.instance().socket(zmq.DEALER))
        self._socket.linger = 0
        self._socket.sndhwm = 0  # messages that a stopped agent does not read are kept for it, so a send never waits
        with_ipv6(self._socket, address)
        self._socket.connect(address)

    def call(self, command: Command) -> asyncio.Future[Any]:
        """Send a command; the returned future gets the answer, or :class:`~tercet.protocol.EngineError`."""
        if not len(self._tasks):
            self._tasks.keep(self._take_answers, "tercet-control")
        self._serial += 1
        answer = self._asked[self._serial] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(_seen)
        self._socket.send(msgspec.msgpack.encode(Envelope(self._secret, self._serial, command)))
        return answer

    async def _take_answers(self) -> None:
        decoder = msgspec.msgpack.Decoder(ControlAnswer)
        while True:
            found = decoder.decode(await self._socket.recv())
            asked = self._asked.pop(found.serial, None)
            if asked is None or asked.done():
                continue
            if found.error is None:
                asked.set_result(found.value)
            else:
                asked.set_exception(EngineError(found.error))

    def close(self) -> None:
        """Stop reading answers; pending commands stay unanswered."""
        self._tasks.cancel()
        self._socket.close()


def _seen(answer: asyncio.Future[Any]) -> None:
    # An error that arrives after its caller was cancelled is not needed.
    if not answer.cancelled():
        answer.exception()
