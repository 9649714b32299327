"""The engines and stores of one simulation, and KV transfers between them: sends, and links that carry their chunks.

Each engine has one link out and one link in. A link serves one transfer after the other, so transfers that share a link
wait for each other. Layers are sent while their step computes: a transfer may start when the first layer is computed.
It ends no earlier than the end of the step plus the time for the last layer's bytes.
"""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Generic, Protocol, TypeVar

from tercet import __version__
from tercet.protocol import (
    Content,
    EngineStatus,
    EngineUnreachable,
    KVAddrInfo,
    RankAddress,
    Request,
    Reservation,
    TercetError,
    TransferFailed,
)
from tercet_lab.sim.block_pool import Prompt
from tercet_lab.sim.leases import PromptLease, PromptLeases
from tercet_lab.sim.step_times import Profile, Transfer


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
        self, sender: Node[Any], receiver: SendTarget, lease: str, prompt: Prompt, begin: int, end: int
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

    def all_at_once(self) -> None:
        """Send KV that exists already."""
        now = self._loop.time()
        self.chunk(0, self.end, now, now)
        self.computed()

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


L = TypeVar("L", bound=PromptLeases[Any])


class Node(ABC, Generic[L]):
    """An engine or a store of a simulation, which can fail: its leases and sends, and what the verbs of both do alike.

    It is a :class:`SendTarget`. ``address`` is its URL for other processes.
    """

    _leases: L

    def __init__(self, name: str, profile: Profile, network: Network, lease_ttl: float, address: str | None) -> None:
        self.name = name
        self.profile = profile
        self.transfer = profile.transfer
        self.network = network
        self.incarnation = ""
        self._loop = asyncio.get_running_loop()
        self._layout = profile.layout()
        self._lease_ttl = lease_ttl
        self._lease_numbers = count(1)  # continues after a failure: no new lease matches a late message
        self._ranks = (RankAddress(0, (address or f"sim://{name}",)),)
        self._down = False
        self._sends: dict[Send, str] = {}  # with their sequences

    @property
    def down(self) -> bool:
        """True after a failure, until it has recovered."""
        return self._down

    def close(self) -> None:
        """End the cycles of references in what it keeps, at the end of a simulation."""

    def _start(self) -> None:
        """Begin, at first and after each failure; subclasses also make their memory and leases."""
        self.incarnation = uuid.uuid4().hex

    def _end_sends(self, error: TercetError) -> None:
        for send in list(self._sends):
            send.fail(error)

    # ---- calls -----------------------------------------------------------------------------------------------

    async def _reach(self) -> None:
        """Wait for the latency of a call. Raise ``EngineUnreachable`` if it is down then."""
        if self.profile.call:
            await asyncio.sleep(self.profile.call)
        if self._down:
            raise EngineUnreachable(f"{self.name} is down")

    @abstractmethod
    async def _lease(self, request: Request, end: int | None, ttl: float) -> PromptLease:
        """Reserve room for ``prompt[:end]``."""

    @abstractmethod
    async def extend(self, lease: str, request: Request, end: int | None) -> tuple[Reservation, float]:
        """Extend a lease, given by its name, as :meth:`extend_recv` does. Also return its timeout in seconds."""

    @asynccontextmanager
    async def prep_recv(self, request: Request, end: int | None = None) -> AsyncGenerator[Reservation]:
        lease = await self._lease(request, end, self._lease_ttl)
        try:
            yield self._reservation(lease, lease.matched)
        finally:
            self._leases.end(lease)

    async def reserve(self, request: Request, end: int | None, ttl: float) -> Reservation:
        """Do as :meth:`prep_recv`; the lease ends ``ttl`` seconds after its last activity, or by :meth:`release`."""
        lease = await self._lease(request, end, ttl)
        return self._reservation(lease, lease.matched)

    async def extend_recv(self, reservation: Reservation, request: Request, end: int | None = None) -> Reservation:
        extended, _ = await self.extend(reservation.lease, request, end)
        return extended

    def _extended(self, lease: PromptLease) -> tuple[Reservation, float]:
        size = self.profile.block_size
        return self._reservation(lease, lease.valid_end // size * size), lease.ttl

    def _reservation(self, lease: PromptLease, matched: int) -> Reservation:
        info = KVAddrInfo(
            lease.name, self.name, lease.matched, lease.end, "sim", self._ranks, self._layout,
            adapter=lease.prompt.adapter or "",
        )  # fmt: skip
        return Reservation(info, matched)

    async def release(self, lease: str) -> int:
        """End a lease, and return the end of its valid KV, in tokens. Raise ``UnknownSequence`` if it is not open."""
        await self._reach()
        found = self._leases.require(lease)
        self._leases.end(found)
        return found.valid_end

    def _status(self, **of_its_kind: Any) -> EngineStatus:
        """Return a status: what engines and stores report alike, and ``of_its_kind``."""
        return EngineStatus(
            engine=self.name, model=self.profile.model.name, version=__version__,
            vllm_version=f"simulated {self.profile.name}", block_size=self.profile.block_size,
            max_model_len=self.profile.max_model_len, sends=len(self._sends), incarnation=self.incarnation,
            fingerprint=self._layout.model, layout=self._layout, dtype=self._layout.dtype, **of_its_kind,
        )  # fmt: skip

    # ---- receiving KV ----------------------------------------------------------------------------------------

    def refuses(self, lease: str, prompt: Prompt, end: int) -> str | None:
        """See :meth:`SendTarget.refuses`."""
        found = self._open_lease(lease)
        return self._refusal(found, found is not None and found.prompt.begins_like(prompt, end))

    def refuses_content(self, lease: str, content: Content) -> str | None:
        """Do as :meth:`refuses`, given the content's identity, which a sender in another process sent."""
        found = self._open_lease(lease)
        return self._refusal(found, found is not None and found.prompt.content(content.end) == content)

    def _open_lease(self, name: str) -> PromptLease | None:
        return None if self._down else self._leases.find(name)

    def _refusal(self, lease: PromptLease | None, same: bool) -> str | None:
        """Return the reason why a lease (None: it has ended) does not accept KV, or None, which counts as an activity.

        ``same`` is True if the KV is of the lease's tokens.
        """
        if lease is None:
            return "the lease has ended"
        if not same:
            return f"the KV has other tokens, another cache salt or another adapter than lease {lease.name}"
        self._leases.renew(lease)
        return None

    def receive(self, lease: str, prompt: Prompt, begin: int, end: int, answer: Callable[[str | None], None]) -> None:
        """See :meth:`SendTarget.receive`."""
        answer(self.refuses(lease, prompt, end) or self.take_in(lease, begin, end))

    @abstractmethod
    def take_in(self, lease: str, begin: int, end: int) -> None:
        """Record that the KV of the tokens ``[begin, end)`` has arrived under the lease."""

    # ---- sending KV ------------------------------------------------------------------------------------------

    def loses_a_transfer(self) -> bool:
        """True, at random, if a transfer from here is to be lost; False unless an option says otherwise."""
        return False


class Network:
    """The engines and stores of one simulation by name, and their links.

    ``prompt`` makes a :class:`Prompt`, which has the model's answer, from tokens, cache salt and adapter.
    """

    def __init__(self) -> None:
        self.prompt: Callable[[tuple[int, ...], str | None, str | None], Prompt] = Prompt
        self.bytes_sent = 0
        self._nodes: dict[str, Node[Any]] = {}
        self._preemptions: dict[str, int] = {}
        self._out_free: dict[str, float] = {}
        self._in_free: dict[str, float] = {}

    def add(self, node: Node[Any]) -> None:
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

    def book(self, sender: Node[Any], receiver: SendTarget, size: int, first: float, last: float) -> float:
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
