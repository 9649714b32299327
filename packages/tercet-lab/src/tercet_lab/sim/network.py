"""KV transfers between the engines of one simulation: sends, and the links that carry their chunks.

Each engine has one link out and one link in. A link serves one transfer after the other, so transfers that share a link
wait for each other. Layers are sent while their step computes: a transfer may start when the first layer is computed.
It ends no earlier than the end of the step plus the time for the last layer's bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from tercet.protocol import KVAddrInfo, TercetError, TransferFailed
from tercet_lab.sim.block_pool import Prompt
from tercet_lab.sim.step_times import Profile, Transfer


class SendSource(Protocol):
    """The sender of a send: an engine or a store of this process."""

    name: str
    profile: Profile
    network: Network

    @property
    def transfer(self) -> Transfer:
        """Speed of KV transfers from there."""
        ...

    def loses_a_transfer(self) -> bool:
        """True, at random, if this transfer is to be lost."""
        ...


class SendTarget(Protocol):
    """The receiver of a send: an engine or a store of this process, or an engine of another process."""

    @property
    def name(self) -> str:
        """The engine's name."""
        ...

    @property
    def transfer(self) -> Transfer:
        """Speed of KV transfers to the engine."""
        ...

    def refuses(self, lease: str, prompt: Prompt, end: int) -> str | None:
        """Return a reason, known here, why this lease does not accept KV of these tokens up to ``end``, or None.

        None counts as activity: the lease's timeout starts again.
        """
        ...

    def receive(self, lease: str, prompt: Prompt, begin: int, end: int, answer: Callable[[str | None], None]) -> None:
        """Receive KV of the tokens ``[begin, end)``. Call ``answer`` with a refusal or None, now or later."""
        ...


class Send:
    """One send: ``sender`` sends the KV of ``prompt[begin:end)`` into a lease of ``receiver``.

    If it fails, the receiver keeps the chunks that have arrived by then.
    """

    def __init__(
        self, sender: SendSource, receiver: SendTarget, lease: str, prompt: Prompt, begin: int, end: int
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sender = sender
        self._receiver = receiver
        self._lease = lease
        self._prompt = prompt
        self._begin = begin
        self.end: int = end
        self._arrives = 0.0
        self._left: int = begin
        self._under_way: list[tuple[int, int, float]] = []  # begin, end, arrival time
        self._timer: asyncio.TimerHandle | None = None
        self.done: asyncio.Future[None] = self._loop.create_future()
        self.bytes = 0
        self.chunks = 0

    def chunk(self, begin: int, end: int, from_time: float, to_time: float) -> None:
        """Send the KV of the tokens ``[begin, end)``, which a step computes between two times (seconds of the loop).

        Equal times mean that the KV exists already. KV that was sent is not sent again if a preempted sequence
        recomputes it.
        """
        begin, end = max(begin, self._left), min(end, self.end)
        tokens = end - begin
        if tokens <= 0 or self.done.done():
            return
        refusal = self._receiver.refuses(self._lease, self._prompt, self.end)
        if refusal is not None:
            self.fail(self._refused(refusal))
            return
        model = self._sender.profile.model
        size = tokens * model.kv_bytes_per_token
        first = from_time + (to_time - from_time) / model.layers
        network = self._sender.network
        self._arrives = max(self._arrives, network.book(self._sender, self._receiver, size, first, to_time))
        self._under_way.append((begin, end, self._arrives))
        self._left = end
        self.bytes += size
        self.chunks += model.layers

    def computed(self) -> None:
        """Record that all chunks are computed: the send ends when the last one arrives."""
        if not self.done.done():
            self._timer = self._loop.call_at(max(self._arrives, self._loop.time()), self._arrived)

    def _arrived(self) -> None:
        self._timer = None  # it refers to this send
        if self.done.done():
            return
        if self._sender.loses_a_transfer():
            self._under_way.clear()
            self.fail(TransferFailed(f"the KV from {self._sender.name} to {self._receiver.name} was lost on the way"))
        else:
            self._receiver.receive(self._lease, self._prompt, self._begin, self.end, self._answered)

    def _answered(self, refusal: str | None) -> None:
        if refusal is not None:
            self._under_way.clear()
            self.fail(self._refused(refusal))
        elif not self.done.done():
            self.done.set_result(None)

    def _refused(self, refusal: str) -> TransferFailed:
        return TransferFailed(f"{self._receiver.name} refused: {refusal}", "kv_addr_info")

    def fail(self, error: TercetError) -> None:
        """End the send with an error. Chunks that have not arrived yet are lost."""
        if self._timer is not None:
            self._timer.cancel()
        if self.done.done():
            return
        self.done.set_exception(error)
        for begin, end, arrives in self._under_way:
            if arrives <= self._loop.time():
                self._receiver.receive(self._lease, self._prompt, begin, end, lambda _: None)


class Node(SendTarget, Protocol):
    """An engine or a store of a simulation."""

    def close(self) -> None:
        """End the cycles of references in what it keeps, at the end of a simulation."""
        ...


class Network:
    """The engines and stores of one simulation by name, and their links.

    ``prompt`` makes a :class:`Prompt`, which has the model's answer, from tokens, cache salt and adapter.
    """

    def __init__(self) -> None:
        self.prompt: Callable[[tuple[int, ...], str | None, str | None], Prompt] = Prompt
        self.bytes_sent = 0
        self._nodes: dict[str, Node] = {}
        self._preemptions: dict[str, int] = {}
        self._out_free: dict[str, float] = {}
        self._in_free: dict[str, float] = {}

    def add(self, node: Node) -> None:
        """Connect an engine or a store under its name. Raise ``ValueError`` if another one has that name."""
        if node.name in self._nodes:
            raise ValueError(f"two engines have the name {node.name}; rename one")
        self._nodes[node.name] = node

    def close(self) -> None:
        """Disconnect all at the end of a simulation: this ends the cycle of references with them."""
        for node in self._nodes.values():
            node.close()
        self._nodes.clear()

    def note_preemptions(self, seq_id: str, count: int) -> None:
        """Record that an engine preempted a sequence ``count`` times."""
        if count:
            self._preemptions[seq_id] = self._preemptions.get(seq_id, 0) + count

    def take_preemptions(self, seq_id: str) -> int:
        """Return, once, how often a request was preempted in all its attempts, whose ids are ``seq_id.1`` and so on."""
        if not self._preemptions:
            return 0
        attempts = [each for each in self._preemptions if each == seq_id or each.startswith(f"{seq_id}.")]
        return sum(self._preemptions.pop(each) for each in attempts)

    def find(self, info: KVAddrInfo) -> SendTarget:
        """Return what made this reservation. Raise :class:`~tercet.protocol.TransferFailed` if it is unknown."""
        found = self._nodes.get(info.engine)
        if found is None:
            raise TransferFailed(f"this simulation has no engine {info.engine}", "kv_addr_info")
        return found

    def book(self, sender: SendSource, receiver: SendTarget, size: int, first: float, last: float) -> float:
        """Reserve the links for ``size`` bytes. Return the time at which the last byte is acknowledged.

        The first layer is ready at ``first``, the last layer at ``last``. All times are seconds of the loop.
        """
        out, into = sender.transfer, receiver.transfer
        speed = min(out.bytes_per_second, into.bytes_per_second)
        begin = max(first, self._out_free.get(sender.name, 0.0), self._in_free.get(receiver.name, 0.0))
        end = begin + size / speed
        self._out_free[sender.name] = self._in_free[receiver.name] = end
        self.bytes_sent += size
        last_layer = size / speed / sender.profile.model.layers
        return max(end, last + last_layer) + into.latency
