"""The agent: the process that moves one rank's KV, next to the worker that computes it; and the worker's side of it.

The agent shares only the worker's KV memory: not the interpreter, whose lock would delay the forward pass, nor the
cores that compute. It ends when the worker ends for any reason, since their channel ends then::

    API server ── control channel (ZeroMQ): leases, cancellations ──▶ Agent ══▶ agents of other ranks
                  ◀──────────────── reports: filled, sent ──────────    ▲
    worker     ── AgentProcess.send: "layer 7 is done" (SEQPACKET) ─────┘
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, assert_never

import msgspec
import zmq

from tercet.protocol import TercetError, TransferFailed
from tercet.transport.agent.agent_messages import (
    CancelSend,
    Command,
    ControlServer,
    ExtendLease,
    GrantLease,
    LayersDone,
    LeaseFilled,
    Push,
    PushCached,
    ReadCounters,
    ReceiveDone,
    Report,
    RevokeLease,
    SendDone,
    SendPlan,
    StepBegins,
    StepEnds,
    StepNote,
)
from tercet.transport.backends.tcp import MAX_CHUNK_BYTES
from tercet.transport.grants import ReceiveEnd
from tercet.transport.local_rank import TransportSettings
from tercet.transport.peer import SendReport
from tercet.transport.rank import RankTransport
from tercet.transport.region import BlockShape, KVRegion, RegionShape
from tercet.transport.sockets import LOOPBACK, bounded, with_ipv6
from tercet.transport.staged import DeviceHandles, RdmaHandles, StagedMemory

if TYPE_CHECKING:
    from tercet.transport.torch_blocks import ComputedEvents
import select
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

from tercet.protocol import EngineError

logger = logging.getLogger(__name__)
MAX_NOTE_BYTES = 1024 * 1024


class AgentSetup(msgspec.Struct, frozen=True):
    """An agent's configuration."""

    rank: int
    kv: int  # an inherited descriptor of the rank's KV
    shape: RegionShape
    fingerprint: str
    settings: TransportSettings
    cpus: Collection[int]  # those that it may use
    block: BlockShape | None = None
    # KV is reached through buffers. Either it lies on the device, and the descriptor's file has only generation words;
    # or it lies in the file, in the device's role.
    staged: bool = False
    device: DeviceHandles | None = None
    mapped: bool = False  # peers on this machine may also map that device's memory
    rdma: RdmaHandles | None = None  # handles by which peers on other machines read it
    control_host: str = LOOPBACK  # at which the API server's process reaches it


class Ready(msgspec.Struct, frozen=True):
    """An agent's first message: its addresses, or the reason why it cannot start."""

    addresses: tuple[str, ...] = ()
    control: str = ""
    secret: str = ""
    error: str | None = None


class Reporter:
    """Sender of reports to edges. A ZMQ socket belongs to one thread at a time, hence the lock."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._lock = threading.Lock()

    def report(self, to: str, report: Report) -> None:
        """Queue one report, with the key of the inbox; never blocks."""
        address, _, key = to.partition("#")
        with self._lock:
            socket = self._sockets.get(to)
            if socket is None:
                socket = bounded(self._context.socket(zmq.PUSH))
                socket.linger = 0
                socket.sndhwm = 0  # an edge that is stuck must not block the threads that move KV
                with_ipv6(socket, address)
                socket.connect(address)
                self._sockets[to] = socket
            socket.send_multipart([key.encode(), msgspec.msgpack.encode([type(report).__name__, report])])

    def close(self) -> None:
        self._context.destroy(linger=0)


class Agent:
    """One rank's agent: its transport, its control channel, and the pushes of the current step."""

    def __init__(self, setup: AgentSetup) -> None:
        self._rank = setup.rank
        self._notify_of_lease: dict[str, str] = {}
        self._reporter = Reporter()
        self._region = KVRegion(setup.kv, setup.shape)
        self._groups = setup.shape.group_planes
        staged, self._computed = (None, None) if not setup.staged else _through_buffers(self._region, setup)
        self._transport = RankTransport(
            self._region, setup.fingerprint, setup.settings, self._lease_filled, setup.block, staged,
            self._receive_ended,
        )  # fmt: skip
        self._control = ControlServer(self._handle, setup.control_host)
        self._pushes: tuple[Push, ...] = ()
        self.ready = Ready(self._transport.addresses, self._control.address, self._control.secret)

    def follow(self, channel: socket.socket) -> None:
        """Handle the worker's notes until the worker has ended."""
        decoder = msgspec.msgpack.Decoder(StepNote)
        while note := channel.recv(MAX_NOTE_BYTES):
            self._take(decoder.decode(note))

    def _take(self, note: StepNote) -> None:
        match note:
            case LayersDone():
                if self._computed is not None and note.computed is not None:
                    self._computed.wait(note.computed)  # announce KV only once it is computed
                # Each layer leaves while the next one is computed: a send takes little longer than its prefill.
                self._push(self._pushes, note.planes)
            case StepBegins():
                for plan in note.opened:
                    self._open(plan)
                self._pushes = note.pushes
            case StepEnds():
                for each in note.completed:
                    self._transport.sends.finish(each.send_id, each.begin, each.end)
                self._pushes = ()
            case _:
                assert_never(note)

    def _open(self, plan: SendPlan, word: int | None = None) -> None:
        def done(outcome: SendReport | TercetError) -> None:
            if isinstance(outcome, SendReport):
                report = SendDone(plan.send_id, self._rank, outcome.bytes, outcome.chunks, outcome.transport)
            else:
                report = SendDone(plan.send_id, self._rank, error=outcome.message)
            self._reporter.report(plan.notify, report)

        to = plan.destinations[self._rank]
        self._transport.sends.open(plan.send_id, plan.lease, plan.content, to, done, word, plan.traceparent)

    def _push(self, pushes: Sequence[Push], planes: Sequence[int]) -> None:
        together = list(neighbouring(planes))
        for push in pushes:
            group = self._groups[push.group]
            for layers in together:
                if mine := range(max(layers.start, group.start), min(layers.stop, group.stop)):
                    self._transport.sends.push(push.send_id, mine, push.slot, push.blocks)

    def _lease_filled(self, lease: str, valid_end: int) -> None:
        notify = self._notify_of_lease.get(lease)
        valid = self._transport.grants.content(lease, valid_end)
        if notify is not None and valid is not None:
            self._reporter.report(notify, LeaseFilled(lease, self._rank, valid))

    def _receive_ended(self, ended: ReceiveEnd) -> None:
        notify = self._notify_of_lease.get(ended.lease)
        if notify is not None:
            self._reporter.report(notify, ReceiveDone(self._rank, ended))

    def _handle(self, command: Command) -> Any:
        match command:
            case GrantLease():
                self._transport.grants.grant(command)
                self._notify_of_lease[command.lease] = command.notify  # no write can happen before this is answered
                return None
            case ExtendLease():
                return self._transport.grants.extend(command)
            case RevokeLease():
                valid_end = self._transport.grants.revoke(command.lease) or 0
                # After the revocation: sends that were under way may still report their end.
                self._notify_of_lease.pop(command.lease, None)
                return valid_end
            case CancelSend():
                return self._transport.sends.cancel(command.send_id)
            case PushCached():
                plan = command.plan
                # All of it is here already: opened, pushed and ended in one step.
                self._open(plan, command.word)
                self._push(command.pushes, range(self._region.num_layers))
                return self._transport.sends.finish(plan.send_id, plan.begin, plan.end)
            case ReadCounters():
                return dict(self._transport.counters())

    def close(self) -> None:
        self._control.close()
        self._transport.close()
        self._reporter.close()


