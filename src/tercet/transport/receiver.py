"""The server that accepts senders: one thread per listener and per connection. Idle threads sleep in the kernel.

A connection's first message is a greeting. It begins a session, whose messages :class:`~.inbound.SenderSession` takes,
or adds a connection to one, on which :class:`~.backends.tcp.TcpReader` reads.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from tercet.transport.backends.reading import HostBackend
from tercet.transport.backends.tcp import TcpReader
from tercet.transport.grants import GrantTable
from tercet.transport.inbound import OnFilled, Pace, SenderSession
from tercet.transport.local_rank import LocalRank, agree, require_ours
from tercet.transport.peer_messages import (
    FROM_SENDER,
    NONCE_BYTES,
    Challenge,
    FromSender,
    Greeting,
    MessageSplitter,
    ProtocolViolation,
    Refused,
    framed,
)
from tercet.transport.sockets import listen, listen_unix, require_own_user, shut, start_thread, tune, wait_in_calls

logger = logging.getLogger(__name__)
GREETING_SECONDS = 10.0
# Pause, in seconds, before accepting again after file descriptors or threads ran out.
ACCEPT_PAUSE_SECONDS = 0.2
# Time, in seconds, after which a sender that does not read its answers counts as lost.
ANSWER_SECONDS = 10.0
# Time, in seconds, that a call waits for more of a chunk. It holds the lease, and a revocation waits for it.
PATIENCE_SECONDS = 0.005
# Each connection costs a thread. The oldest unauthenticated one is closed to accept a new one.
MAX_CONNECTIONS, MAX_STRANGERS = 1024, 64
RECEIVED_AT_A_TIME = 64 * 1024


class KVReceiver:
    """The listener of one rank: on the addresses in its settings, and on a Unix socket if that can carry its memory.

    Senders connect to ``addresses``. ``on_filled(lease, valid_end)`` is called for every complete send, before it is
    acknowledged; at intervals during a send; and for the valid part of a lost sender's send.
    """

    def __init__(self, rank: LocalRank, grants: GrantTable, on_filled: OnFilled) -> None:
        self._rank, self._grants, self._on_filled = rank, grants, on_filled
        self._pace = Pace(rank.settings.receive_limit)
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._strangers: dict[socket.socket, None] = {}  # those that have not sent a greeting, the oldest first
        self._sessions: dict[str, TcpReader | None] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._listeners: list[socket.socket] = []
        makers: list[Callable[[], tuple[socket.socket, str]]] = [
            partial(listen, host, rank.settings.ports) for host in rank.settings.hosts
        ]
        if any(isinstance(backend, HostBackend) for backend in rank.backends):
            makers.append(listen_unix)  # over it a sender's memory is passed
        addresses = list[str]()
        try:
            for make in makers:
                listener, address = make()
                self._listeners.append(listener)
                addresses.append(address)
            self.addresses = tuple(addresses)
        except BaseException:
            for listener in self._listeners:
                listener.close()
            raise
        self._threads = [start_thread("tercet-accept", self._accept, listener) for listener in self._listeners]

    def under_way(self) -> dict[str, int]:
        """Return the numbers of open connections and of connected senders."""
        return {"connections": len(self._connections), "sessions_in": len(self._sessions)}

    def _accept(self, listener: socket.socket) -> None:
        logged = ""
        while not self._closed.is_set():
            try:
                connection, _ = listener.accept()
                self._begin(connection)
                logged = ""
            except (OSError, RuntimeError) as error:
                # One failed connection does not stop the next one: only close() ends this thread.
                if not self._closed.wait(ACCEPT_PAUSE_SECONDS) and logged != str(error):
                    logged = str(error)
                    logger.warning("cannot accept a sender's connection: %s", error)

    def _begin(self, connection: socket.socket) -> None:
        with self._lock:
            # Under the same lock as close(): a connection is either refused here or shut there.
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
        """Return True if one more connection may be opened; if there are many, close the oldest unauthenticated one."""
        if len(self._connections) >= MAX_CONNECTIONS:
            self._rank.counters.count(connections_refused=1)
            return False
        # Senders greet at once, so the one that has waited longest is most likely none.
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            shut(oldest)
            self._rank.counters.count(connections_refused=1)
        return True

    def _serve(self, connection: socket.socket) -> None:
        talk = _Talk(connection)
        try:
            if connection.family == socket.AF_UNIX:
                require_own_user(connection)
            tune(connection)
            self._converse(talk)
        except ProtocolViolation as violation:
            self._rank.counters.count(connections_refused=1)
            logger.warning("closing a connection: %s", violation.message)
            talk.say(Refused(0, violation.message))
        except OSError as error:
            logger.debug("a sender's connection broke: %s", error)
        except Exception:
            logger.exception("a sender's connection failed")
        finally:
            talk.drop_memory()
            with self._lock:  # so that close() does not shut a descriptor that was reused
                self._connections.pop(connection, None)
                self._strangers.pop(connection, None)
                connection.close()

    def _converse(self, talk: _Talk) -> None:
        challenge = Challenge(secrets.token_bytes(NONCE_BYTES))
        greeting = talk.greeting(challenge)
        require_ours(self._rank, challenge, greeting)
        with self._lock:
            self._strangers.pop(talk.connection, None)
        if greeting.stream:  # a further connection of a session, over which ``tcp`` reads
            # It has shown the secret, so the name of the session is that of a sender of the fleet.
            reader = self._sessions.get(greeting.session)
            if reader is None:
                raise ProtocolViolation("this session does not exist, or its KV is not read over connections")
            reader.serve(talk.connection, self._rank.settings.timeout)
            return
        with self._lock:
            if greeting.session in self._sessions:
                raise ProtocolViolation("a session must begin only once")
            # Reserved before the transport is agreed: two connections with one name must not both begin.
            self._sessions[greeting.session] = None
        try:
            agreed = agree(self._rank, challenge, greeting, talk.memory)
            talk.drop_memory()
            session = SenderSession(self._rank, self._grants, agreed, self._pace, self._on_filled, talk.say)
            try:
                if isinstance(agreed.reader, TcpReader):
                    self._sessions[agreed.session] = agreed.reader
                talk.say(agreed.welcome)
                while True:
                    messages = list(talk.receive())
                    session.take(messages)
                    if not messages:
                        # No more messages are here, so no more chunks will join those that wait: read them.
                        session.settle()
                        talk.readable.poll()
            finally:
                session.close()
        finally:
            with self._lock:
                del self._sessions[greeting.session]

    def close(self) -> None:
        """Stop listening, close all connections, join all threads."""
        self._pace.close()
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


class _Talk:
    """One connection's messages, and the descriptor that was passed with them."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.memory: int | None = None
        self._greeted = False
        self._splitter = MessageSplitter(FROM_SENDER)
        self.readable = select.poll()
        self.readable.register(connection, select.POLLIN)

    def greeting(self, challenge: Challenge) -> Greeting:
        """Receive the sender's greeting; raise ``TimeoutError`` if it does not arrive in time."""
        wait_in_calls(self.connection, ANSWER_SECONDS, PATIENCE_SECONDS)
        self.say(challenge)
        deadline = time.monotonic() + GREETING_SECONDS
        while True:
            if messages := self.receive():
                greeting, *others = messages
                if not isinstance(greeting, Greeting) or others or self._splitter.held:
                    raise ProtocolViolation("the first message must be a greeting, sent alone")
                self._greeted = True
                return greeting
            if not self.readable.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError("the sender's greeting did not arrive in time")

    def receive(self) -> Sequence[FromSender]:
        """Return the messages that have arrived, if any; raise ``ConnectionResetError`` when the connection ends."""
        try:
            if self._greeted:
                data = self.connection.recv(RECEIVED_AT_A_TIME, socket.MSG_DONTWAIT)
            else:
                # Not socket.recv_fds, which ignores flags.
                flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
                data, ancillary, _, _ = self.connection.recvmsg(RECEIVED_AT_A_TIME, socket.CMSG_LEN(4), flags)
                for level, kind, content in ancillary:
                    if (level, kind, len(content)) == (socket.SOL_SOCKET, socket.SCM_RIGHTS, 4):
                        self.drop_memory()
                        self.memory = int.from_bytes(content, sys.byteorder)
        except BlockingIOError:
            return ()
        if not data:
            raise ConnectionResetError("the sender closed the connection")
        return self._splitter.feed(data)

    def say(self, message: msgspec.Struct) -> None:
        """Send a message; a sender that does not read it counts as lost."""
        view = memoryview(framed(message))
        limit = time.monotonic() + ANSWER_SECONDS
        while view:
            try:
                view = view[self.connection.send(view, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                if time.monotonic() > limit:
                    return shut(self.connection)
                writable = select.poll()
                writable.register(self.connection, select.POLLOUT)
                writable.poll(1000)
            except OSError:
                return None  # it has disconnected; the reading thread notices that
        return None

    def drop_memory(self) -> None:
        """Close the passed descriptor, if it is open: it is no longer needed."""
        if self.memory is not None:
            os.close(self.memory)
            self.memory = None
