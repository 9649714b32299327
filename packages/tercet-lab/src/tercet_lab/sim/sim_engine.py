"""A simulated engine with the protocol of real engines: the verbs, which use its core."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from tercet import __version__
from tercet.protocol import (
    AdapterReport,
    BadRequest,
    Conflict,
    Content,
    EngineStatus,
    Output,
    OutputStream,
    Request,
    Reservation,
    Sent,
    SequenceReport,
    UnknownSequence,
    Usage,
    resolve_range,
)
from tercet.protocol.types import resolve_end
from tercet_lab.sim.engine_options import (
    EngineOptions,
    check_adapter,
    check_prompt,
    check_same,
    check_send,
    max_tokens_of,
    tokens_to_produce,
)
from tercet_lab.sim.hosts import Host
from tercet_lab.sim.leases import Lease
from tercet_lab.sim.network import Network, Send
from tercet_lab.sim.prompts import Prompt
from tercet_lab.sim.reservation_queue import AskedReservation
from tercet_lab.sim.sequence_work import Work, has_computed
from tercet_lab.sim.sim_core import SimCore
from tercet_lab.sim.step_times import Profile


class SimEngine(SimCore):
    """One engine in virtual or real time. ``seed`` and the engine's name determine its random decisions.

    Create it inside a running event loop; it uses the loop's time. ``address`` is its URL for other processes. On a
    ``host`` that other engines share, its steps take longer, according to its profile. Raise
    :class:`~tercet.protocol.BadRequest` if the profile has no data on sharing.
    """

    def __init__(
        self,
        name: str,
        profile: Profile,
        network: Network,
        options: EngineOptions | None = None,
        seed: int = 0,
        address: str | None = None,
        host: Host | None = None,
    ) -> None:
        super().__init__(name, profile, options, host, address)
        self.transfer = profile.transfer
        self.network = network
        self._random = random.Random(f"{seed} {name}")
        self._adapters = {name: AdapterReport(name, f"sim://{name}", name) for name in self.options.adapter_names}
        network.add(self)

    # ---- verbs -----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def prep_recv(self, request: Request, end: int | None = None) -> AsyncGenerator[Reservation]:
        lease = await self._lease(request, end, self.options.lease_ttl)
        try:
            yield self._living_leases.told(lease, lease.matched)
        finally:
            self._living_leases.end(lease)

    async def reserve(self, request: Request, end: int | None, ttl: float) -> Reservation:
        """Do as :meth:`prep_recv`; the lease ends ``ttl`` seconds after its last activity, or by :meth:`release`."""
        lease = await self._lease(request, end, ttl)
        return self._living_leases.told(lease, lease.matched)

    async def extend_recv(self, reservation: Reservation, request: Request, end: int | None = None) -> Reservation:
        extended, _ = await self.extend(reservation.lease, request, end)
        return extended

    async def extend(self, lease: str, request: Request, end: int | None) -> tuple[Reservation, float]:
        """Extend a lease, given by its name, as :meth:`extend_recv` does. Also return its timeout in seconds."""
        await self._arrive(request)
        resolved = resolve_end(request.num_tokens, end)
        prompt = self.network.prompt(request.prompt, request.cache_salt, request.adapter)
        extended = await self._between_steps(lambda: self._living_leases.extend(lease, request, prompt, resolved))
        there = extended.valid_end // self.profile.block_size * self.profile.block_size
        return self._living_leases.told(extended, there), extended.ttl

    async def _lease(self, request: Request, end: int | None, ttl: float) -> Lease:
        await self._arrive(request)
        resolved = resolve_end(request.num_tokens, end)
        if resolved == 0:
            raise BadRequest(f"end: {end} leaves no token of a prompt of {request.num_tokens} tokens", "end")
        until = self._loop.time() + self.options.reserve_wait
        asked = await self._between_steps(lambda: self._reserve(request, resolved), self._living_leases.forget)
        return await self._living_leases.granted(asked, ttl, until)

    def _reserve(self, request: Request, end: int) -> AskedReservation:
        if request.seq_id in self._generating:
            raise Conflict(f"seq_id: {request.seq_id} is in use on this engine; abort it or choose another", "seq_id")
        prompt = self.network.prompt(request.prompt, request.cache_salt, request.adapter)
        return self._living_leases.reserve(request.seq_id, prompt, end)

    async def remote_send(
        self, request: Request, to: Reservation, begin: int, end: int | None = None, sample: bool = False
    ) -> Sent:
        started = self._loop.time()
        await self._arrive(request)
        begin, end = resolve_range(request.num_tokens, begin, to.end if end is None else end)
        info = to.kv_addr_info
        self._layout.require_mappable(info.layout, info.engine)
        check_send(request, info, begin, end, sample, self.pool.total * self.profile.block_size)
        first_block = begin // self.profile.block_size * self.profile.block_size
        prompt = self.network.prompt(request.prompt, request.cache_salt, request.adapter)
        send = Send(self, self.network.find(info), info.lease, prompt, first_block, end)
        work = Work(prompt, end, 0, int(sample), send.computed)
        work.on_chunk = send.chunk
        self._sends[send] = request.seq_id
        scheduler = self._scheduler
        try:
            if not sample and await self._between_steps(partial(self._send_known, work, request, send)):
                work.usage = Usage(cached=end)
            else:
                scheduler.submit(work)
            await send.done
        finally:
            self._sends.pop(send, None)
            scheduler.between_steps(partial(scheduler.drop, work))
        first = Output(prompt.output(0, 1), "length" if max_tokens_of(request) == 1 else None) if sample else None
        seconds = self._loop.time() - started
        return Sent(begin, end, send.bytes, send.chunks, seconds, work.usage or Usage(), first, "simulated")

    def _send_known(self, work: Work, request: Request, send: Send) -> bool:
        """Send the KV if all of it is cached, or if a running sequence has it. Return True if it was sent."""
        source = next((each for each in self._generating.values() if each.may_be(request)), None)
        if source is not None:
            self._scheduler.follow(source)  # a send of a running sequence's KV needs its present number of tokens
        if not self._scheduler.pin_cached(work) and not (source is not None and has_computed(source, request, work)):
            return False
        now = self._loop.time()
        send.chunk(0, work.known, now, now)
        send.computed()
        return True

    def start_generate(self, request: Request, begin: int = 0, output: Sequence[int] = ()) -> OutputStream:
        return OutputStream(partial(self._generate, request, begin, output))

    async def _generate(self, request: Request, begin: int, output: Sequence[int], stream: OutputStream) -> None:
        await self._arrive(request)
        work = self._generation(request, begin, output)
        work.stream, work.arrived = stream, self._loop.time()
        work.each_token = stream.iterated and self.options.stream_every == 0
        self._generating[request.seq_id] = work
        scheduler = self._scheduler
        stream.held_back = partial(scheduler.catch_up, work)
        try:
            scheduler.submit(work)
            await stream.until_over()
        finally:
            # Another engine may continue the stream while this work waits to be dropped.
            work.stream = stream.held_back = None
            self._generating.pop(request.seq_id, None)
            if work.state != "left":
                scheduler.between_steps(partial(scheduler.drop, work))

    def works_on(self, seq_id: str) -> bool:
        """True if the sequence has a lease, a reservation, a send or a generation here."""
        reserved = self._leases.of(seq_id) or self._living_leases.queue.of(seq_id)
        return reserved is not None or seq_id in self._generating or seq_id in self._sends.values()

    async def abort(self, seq_id: str) -> None:
        await self._reach()
        self._living_leases.abort(seq_id)
        for send in [send for send, busy in self._sends.items() if busy == seq_id]:
            send.fail(UnknownSequence(f"{seq_id} was aborted while its KV was being sent", "seq_id"))
        work = self._generating.get(seq_id)
        if work is not None:
            await self._between_steps(partial(self._scheduler.drop, work))
            if work.stream is not None:
                work.stream.put(Output((), "abort"))

    async def release(self, lease: str) -> int:
        """End a lease, and return the end of its valid KV, in tokens. Raise ``UnknownSequence`` if it is not open."""
        await self._reach()
        found = self._leases.find(lease)
        if found is None:
            raise UnknownSequence(f"lease: {lease} is not open here; it was released or used, or has expired", "lease")
        self._living_leases.end(found)
        return found.valid_end

    async def status(self) -> EngineStatus:
        await self._reach()
        if self._scheduler.frozen:
            await self._between_steps(lambda: None)  # a frozen core does not answer
        total, free = self.pool.total, self._scheduler.free_blocks
        return EngineStatus(
            engine=self.name,
            model=self.profile.model.name,
            version=__version__,
            vllm_version=f"simulated {self.profile.name}",
            block_size=self.profile.block_size,
            total_blocks=total,
            free_blocks=free,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            kv_cache_usage=(total - free) / total,
            max_model_len=self.profile.max_model_len,
            leases=len(self._leases),
            sends=len(self._sends),
            counters=self._scheduler.told,
            incarnation=self.incarnation,
            fingerprint=self._layout.model,
            layout=self._layout,
            dtype=self._layout.dtype,
            max_adapters=self.options.max_loras if self._adapters else 0,
            adapters=tuple(self._adapters.values()),
        )

    async def sequences(self) -> list[SequenceReport]:
        """Return reports on the sequences that are generated here. They do not name the routers that receive tokens."""
        await self._reach()
        return self.reports()

    def reports(self) -> list[SequenceReport]:
        """Return the same as :meth:`sequences`, also if the engine is down or frozen."""
        return [self._report(seq_id, work) for seq_id, work in self._generating.items()]

    def _report(self, seq_id: str, work: Work) -> SequenceReport:
        tokens, blocks = self._scheduler.holding(work)
        running = work.state in ("prefilling", "decoding")
        return SequenceReport(seq_id, tokens, blocks, running, self._loop.time() - work.arrived)

    # ---- receiving KV ----------------------------------------------------------------------------------------

    def refuses(self, lease: str, prompt: Prompt, end: int) -> str | None:
        """See :meth:`tercet_lab.sim.network.SendTarget.refuses`."""
        found = self._open_lease(lease)
        return self._living_leases.refusal(found, found is not None and found.prompt.begins_like(prompt, end))

    def refuses_content(self, lease: str, content: Content) -> str | None:
        """Do as :meth:`refuses`, given the content's identity, which a sender in another process sent."""
        found = self._open_lease(lease)
        return self._living_leases.refusal(found, found is not None and found.prompt.content(content.end) == content)

    def _open_lease(self, name: str) -> Lease | None:
        return None if self._down else self._leases.find(name)

    def receive(self, lease: str, prompt: Prompt, begin: int, end: int, answer: Callable[[str | None], None]) -> None:
        """See :meth:`tercet_lab.sim.network.SendTarget.receive`."""
        answer(self.refuses(lease, prompt, end) or self.take_in(lease, begin, end))

    def take_in(self, lease: str, begin: int, end: int) -> None:
        """Record that the KV of the tokens ``[begin, end)`` has arrived under the lease."""
        self._living_leases.take_in(lease, begin, end)

    def loses_a_transfer(self) -> bool:
        """True, at random, if this engine's transfer is to be lost."""
        rate = self.options.transfer_failures
        return rate > 0 and self._random.random() < rate

    def require_exchange(self, other: SimEngine) -> None:
        """Raise :class:`~tercet.protocol.LayoutMismatch` unless the two engines can exchange KV."""
        self._layout.require_mappable(other._layout, other.name)

    # ---- checks and helpers ----------------------------------------------------------------------------------

    def _generation(self, request: Request, begin: int, output: Sequence[int]) -> Work:
        length, given = request.num_tokens, len(output)
        if not 0 <= begin <= length:
            raise BadRequest(f"begin: is {begin}, and must be from 0 to the prompt's length, {length}", "begin")
        if request.seq_id in self._generating:
            raise Conflict(f"seq_id: {request.seq_id} is already generated here; abort it or choose another", "seq_id")
        goal = tokens_to_produce(request, given, self.profile, self.pool.total)
        prompt = self.network.prompt(request.prompt, request.cache_salt, request.adapter)
        work = Work(prompt, length, given, goal)
        lease = self._leases.of(request.seq_id)
        if lease is not None:
            check_same(lease, request, output)
            self._adopt(lease, work)
        return work

    def _adopt(self, lease: Lease, work: Work) -> None:
        """Hand a lease's blocks over to ``work``. End a lease without valid KV, as the plugin does."""
        if lease.valid_end == 0:
            self._living_leases.end(lease)
            return
        self._leases.end(lease)
        work.holding = lease.holding
        work.computed = min(lease.valid_end, work.known - 1)
        cached = min(lease.matched, work.computed)
        work.usage = Usage(cached=cached, received=work.computed - cached, computed=work.todo)

    async def _arrive(self, request: Request) -> None:
        """Wait for the latency of a call, then check its prompt and adapter."""
        if self.profile.call or self._down:
            await self._reach()
        check_prompt(request, self.profile.max_model_len)
        check_adapter(request, self._adapters)