def _through_buffers(region: KVRegion, setup: AgentSetup) -> tuple[StagedMemory, ComputedEvents | None]:
    """Return a rank's staged memory, and its worker's events, or None if no device computes there."""
    from tercet.transport import torch_blocks  # imports torch, which most agents do not need

    shape, device = region.shape, setup.device
    planes = torch_blocks.host_planes(region) if device is None else torch_blocks.device_planes(device, shape)
    offer = b"" if device is None or not setup.mapped else msgspec.msgpack.encode(device)
    try:
        blocks = torch_blocks.TorchBlocks(planes, MAX_CHUNK_BYTES, shape.order, offer, rdma=setup.rdma)
        staged = StagedMemory(blocks, shape, MAX_CHUNK_BYTES)
    except RuntimeError as error:
        raise TransferFailed(
            f"the device or the host has too little memory for moving KV: {error}; lower the engine's share of the "
            "device: --gpu-memory-utilization"
        ) from error
    staged.practise()
    logger.info("KV moves through %d MiB of host memory and %d MiB of device memory", staged.host_bytes >> 20,
                blocks.device_bytes >> 20)  # fmt: skip
    return staged, None if device is None else torch_blocks.ComputedEvents(device)


def neighbouring(planes: Sequence[int]) -> Iterator[range]:
    """Yield planes as ranges: ``[4, 5, 6, 1]`` as ``[4, 7)`` and ``[1, 2)``."""
    begin = 0
    for at in range(1, len(planes) + 1):
        if at == len(planes) or planes[at] != planes[at - 1] + 1:
            yield range(planes[begin], planes[at - 1] + 1)
            begin = at


def run(channel_fd: int) -> None:
    """Run an agent until the worker at the channel's other end has ended; its first message is :class:`AgentSetup`."""
    with socket.socket(fileno=channel_fd) as channel:
        message = channel.recv(MAX_NOTE_BYTES)
        if not message:
            return
        setup = msgspec.msgpack.decode(message, type=AgentSetup)
        try:
            if setup.cpus:
                # The inherited cores are the computing ones; moving bytes there would slow down the forward pass.
                os.sched_setaffinity(0, setup.cpus)
            agent = Agent(setup)
        except (OSError, TercetError) as error:
            message = error.message if isinstance(error, TercetError) else str(error)
            channel.send(msgspec.msgpack.encode(Ready(error=message)))
            return
        try:
            channel.send(msgspec.msgpack.encode(agent.ready))
            agent.follow(channel)
        except OSError:
            return  # the worker's end failed: the same as closed
        finally:
            agent.close()


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
        # Not a pipe: notes keep their borders, and the end of either process ends it.
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
            self.ready = ready
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
        return self._process.pid

    def send(self, note: StepNote) -> None:
        """Send a note without waiting: notes that a stopped agent does not read are kept for it.

        Raises :class:`~tercet.protocol.EngineError` if the agent has ended, or has not read for far too long.
        """
        encoded = self._encoder.encode(note)
        try:
            with self._lock:
                # Behind those that wait: notes of a step have an order.
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
        with suppress(OSError):  # the agent, or the channel, has ended: the next ``send`` raises
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
        # The agent ends when its channel ends; only one that is stuck is killed.
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
