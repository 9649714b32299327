"""TCP in virtual time, for production code that uses sockets in a simulated run.

A :class:`VirtualProcess` represents a server process at its own address. All code that runs in its context
(:meth:`VirtualProcess.enter`), with all tasks that it starts, listens and connects as that process. Processes are
frozen, cut off and killed like real ones: data for a frozen or unreachable process waits, as in a kernel's buffers and
retransmissions. The peers of a killed process get a reset as soon as packets can reach them.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any, Literal, cast

from tercet_lab.sim.clock import VirtualLoop

LATENCY_SECONDS = 0.0002
# Bytes that the kernels of both ends accept before a writer has to wait.
KERNEL_BYTES = 512 * 1024
HIGH_WATER = 64 * 1024
FIRST_FREE_PORT = 40_000
Signal = Literal["made", "eof", "reset"]
Factory = Callable[[], asyncio.BaseProtocol]

_running_in: ContextVar[VirtualProcess] = ContextVar("_running_in")


class VirtualProcess:
    """A process with its address. A restart creates a new one at the same address."""

    def __init__(self, network: NetworkedLoop, address: str) -> None:
        self.address = address
        self.alive = True
        self.frozen = False
        self.unreachable = False
        self.transports: dict[VirtualTransport, None] = {}
        self._network = network

    @contextmanager
    def enter(self) -> Generator[None]:
        """Run code in this process while the context is open."""
        token = _running_in.set(self)
        try:
            yield
        finally:
            _running_in.reset(token)

    def freeze(self, frozen: bool = True) -> None:
        """Stop the process as SIGSTOP does, or (False) continue it. A stopped process reads and writes nothing."""
        self.frozen = frozen
        self._network.changed()

    def cut_off(self, unreachable: bool = True) -> None:
        """Drop all packets from and to the process, or (False) pass them again."""
        self.unreachable = unreachable
        self._network.changed()

    def kill(self) -> None:
        """Kill the process as SIGKILL does: from now on its code has no effect on other processes."""
        self.alive = False
        for server in list(self._network.listening.values()):
            if server.process is self:
                server.close()
        for transport in list(self.transports):
            transport.die()
        self.frozen = False
        self._network.changed()


class VirtualServer:
    """A listening server, the result of ``create_server``."""

    def __init__(self, network: NetworkedLoop, process: VirtualProcess, port: int, factory: Factory) -> None:
        self.process = process
        self.port = port
        self.factory = factory
        self.context = copy_context()
        self._network = network

    @property
    def sockets(self) -> list[VirtualServer]:
        return [self]

    def getsockname(self) -> tuple[str, int]:
        return self.process.address, self.port

    def is_serving(self) -> bool:
        """True if the server accepts connections."""
        return self._network.listening.get(self.getsockname()) is self

    def close(self) -> None:
        """Stop listening. Connections stay open."""
        if self.is_serving():
            del self._network.listening[self.getsockname()]

    async def wait_closed(self) -> None:
        """Return immediately: closing takes no time here."""


class VirtualTransport(asyncio.Transport):
    """One end of a connection. :meth:`begin` must be called first."""

    _protocol: Any
    _peer: VirtualTransport

    def __init__(self, network: NetworkedLoop, process: VirtualProcess, context: Context, names: Any) -> None:
        super().__init__({"sockname": names[0], "peername": names[1]})
        self.process = process
        self._network = network
        self._context = context
        self._arriving: deque[bytes | Signal] = deque()
        self.unread = 0  # bytes that were sent to this end and not read yet
        self._timer: asyncio.TimerHandle | None = None
        self._reading = True
        self._closing = self._writer_waits = self._is_made = False
        process.transports[self] = None

    def begin(self, protocol: asyncio.BaseProtocol, peer: VirtualTransport) -> None:
        self._protocol = protocol
        self._peer = peer

    def made(self) -> None:
        self._is_made = True
        self._protocol.connection_made(self)

    def call(self, callback: Callable[..., object], *args: Any) -> None:
        """Call a method of the protocol soon, in the context of its process."""
        self._network.call_soon(callback, *args, context=self._context)

    # ---- incoming data ---------------------------------------------------------------------------------------

    def arrive(self, item: bytes | Signal) -> None:
        """Accept data or a signal that is on its way to this end."""
        if isinstance(item, bytes):
            self.unread += len(item)
        self._arriving.append(item)
        self.kick()

    def kick(self) -> None:
        """Read waiting data soon, if it can be read by then."""
        if self._timer is None and self._arriving:
            self._timer = self._network.call_later(LATENCY_SECONDS, self._read, context=self._context)

    def _read(self) -> None:
        self._timer = None
        while self._arriving and self._readable():
            item = self._arriving.popleft()
            if isinstance(item, bytes):
                self._receive(item)
            elif item == "made":
                self.made()
            elif item == "reset":
                self._lose(ConnectionResetError(errno.ECONNRESET, "the other side reset the connection"))
            elif not self._protocol.eof_received():
                self.close()
        if self._arriving:
            self._network.blocked[self] = None

    def _receive(self, first: bytes) -> None:
        parts = [first]
        while self._arriving and isinstance(self._arriving[0], bytes):
            parts.append(cast(bytes, self._arriving.popleft()))
        data = b"".join(parts)
        self.unread -= len(data)
        self._peer.written()
        if not self._closing:
            self._protocol.data_received(data)

    def _readable(self) -> bool:
        here, there = self.process, self._peer.process
        if not here.alive or here.frozen or there.frozen or here.unreachable or there.unreachable:
            return False
        return self._reading or self._closing

    def _lose(self, error: Exception | None) -> None:
        """End the connection. Notify the protocol, only once."""
        self._closing = True
        if self.process.transports.pop(self, self) is not self:
            self._arriving.clear()
            if self._is_made:  # as in asyncio, a protocol does not lose a connection that it was not given
                self.call(self._protocol.connection_lost, error)

    def die(self) -> None:
        """End the connection of a killed process: unsent data is lost, and the peer gets a reset."""
        if not self._closing:
            if self.process.frozen:  # a frozen process did not send its data: it does not arrive
                self._peer.forget_unread()
            self._peer.arrive("reset")
        self._lose(None)

    def forget_unread(self) -> None:
        """Drop the data that is on its way to this end."""
        self._arriving.clear()
        self.unread = 0

    @property
    def half_open(self) -> bool:
        """True if the other end is closed and this end is not."""
        return self._peer.is_closing() and not self._closing

    # ---- asyncio's transport ---------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if self._closing or not data or not self.process.alive:
            return
        self._peer.arrive(bytes(data))
        if self.get_write_buffer_size() > HIGH_WATER and not self._writer_waits:
            self._writer_waits = True
            self.call(self._protocol.pause_writing)

    def written(self) -> None:
        """Resume writing if the other side has read enough data."""
        if self._writer_waits and self.get_write_buffer_size() <= HIGH_WATER // 4:
            self._writer_waits = False
            self.call(self._protocol.resume_writing)

    def get_write_buffer_size(self) -> int:
        """Return the number of unread bytes that exceed the kernels' buffers."""
        return max(0, self._peer.unread - KERNEL_BYTES)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing: the limits are fixed."""

    def write_eof(self) -> None:
        if not self._closing:
            self._peer.arrive("eof")

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        if not self._closing:
            self.write_eof()
            self._lose(None)

    def abort(self) -> None:
        if not self._closing:
            if self.process.alive:
                self._peer.arrive("reset")
            self._lose(None)

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self.kick()

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol


class NetworkedLoop(VirtualLoop):
    """An event loop in virtual time with TCP between virtual processes.

    Code that connects or listens must run in one of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.listening: dict[tuple[str, int], VirtualServer] = {}
        self._free_port = FIRST_FREE_PORT
        self._addressed: dict[int, tuple[str, int]] = {}
        self._waiting: dict[asyncio.Future[None], None] = {}
        self.complaints: list[str] = []
        # Ends with incoming data that cannot be read now. If the other end is closed, only this dict refers to them.
        self.blocked: dict[VirtualTransport, None] = {}

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Record an unhandled exception and continue, as the event loop in production does."""
        self.complaints.append(f"{context.get('message')}: {context.get('exception')!r}")

    # ---- processes -------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Let all waiting ends check again, because the state of a process has changed."""
        blocked, self.blocked = self.blocked, {}
        for transport in blocked:
            transport.kick()
        waiting, self._waiting = self._waiting, {}
        for each in waiting:
            if not each.done():
                each.set_result(None)

    # ---- asyncio's loop --------------------------------------------------------------------------------------

    def is_running(self) -> bool:
        return asyncio._get_running_loop() is self  # pyright: ignore[reportPrivateUsage]

    def is_closed(self) -> bool:
        return self._closed

    def get_task_factory(self) -> None:
        """Return None: tasks are asyncio's."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Call ``func`` now and return a finished future: the work of a thread takes no virtual time."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    async def getaddrinfo(
        self, host: Any, port: Any, *, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> list[Any]:
        """Return ``host`` itself as its address."""
        return [(socket.AF_INET, type or socket.SOCK_STREAM, proto, "", (str(host), int(port)))]

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        """Record the destination of ``sock``. Raise ``OSError`` as the kernel would."""
        await self._reach((address[0], address[1]))
        self._addressed[id(sock)] = (address[0], address[1])

    async def _reach(self, where: tuple[str, int]) -> VirtualServer:
        here = _running_in.get()
        while True:
            await asyncio.sleep(LATENCY_SECONDS)
            if not here.alive:
                raise ConnectionAbortedError(errno.ECONNABORTED, "this process was killed")
            found = self.listening.get(where)
            if not here.frozen and not here.unreachable and (found is None or not found.process.unreachable):
                if found is None:
                    raise ConnectionRefusedError(errno.ECONNREFUSED, f"no process listens at {where[0]}:{where[1]}")
                return found
            again = self.create_future()
            self._waiting[again] = None
            try:
                await again
            finally:
                self._waiting.pop(again, None)

    async def create_connection(
        self, protocol_factory: Factory, host: Any = None, port: Any = None, *, sock: Any = None, **options: Any
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        if sock is None:
            where = str(host), int(port)
        else:
            where = self._addressed.pop(id(sock))
            sock.close()  # the socket was only the key of its destination
        server = await self._reach(where)
        here = _running_in.get()
        self._free_port += 1
        names = (here.address, self._free_port), where
        near = VirtualTransport(self, here, copy_context(), names)
        far = VirtualTransport(self, server.process, server.context.copy(), names[::-1])
        protocol = protocol_factory()
        near.begin(protocol, far)
        far.begin(server.context.run(server.factory), near)
        far.arrive("made")
        near.made()
        return near, protocol

    async def create_server(self, protocol_factory: Factory, host: Any = None, port: Any = None, **options: Any) -> Any:
        process = _running_in.get()
        if not port:
            self._free_port += 1
        server = VirtualServer(self, process, port or self._free_port, protocol_factory)
        where = server.getsockname()
        if where in self.listening or not process.alive:
            raise OSError(errno.EADDRINUSE, f"{where[0]}:{where[1]} is in use")
        self.listening[where] = server
        return server
