"""Accepts senders: a thread per listener, one per connection. Idle threads sleep in the kernel."""

from __future__ import annotations

import errno
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from tercet.protocol import EngineError
from tercet.transport.backends.host import held_by
from tercet.transport.frames import HEADER_BYTES, ProtocolViolation, refused
from tercet.transport.inbound import Inbound
from tercet.transport.rules import Rules
from tercet.transport.sockets import shut, tune, wait_in_calls
from tercet.transport.threads import start_thread
from tercet.transport.vectors import Bytes

logger = logging.getLogger(__name__)
GREETING_SECONDS = 10.0
# Out of file descriptors or threads: how long until the next try to accept.
ACCEPT_PAUSE_SECONDS = 0.2
# A sender that does not read its answers for so long is given up.
ANSWER_SECONDS = 10.0
# How long a call waits for more of a body: the lease is held meanwhile, and its revocation waits, too.
PATIENCE_SECONDS = 0.005
# Each connection costs a thread. Who has not shown yet that it belongs here makes room for who comes later.
MAX_CONNECTIONS, MAX_STRANGERS = 1024, 64


class Receiver:
    """Listens on every one of ``hosts``, on the first free port of ``ports`` (any free one if that is empty).

    ``addresses`` are where senders connect, one for each host.
    """

    def __init__(self, rules: Rules, hosts: Sequence[str], ports: Sequence[int] = ()) -> None:
        self._rules = rules
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._strangers: dict[socket.socket, None] = {}  # those that have not greeted, the oldest first
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._listeners: list[socket.socket] = []
        try:
            for host in hosts:
                self._listeners.append(_listen(host, ports))
        except BaseException:
            for listener in self._listeners:
                listener.close()
            raise
        self.addresses = tuple(_address(listener) for listener in self._listeners)
        self._threads = [start_thread("tercet-accept", self._accept, listener) for listener in self._listeners]

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self._connections)

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = listener.accept()
                self._begin(connection)
            except (OSError, RuntimeError) as error:
                # Whatever ails one connection, the next one may be fine: only close() ends this thread.
                if not self._closed.wait(ACCEPT_PAUSE_SECONDS):
                    logger.warning("a sender cannot be accepted: %s", error)

    def _begin(self, connection: socket.socket) -> None:
        with self._lock:
            if self._closed.is_set() or not self._room():
                connection.close()
                return
            self._strangers[connection] = None
            try:
                # Under the lock, so that the thread's own removal comes after this entry.
                self._connections[connection] = start_thread("tercet-receive", self._serve, connection)
            except RuntimeError:
                del self._strangers[connection]
                connection.close()
                raise

    def _room(self) -> bool:
        """Whether one more connection may come; the stranger that has waited longest goes if there are many."""
        if len(self._connections) >= MAX_CONNECTIONS:
            self._rules.counters.count(connections_refused=1)
            return False
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            shut(oldest)
            self._rules.counters.count(connections_refused=1)
        return True

    def _welcome(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(connection, None)

    def _serve(self, connection: socket.socket) -> None:
        stream = Stream(connection, self._rules, lambda: self._welcome(connection))
        try:
            tune(connection)
            stream.converse()
        except OSError as error:
            logger.debug("a sender's connection broke: %s", error)
        except Exception:
            logger.exception("a sender's connection failed")
        finally:
            stream.close()
            with self._lock:  # so that close() does not shut a descriptor that is somebody else's by then
                self._connections.pop(connection, None)
                self._strangers.pop(connection, None)
                connection.close()

    def close(self) -> None:
        """Stop listening, drop every connection, join every thread."""
        with self._lock:
            self._closed.set()
            threads = [*self._threads, *self._connections.values()]
            for each in (*self._listeners, *self._connections):
                shut(each)
        for listener in self._listeners:
            listener.close()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()


class EndOfStream(Exception):
    """The sender closed its connection."""


class Stream:
    """One connection's conversation: :class:`Inbound` decides, this moves bytes. ``on_joined``: the sender is one."""

    def __init__(self, connection: socket.socket, rules: Rules, on_joined: Callable[[], None]) -> None:
        self._connection = connection
        self._rules = rules
        self._on_joined = on_joined
        self._writing = threading.Lock()
        self._inbound = Inbound(rules, self._answer, lambda pid: held_by(pid, connection))
        self._deadline: float | None = None
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)

    def converse(self) -> None:
        """Until the sender goes away or breaks the protocol."""
        wait_in_calls(self._connection, ANSWER_SECONDS, PATIENCE_SECONDS)
        header = memoryview(bytearray(HEADER_BYTES))
        self._deadline = time.monotonic() + GREETING_SECONDS
        self._answer(self._inbound.challenge())
        try:
            while True:
                self._read(header)
                body = self._inbound.begin(header)
                if body is not None:
                    while body.left:
                        if not self._inbound.receive(body, self._receive):
                            self._wait()
                    self._inbound.end(body)
                if self._deadline is not None and self._inbound.session is not None:
                    self._deadline = None
                    self._on_joined()
        except EndOfStream:
            return
        except ProtocolViolation as violation:
            self._rules.counters.count(connections_refused=1)
            logger.warning("closing a connection: %s", violation.message)
            self._answer(refused(0, violation.message))

    def _read(self, into: memoryview) -> None:
        while into.nbytes:
            try:
                count = self._connection.recv_into(into, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._inbound.settle()
                self._wait()
                continue
            if not count:
                raise EndOfStream
            into = into[count:]

    def _receive(self, into: Bytes) -> int:
        count = into.receive(self._connection)
        if count == 0:
            raise EndOfStream
        return count or 0

    def _wait(self) -> None:
        """Until something comes; raises ``TimeoutError`` for a sender that does not greet in time."""
        deadline = self._deadline
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        if not self._readable.poll(timeout):
            raise TimeoutError("the sender's greeting did not come in time")

    def _answer(self, data: bytes) -> None:
        with self._writing:
            view = memoryview(data)
            limit = time.monotonic() + ANSWER_SECONDS
            while view:
                try:
                    view = view[self._connection.send(view, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    if time.monotonic() > limit:
                        shut(self._connection)
                        return
                    writable = select.poll()
                    writable.register(self._connection, select.POLLOUT)
                    writable.poll(1000)
                except OSError:
                    return  # it is gone; whoever reads from it finds out

    def close(self) -> None:
        """Leave the session."""
        self._inbound.close()


def _listen(host: str, ports: Sequence[int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports or (0,):
        try:
            return socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                continue
            reason = error.strerror or str(error)
            raise EngineError(f"hosts: {host} is no address of this machine to listen on: {reason}") from error
    tried = f"{ports[0]} to {ports[-1]}" if ports else "those that the system chooses from"
    raise EngineError(f"ports: none is free for {host} in {tried}; set others")


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
