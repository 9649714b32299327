"""The control channel: the API server's process tells each agent about leases and sends, and takes the answers.

It asks over it, too, whether they live.
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

from tercet.aio import TaskSet
from tercet.protocol import EngineError, TercetError
from tercet.protocol.wire import UNREADABLE
from tercet.transport.agent.agent_messages import Command
from tercet.transport.bounded_sockets import bounded


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """One command under a serial number, so that an answer which came too late is recognised.

    ``secret`` is the agent's own, which vLLM carried to the API server's process; others on this machine have none.
    """

    secret: str
    serial: int
    command: Command


class ControlAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to ``serial``: a value, or what went wrong."""

    serial: int
    value: Any = None
    error: str | None = None


class ControlServer:
    """An agent's end: runs ``handle`` for each command, in its own thread.

    Who connects to ``address`` must name ``secret``.
    """

    def __init__(self, handle: Callable[[Command], Any]) -> None:
        self._handle = handle
        self.secret = secrets.token_hex(16)
        self._context = zmq.Context()
        self._socket = bounded(self._context.socket(zmq.ROUTER))
        self._socket.linger = 0
        self._socket.sndhwm = 0  # a ROUTER drops what its queue has no room for, and no answer may be lost
        host = "tcp://127.0.0.1"
        self.address = f"{host}:{self._socket.bind_to_random_port(host)}"
        self._thread = threading.Thread(target=self._serve, name="tercet-control", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        decoder = msgspec.msgpack.Decoder(Envelope)
        # close() ends whatever call is under way, and waits until the socket is closed.
        with self._socket, suppress(zmq.ContextTerminated):
            while True:
                try:
                    peer, body = self._socket.recv_multipart()
                    envelope = decoder.decode(body)
                except (ValueError, *UNREADABLE):
                    continue  # not ours: some other process found the port
                if secrets.compare_digest(envelope.secret.encode(), self.secret.encode()):
                    self._socket.send_multipart([peer, msgspec.msgpack.encode(self._answer(envelope))])

    def _answer(self, envelope: Envelope) -> ControlAnswer:
        try:
            return ControlAnswer(envelope.serial, self._handle(envelope.command))
        except TercetError as error:
            return ControlAnswer(envelope.serial, error=error.message)
        except Exception as error:  # the thread must live on, whatever one command did
            return ControlAnswer(envelope.serial, error=f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Stop answering and join the thread."""
        self._context.term()
        self._thread.join()


class AsyncControlClient:
    """One agent, asked from an event loop, which is never held up: any number of commands at a time.

    The agent carries them out in the order of the calls, also those whose caller does not wait any more. One that is
    stopped answers when it goes on: how long to wait is the caller's affair.
    """

    def __init__(self, address: str, secret: str) -> None:
        self._secret = secret
        self._serial = 0
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._tasks = TaskSet()
        self._socket = bounded(zmq.asyncio.Context.instance().socket(zmq.DEALER))
        self._socket.linger = 0
        self._socket.sndhwm = 0  # what a stopped agent does not read is kept for it, so a send never waits
        self._socket.connect(address)

    def call(self, command: Command) -> asyncio.Future[Any]:
        """Post a command; the answer is the future's, or :class:`~tercet.protocol.EngineError` saying why."""
        if not len(self._tasks):
            self._tasks.spawn(self._take_answers(), "tercet-control")
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
        """Take no more answers; what was asked stays unanswered."""
        self._tasks.cancel()
        self._socket.close()


def _seen(answer: asyncio.Future[Any]) -> None:
    # An error that comes after its caller has left is nobody's.
    if not answer.cancelled():
        answer.exception()
