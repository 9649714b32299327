"""The agent: the process that moves one rank's KV, next to the worker that computes it.

It shares only the worker's KV memory: not the interpreter, whose lock would delay the forward pass, nor the cores that
compute. It ends when the worker ends for any reason, since their channel ends then.
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
    SendOpening,
    StepBegins,
    StepEnds,
    StepNote,
)
from tercet.transport.agent.control_channel import ControlServer
from tercet.transport.backends.tcp import MAX_CHUNK_BYTES
from tercet.transport.block_sizes import BlockShape
from tercet.transport.bounded_sockets import LOOPBACK, bounded, with_ipv6
from tercet.transport.local_rank import TransportSettings
from tercet.transport.memory.handles import DeviceHandles, RdmaHandles
from tercet.transport.memory.staged import StagedMemory
from tercet.transport.outgoing import SendReport
from tercet.transport.rank import RankTransport
from tercet.transport.receive_traces import ReceiveEnd
from tercet.transport.region import KVRegion, RegionShape

if TYPE_CHECKING:
    from tercet.transport.memory.torch_blocks import ComputedEvents

logger = logging.getLogger(__name__)
MAX_NOTE_BYTES = 1024 * 1024


class AgentSetup(msgspec.Struct, frozen=True):
    """An agent's configuration; it may use ``cpus``, and ``kv`` is an inherited descriptor of the rank's KV.

    ``staged``: KV is reached through buffers. Either it lies on the ``device``, and the descriptor's file has only
    generation words; or it lies in the file, in the device's role. ``mapped``: peers on this machine may also map that
    device's memory. ``rdma``: the handles by which peers on other machines read it. The API server's process reaches
    the agent at ``control_host``.
    """

    rank: int
    kv: int
    shape: RegionShape
    fingerprint: str
    settings: TransportSettings
    cpus: Collection[int]
    block: BlockShape | None = None
    staged: bool = False
    device: DeviceHandles | None = None
    mapped: bool = False
    rdma: RdmaHandles | None = None
    control_host: str = LOOPBACK


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
        """Close the connections."""
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
                self._push(self._pushes, note.planes)
            case StepBegins():
                for opening in note.opened:
                    self._open(opening)
                self._pushes = note.pushes
            case StepEnds():
                for each in note.completed:
                    self._transport.sends.finish(each.send_id, each.begin, each.end)
                self._pushes = ()
            case _:
                assert_never(note)

    def _open(self, opening: SendOpening, word: int | None = None) -> None:
        def done(outcome: SendReport | TercetError) -> None:
            if isinstance(outcome, SendReport):
                report = SendDone(opening.send_id, self._rank, outcome.bytes, outcome.chunks, outcome.transport)
            else:
                report = SendDone(opening.send_id, self._rank, error=outcome.message)
            self._reporter.report(opening.notify, report)

        self._transport.sends.open(
            opening.send_id, opening.lease, opening.content, opening.destinations, done, word, opening.traceparent
        )

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
                self._notify_of_lease.pop(command.lease, None)
                return valid_end
            case CancelSend():
                return self._transport.sends.cancel(command.send_id)
            case PushCached():
                self._open(command.opening, command.word)
                self._push(command.pushes, range(self._region.num_layers))
                end = command.completion
                return self._transport.sends.finish(end.send_id, end.begin, end.end)
            case ReadCounters():
                return dict(self._transport.counters())

    def close(self) -> None:
        """Stop the threads."""
        self._control.close()
        self._transport.close()
        self._reporter.close()


def _through_buffers(region: KVRegion, setup: AgentSetup) -> tuple[StagedMemory, ComputedEvents | None]:
    """Return a rank's staged memory, and its worker's events, or None if no device computes there."""
    from tercet.transport.memory import torch_blocks  # imports torch, which most agents do not need

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
