"""Agent processes for tests, the edge that they report to, and a worker in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tercet.protocol import EngineError, packed
from tercet.transport import AgentProcess, AgentSetup, HeadSlice, KVRegion, SendDestination, TransportSettings
from tercet.transport.agent.agent_messages import (
    Command,
    ControlAnswer,
    Envelope,
    GrantLease,
    LayersDone,
    LeaseFilled,
    Push,
    ReadCounters,
    ReceiveDone,
    SendComplete,
    SendDone,
    SendPlan,
    StepBegins,
    StepEnds,
)
from tests.longest_wait import LONGEST_WAIT_S
from tests.unit.transport.ranks import SECONDS, TOKENS, filled, new_lease, of_lease

LAYERS, BLOCKS, BYTES = 3, 16, 8 * 1024
ALL = tuple(range(BLOCKS))
END = BLOCKS * TOKENS


class Edge:
    """Where agents report to; reports are taken one after the other, as they come."""

    def __init__(self, inbox: zmq.Socket[bytes]) -> None:
        self._inbox = inbox
        self.address = f"tcp://127.0.0.1:{inbox.bind_to_random_port('tcp://127.0.0.1')}#key"

    def next(self) -> SendDone | LeaseFilled | ReceiveDone:
        assert self._inbox.poll(int(SECONDS * 1000)), "no report"
        key, message = self._inbox.recv_multipart()
        assert key == b"key"
        kind, body = msgspec.msgpack.decode(message, type=tuple[str, msgspec.Raw])
        known: dict[str, type[SendDone | LeaseFilled | ReceiveDone]] = {
            each.__name__: each for each in (SendDone, LeaseFilled, ReceiveDone)
        }
        return msgspec.msgpack.decode(body, type=known[kind])

    def done(self) -> SendDone:
        report = self.next()
        assert isinstance(report, SendDone), report
        return report


@contextmanager
def edge() -> Generator[Edge]:
    context = zmq.Context()
    inbox = context.socket(zmq.PULL)
    try:
        yield Edge(inbox)
    finally:
        context.destroy(linger=0)


class BlockingClient:
    """One agent's orders, one at a time; raises :class:`EngineError` for one that fails or is not answered."""

    def __init__(self, address: str, secret: str, answer_seconds: float = LONGEST_WAIT_S) -> None:
        self._secret, self._answer_seconds = secret, answer_seconds
        self._serial = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(address)

    def call(self, command: Command) -> Any:
        self._serial += 1
        self._socket.send(msgspec.msgpack.encode(Envelope(self._secret, self._serial, command)))
        while self._socket.poll(int(self._answer_seconds * 1000)):
            answer = msgspec.msgpack.decode(self._socket.recv(), type=ControlAnswer)
            if answer.serial != self._serial:
                continue  # it came too late
            if answer.error is not None:
                raise EngineError(answer.error)
            return answer.value
        raise EngineError(f"no answer within {self._answer_seconds:g} s")

    def close(self) -> None:
        self._context.destroy(linger=0)


class Rank:
    """One agent, the KV that it shares with this process, and its control channel."""

    def __init__(self, region: KVRegion, agent: AgentProcess) -> None:
        self.region, self.agent = region, agent
        self.addresses = agent.ready.addresses
        self._control = BlockingClient(agent.ready.control, agent.ready.secret)

    def order(self, command: Command) -> Any:
        return self._control.call(command)

    def counters(self) -> dict[str, int]:
        return self.order(ReadCounters())

    def grant(self, notify: str, blocks: Sequence[int] = ALL) -> str:
        end = len(blocks) * TOKENS
        lease = new_lease(end)
        self.order(GrantLease(lease, [list(blocks)], 0, end, TOKENS, packed(range(end)), None, notify))
        return lease

    def close(self) -> None:
        self._control.close()
        self.agent.close()


def start(
    region: KVRegion, settings: TransportSettings | None = None, number: int = 0, *, staged: bool = False
) -> AgentProcess:
    cpus, settings = os.sched_getaffinity(0), settings or TransportSettings()
    return AgentProcess(AgentSetup(number, region.fd, region.shape, "agents", settings, cpus, staged=staged))


@contextmanager
def rank(seed: int, settings: TransportSettings | None = None, *, staged: bool = False) -> Generator[Rank]:
    region = filled(LAYERS, BLOCKS, BYTES, seed)
    try:
        found = Rank(region, start(region, settings, seed, staged=staged))
        try:
            yield found
        finally:
            found.close()
    finally:
        region.close()


def opening(send_id: str, lease: str, notify: str, *addresses: tuple[str, ...]) -> SendPlan:
    """A send of whole blocks to each of some ranks."""
    destinations = [SendDestination(each, HeadSlice(0, BYTES)) for each in addresses]
    return SendPlan(send_id, lease, of_lease(lease), 0, 0, END, [destinations] * 4, notify)


def step(
    agent: AgentProcess, opened: Sequence[SendPlan], pushes: Sequence[Push], completed: Sequence[SendComplete] = ()
) -> None:
    """A forward pass, as a worker tells of it."""
    agent.send(StepBegins(tuple(opened), tuple(pushes)))
    for layer in range(LAYERS):
        agent.send(LayersDone((layer,)))
    agent.send(StepEnds(tuple(completed)))


def agents_of(pid: int) -> list[int]:
    """The agents that a process has started and that are there still."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and b"tercet.transport.agent" in (entry / "cmdline").read_bytes():
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                found += [int(entry.name)] * (int(parent) == pid)
        except OSError:
            continue  # it ended meanwhile
    return found


def is_there(pid: int) -> bool:
    """Whether a process runs, or is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Worker:
    """A process that has an agent, as vLLM's worker does. ``pid`` is its own, ``agent`` the agent's."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", __name__])
        self._pipe, theirs = context.Pipe()
        # Not as a daemon: the agent must go because its worker goes.
        self._process = context.Process(target=_work, args=(theirs,))
        self._process.start()
        theirs.close()
        assert self._pipe.poll(SECONDS)
        self.pid: int
        self.agent: int
        self.pid, self.agent = self._pipe.recv()

    def leave(self) -> None:
        """Have it end without a word to its agent."""
        self._pipe.send("leave")

    def status(self) -> int | None:
        """Its exit status, once it has ended."""
        self._process.join(SECONDS)
        return self._process.exitcode

    def end(self) -> None:
        for pid in (self.pid, self.agent):
            if is_there(pid):
                os.kill(pid, signal.SIGKILL)
        self._process.join(SECONDS)
        self._process.close()
        self._pipe.close()


def _work(pipe: Connection) -> None:
    region = filled(1, 2, BYTES, 1)
    agent = start(region)
    pipe.send((os.getpid(), agent.pid))
    pipe.recv()


@contextmanager
def worker() -> Generator[Worker]:
    found = Worker()
    try:
        yield found
    finally:
        found.end()
