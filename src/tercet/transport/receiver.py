"""Accepts senders over TCP: one thread that accepts, one per connection. Idle threads sleep in the kernel."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Collection

from tercet.transport.base import OnFinished
from tercet.transport.frames import HEADER_BYTES, MAX_PIECE_BYTES, MAX_TEXT_BYTES, ProtocolViolation, refused
from tercet.transport.grants import GrantTable
from tercet.transport.inbound import Inbound, InboundCounters
from tercet.transport.memory import KVMemory
from tercet.transport.threads import start_thread

logger = logging.getLogger(__name__)
SOCKET_BUFFER_BYTES = 4 * 1024 * 1024


class TcpReceiver:
    """Listens at ``host:port`` (0: any free one) and writes what arrives into ``memory``, as ``grants`` allow."""

    def __init__(
        self,
        memory: KVMemory,
        grants: GrantTable,
        fingerprint: str,
        host: str,
        port: int,
        on_finished: OnFinished,
        cpus: Collection[int] | None = None,
    ) -> None:
        self._cpus = cpus
        self._memory = memory
        self._grants = grants
        self._fingerprint = fingerprint
        self._on_finished = on_finished
        self.counters = InboundCounters()
        self._listener = socket.create_server((host, port), backlog=128)
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._thread = start_thread("tercet-accept", self._accept, cpus=cpus)

    @property
    def address(self) -> str:
        """Where senders connect."""
        host, port = self._listener.getsockname()[:2]
        return f"tcp://{host}:{port}"

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self._connections)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                # Under the lock, so that the thread's own removal comes after this entry.
                self._connections[connection] = start_thread("tercet-receive", self._serve, connection, cpus=self._cpus)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
                self._converse(connection)
        except OSError as error:
            logger.debug("a sender's connection broke: %s", error)
        finally:
            with self._lock:
                self._connections.pop(connection, None)

    def _converse(self, connection: socket.socket) -> None:
        same_machine = connection.getpeername()[0] == connection.getsockname()[0]
        inbound = Inbound(
            self._memory, self._grants, self._fingerprint, self.counters, self._on_finished, same_machine
        )  # fmt: skip
        # Data lands here first and is copied once the lease is checked: a socket never writes into KV.
        scratch = memoryview(bytearray(HEADER_BYTES))
        try:
            while True:
                wanted = inbound.wanted
                if wanted > scratch.nbytes:
                    scratch = memoryview(bytearray(max(wanted, self._usual_piece())))
                if not _fill(connection, scratch[:wanted]):
                    return
                answer = inbound.feed(scratch[:wanted])
                if answer:
                    connection.sendall(answer)
        except ProtocolViolation as violation:
            logger.warning("closing a connection: %s", violation.message)
            connection.sendall(refused(0, violation.message))

    def _usual_piece(self) -> int:
        return min(max(MAX_TEXT_BYTES, 4 * self._memory.block_bytes), MAX_PIECE_BYTES)

    def close(self) -> None:
        """Stop listening, drop every connection, join every thread."""
        with self._lock:
            self._closed = True
            open_now = dict(self._connections)
        shut(self._listener)
        self._listener.close()
        for connection in open_now:
            shut(connection)
        for thread in (self._thread, *open_now.values()):
            if thread is not threading.current_thread():
                thread.join()


def _fill(connection: socket.socket, into: memoryview) -> bool:
    """Read until ``into`` is full; false at the end of the stream."""
    while into.nbytes:
        received = connection.recv_into(into)
        if not received:
            return False
        into = into[received:]
    return True


def shut(sock: socket.socket) -> None:
    """End a connection both ways, so that whoever waits on it wakes up."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # not connected any more
