"""The worker's side of an agent: it starts the agent, and sends notes to it."""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from tercet.protocol import EngineError
from tercet.transport.agent.agent import MAX_NOTE_BYTES, AgentSetup, Ready
from tercet.transport.agent.agent_messages import StepNote

logger = logging.getLogger(__name__)
# In seconds. If KV is on a device, an agent imports PyTorch, creates a context and pins memory: slow with a cold disk.
START_SECONDS = 180.0
STOP_SECONDS = 5.0
CHANNEL_BYTES = 4 * 1024 * 1024
# Size of the notes that are kept, in addition to those in the channel, while the agent does not read: more than any
# harmless stall needs.
BACKLOG_BYTES = 64 * 1024 * 1024
TUNABLES = "GLIBC_TUNABLES"
# Copy past the caches from this size on (glibc's minimum is 0x4040), and smaller sizes never by ``rep movsb``.
COPY_PAST_THE_CACHES = {
    "glibc.cpu.x86_non_temporal_threshold": "0x4800",
    "glibc.cpu.x86_rep_movsb_threshold": "0x10000000",
}


class AgentProcess:
    """One rank's agent; the caller keeps the descriptor in ``setup``.

    Raises :class:`~tercet.protocol.EngineError` if the agent cannot start. An agent that dies ends its worker: leases
    and pushes are half done, and only a restart of the engine by its supervisor cleans that up. The thread that makes
    this object must live as long as the worker: when the thread ends, the kernel kills the agent, so that a stopped
    agent ends with its worker, too.
    """

    def __init__(self, setup: AgentSetup) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._closing = threading.Event()
        with theirs:
            for end in (self._channel, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHANNEL_BYTES)
            command = [sys.executable, "-m", "tercet.transport.agent", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=(setup.kv, theirs.fileno()), stdin=subprocess.DEVNULL, env=past_the_caches(os.environ)
            )
        try:
            self.ready = self._introduce(setup)
        except BaseException:
            self._stop()
            raise
        self._channel.setblocking(False)
        self._lock = threading.Lock()
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._encoder = msgspec.msgpack.Encoder()
        threading.Thread(target=self._watch, name="tercet-agent", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id of the agent."""
        return self._process.pid

    def _introduce(self, setup: AgentSetup) -> Ready:
        # Not on the command line, which every user of the machine can read: the setup contains the secret.
        self._channel.settimeout(START_SECONDS)
        try:
            self._channel.send(msgspec.msgpack.encode(setup))
            answer = self._channel.recv(MAX_NOTE_BYTES)
        except TimeoutError:
            raise EngineError(f"the KV agent did not start within {START_SECONDS:.0f} s") from None
        except OSError:
            answer = b""
        if not answer:
            raise EngineError(f"the KV agent ended at start with status {self._process.wait()}; see its log above")
        ready = msgspec.msgpack.decode(answer, type=Ready)
        if ready.error is not None:
            raise EngineError(f"the KV agent cannot start: {ready.error}")
        return ready

    def tell(self, note: StepNote) -> None:
        """Send a note without waiting: notes that a stopped agent does not read are kept for it.

        Raises :class:`~tercet.protocol.EngineError` if the agent has ended, or has not read for far too long.
        """
        encoded = self._encoder.encode(note)
        try:
            with self._lock:
                if self._backlog or not self._sent(encoded):
                    self._keep(encoded)
        except OSError as error:
            raise EngineError(f"the KV agent (process {self.pid}) does not accept notes: {error}") from error

    def _sent(self, encoded: bytes) -> bool:
        try:
            self._channel.send(encoded)
        except BlockingIOError:
            return False
        return True

    def _keep(self, encoded: bytes) -> None:
        if self._backlog_bytes + len(encoded) > BACKLOG_BYTES:
            raise BlockingIOError(f"{self._backlog_bytes} bytes of notes are already waiting")
        if not self._backlog:
            threading.Thread(target=self._catch_up, name="tercet-notes", daemon=True).start()
        self._backlog.append(encoded)
        self._backlog_bytes += len(encoded)

    def _catch_up(self) -> None:
        # This thread ends with the backlog, so that normally a note wakes no further thread.
        writable = select.poll()
        writable.register(self._channel, select.POLLOUT)
        with suppress(OSError):  # the agent, or the channel, has ended: the next ``tell`` raises
            while True:
                writable.poll()
                with self._lock:
                    while self._backlog and self._sent(self._backlog[0]):
                        self._backlog_bytes -= len(self._backlog.popleft())
                    if not self._backlog:
                        return

    def _watch(self) -> None:
        status = self._process.wait()
        if not self._closing.is_set():
            logger.critical("the KV agent ended with status %d; this worker ends with it", status)
            os._exit(1)

    def close(self) -> None:
        """End the agent, and wait until it has ended."""
        self._closing.set()
        self._stop()

    def _stop(self) -> None:
        self._channel.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("the KV agent (process %d) did not end within %.0f s; killing it", self.pid, STOP_SECONDS)
            self._process.kill()
            self._process.wait()


def past_the_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` for a process that copies KV; a tunable that the user has set is kept.

    Copied bytes are not read soon, so they need not displace the engine's data in the caches. Stores past the caches
    also save reading each line before it is overwritten, a third of the traffic to memory. The C library has such a
    copy, but uses it only for sizes of about a cache, and ``rep movsb`` for several hundred KiB. Both limits are
    tunables that it reads when a process starts: see "Hardware Capability Tunables" in the glibc manual. Other C
    libraries and processors ignore them.
    """
    found = [part for part in environment.get(TUNABLES, "").split(":") if part]
    known = {part.partition("=")[0] for part in found}
    added = [f"{name}={value}" for name, value in COPY_PAST_THE_CACHES.items() if name not in known]
    return {**environment, TUNABLES: ":".join([*found, *added])}
