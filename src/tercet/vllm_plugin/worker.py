"""The worker's half: owns the transport over this rank's KV cache and pushes while the forward pass runs."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec
import zmq

from tercet.protocol import KVLayout, TercetError
from tercet.transport import Grant, SendReport, TcpTransport
from tercet.vllm_plugin.config import PluginConfig
from tercet.vllm_plugin.control import (
    CancelSend,
    Command,
    ControlServer,
    GrantLease,
    PushCached,
    ReadCounters,
    RevokeLease,
)
from tercet.vllm_plugin.memory import LayerPlanes
from tercet.vllm_plugin.messages import LeaseFilled, Push, Report, SendDone, SendOpening, StepMetadata, WorkerHandshake

REMEMBERED_CANCELLED = 4096
# For a second after each step vLLM's worker spins, and before Python 3.12 os.sched_yield keeps the interpreter's lock
# while it does. A thread of ours then waits a whole switch interval, 5 ms, each time it comes back from the kernel.
SWITCH_SECONDS = 0.0002


class Reporter:
    """Sends reports to edges; ZMQ sockets belong to one thread at a time, hence the lock."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._lock = threading.Lock()

    def report(self, to: str, report: Report) -> None:
        """Queue one report; never blocks."""
        with self._lock:
            socket = self._sockets.get(to)
            if socket is None:
                socket = self._context.socket(zmq.PUSH)
                socket.linger = 0
                socket.connect(to)
                self._sockets[to] = socket
            socket.send(msgspec.msgpack.encode([type(report).__name__, report]))

    def close(self) -> None:
        """Drop the connections."""
        self._context.destroy(linger=0)


class WorkerSide:
    """One rank: its transport, its control channel, and what to push in the current step."""

    def __init__(self, rank: int, config: PluginConfig) -> None:
        self._rank = rank
        self._config = config
        self._step = StepMetadata()
        self._notify_of_lease: dict[str, str] = {}
        self._opening = threading.Lock()
        self._cancelled: deque[str] = deque(maxlen=REMEMBERED_CANCELLED)
        self._reporter = Reporter()

    def register(self, planes: LayerPlanes, num_blocks: int, layout: KVLayout) -> None:
        """Open the transport over the KV cache; called once, before the first forward pass."""
        self._planes = planes
        self._layout = msgspec.json.encode(layout)
        port = self._config.port + self._rank if self._config.port else 0
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        self._transport = TcpTransport(
            planes.memory(num_blocks),
            fingerprint=self._layout.decode(),
            host=self._config.host,
            port=port,
            timeout=self._config.send_timeout,
            on_finished=self._lease_filled,
            cpus=_all_cpus(),
        )
        self._control = ControlServer(self._handle)

    def handshake(self) -> WorkerHandshake:
        """This rank's endpoints, for the scheduler's process."""
        control = self._control
        return WorkerHandshake(self._rank, self._transport.address, control.address, control.secret, self._layout)

    def begin_step(self, metadata: StepMetadata) -> None:
        """Take a step's orders."""
        self._step = metadata
        for opening in metadata.opened:
            self._open(opening)

    def save_layer(self, layer_name: str) -> None:
        """Push the blocks that this step completes in one layer; the layer's attention has just run."""
        if self._step.pushes:
            self._push_layers(self._step.pushes, self._planes.planes_of[layer_name])

    def end_step(self) -> None:
        """Close the sends of which this step computed the last block."""
        for send_id, begin, end in self._step.finish:
            self._transport.finish(send_id, begin, end)
        self._step = StepMetadata()

    def _push_layers(self, pushes: Iterable[Push], planes: Iterable[int]) -> None:
        for plane in planes:
            for push in pushes:
                self._transport.push(push.send_id, plane, push.slot, push.blocks)

    def _open(self, opening: SendOpening) -> None:
        send_id, notify = opening.send_id, opening.notify

        def done(outcome: SendReport | TercetError) -> None:
            if isinstance(outcome, TercetError):
                report = SendDone(send_id, self._rank, error=outcome.message)
            else:
                report = SendDone(send_id, self._rank, outcome.bytes, outcome.pieces)
            self._reporter.report(notify, report)

        with self._opening:
            if send_id in self._cancelled:
                return
            self._transport.open(send_id, opening.addresses[self._rank], opening.lease, done)

    def _cancel(self, send_id: str) -> None:
        # A send may be cancelled before the step that opens it has reached this worker; it must not open then.
        with self._opening:
            self._cancelled.append(send_id)
        self._transport.cancel(send_id)

    def _lease_filled(self, lease: str, valid_end: int) -> None:
        notify = self._notify_of_lease.get(lease)
        if notify is not None:
            self._reporter.report(notify, LeaseFilled(lease, self._rank, valid_end))

    def _handle(self, command: Command) -> Any:
        match command:
            case GrantLease():
                self._notify_of_lease[command.lease] = command.notify
                blocks = tuple(command.blocks)
                self._transport.grant(Grant(command.lease, blocks, command.begin, command.end, command.block_size))
                return None
            case RevokeLease():
                self._notify_of_lease.pop(command.lease, None)
                return self._transport.revoke(command.lease)
            case CancelSend():
                return self._cancel(command.send_id)
            case PushCached():
                return self._push_cached(command)
            case ReadCounters():
                return dict(self._transport.counters())

    def _push_cached(self, command: PushCached) -> None:
        opening = SendOpening(
            command.send_id, command.lease, command.base, tuple(command.addresses), command.notify
        )  # fmt: skip
        self._open(opening)
        push = Push(command.send_id, command.slot, tuple(command.blocks))
        self._push_layers([push], range(len(self._planes.tensors)))
        self._transport.finish(command.send_id, command.begin, command.end)

    def close(self) -> None:
        """Stop the threads."""
        self._control.close()
        self._transport.close()
        self._reporter.close()


def _all_cpus() -> set[int]:
    """CPUs that this engine may use, more than the ones that this worker is pinned to.

    The scheduler's process, our parent, has them all. On the pinned ones alone, threads that move bytes would wait for
    the forward pass, or hold it up, while other cores are idle.
    """
    return os.sched_getaffinity(os.getppid())
