"""Accepts senders over TCP: one thread that accepts, one per connection. Idle threads sleep in the kernel."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Collection

from tercet.transport.base import OnFinished
from tercet.transport.direct import held_by
from tercet.transport.frames import HEADER_BYTES, MAX_PIECE_BYTES, MAX_TEXT_BYTES, ProtocolViolation, refused
from tercet.transport.grants import GrantTable
from tercet.transport.inbound import Inbound, InboundCounters
from tercet.transport.memory import KVMemory
from tercet.transport.sockets import fill, shut, tune
from tercet.transport.threads import start_thread

logger = logging.getLogger(__name__)
GREETING_SECONDS = 10.0
# Out of file descriptors or threads: how long until the next try to accept.
ACCEPT_PAUSE_SECONDS = 0.2


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
        self._closed = threading.Event()
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
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
                self._begin(connection)
            except (OSError, RuntimeError) as error:
                # Whatever ails one connection, the next one may be fine: only close() ends this thread.
                if not self._closed.wait(ACCEPT_PAUSE_SECONDS):
                    logger.warning("a sender cannot be accepted: %s", error)

    def _begin(self, connection: socket.socket) -> None:
        with self._lock:
            if self._closed.is_set():
                connection.close()
                return
            try:
                # Under the lock, so that the thread's own removal comes after this entry.
                self._connections[connection] = start_thread("tercet-receive", self._serve, connection, cpus=self._cpus)
            except RuntimeError:
                connection.close()
                raise

    def _serve(self, connection: socket.socket) -> None:
        try:
            tune(connection)
            self._converse(connection)
        except OSError as error:
            logger.debug("a sender's connection broke: %s", error)
        except Exception:
            logger.exception("a sender's connection failed")
        finally:
            with self._lock:  # so that close() does not shut a descriptor that is somebody else's by then
                self._connections.pop(connection, None)
                connection.close()

    def _converse(self, connection: socket.socket) -> None:
        inbound = Inbound(
            self._memory, self._grants, self._fingerprint, self.counters, self._on_finished,
            lambda pid: held_by(pid, connection),
        )  # fmt: skip
        # Data lands here first and is copied once the lease is checked: a socket never writes into KV.
        scratch = memoryview(bytearray(HEADER_BYTES))
        deadline = time.monotonic() + GREETING_SECONDS
        try:
            while True:
                wanted = inbound.wanted
                if wanted > scratch.nbytes:
                    scratch = memoryview(bytearray(max(wanted, self._usual_piece())))
                if not fill(connection, scratch[:wanted], None if inbound.greeted else deadline):
                    return
                answer = inbound.feed(scratch[:wanted])
                connection.settimeout(None)
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
            self._closed.set()
            threads = [self._thread, *self._connections.values()]
            shut(self._listener)
            for connection in self._connections:
                shut(connection)
        self._listener.close()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
