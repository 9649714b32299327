"""A simulated engine with the protocol of real engines: its core, which steps, fails and freezes, and the verbs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

from tercet.engine.leases import check_generation, end_of_reservation, require_unused, usage_of
from tercet.protocol import (
    AdapterReport,
    EngineLoad,
    EngineStatus,
    EngineUnreachable,
    Output,
    OutputStream,
    Request,
    Reservation,
    Sent,
    SequenceReport,
    TercetError,
    UnknownSequence,
    Usage,
    resolve_range,
)
from tercet.protocol.types import Paused, resolve_end
from tercet_lab.sim.block_pool import BlockPool, SimObserver
from tercet_lab.sim.engine_options import (
    EngineOptions,
    check_adapter,
    check_prompt,
    check_send,
    max_tokens_of,
    tokens_to_produce,
)
from tercet_lab.sim.kv_usage import EngineUsage
from tercet_lab.sim.leases import SimLease, SimLeases
from tercet_lab.sim.network import Network, Node, Send
from tercet_lab.sim.scheduler import SimScheduler
from tercet_lab.sim.step_selection import Counters, Work, has_computed
from tercet_lab.sim.step_times import Host, Profile, StepModel, time_on

T = TypeVar("T")
_step_model = lru_cache(maxsize=64)(StepModel)  # equal engines share one, with what it has computed

REPORT_SECONDS = 0.1
"""Shortest interval between load reports, as in the token streams of real engines."""


class LoadReports:
    """Reports of one engine's load after changes: ``tell`` is called at most once per :data:`REPORT_SECONDS`.

    Each change is reported within that time, so an old last report still holds. Idle engines cost nothing.
    """

    def __init__(self, load: Callable[[], EngineLoad], tell: Callable[[EngineLoad], None]) -> None:
        self._load = load
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def changed(self) -> None:
        """Report a change of the load, now or when the interval has passed."""
        if self._timer is None:
            if self._loop.time() >= self._due:
                self._report()
            else:
                self._timer = self._loop.call_at(self._due, self._report)

    def _report(self) -> None:
        self._timer = None
        self._due = self._loop.time() + REPORT_SECONDS
        self._tell(self._load())


class SimEngine(Node[SimLeases]):
    """One engine in virtual or real time, which can fail, restart and freeze.

    ``seed`` and the engine's name determine its random decisions. Create it inside a running event loop; it uses the
    loop's time. ``address`` is its URL for other processes. On a ``host`` that other engines share, its steps take
    longer, according to its profile. Raise :class:`~tercet.protocol.BadRequest` if the profile has no data on sharing.
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
        self.options = options or EngineOptions()
        super().__init__(name, profile, network, self.options.lease_ttl, address)
        self._model = _step_model(
            profile.steps, self.options.prefill_scale, self.options.decode_scale, self.options.host_time
        )
        self._time = time_on(host, profile)
        self._random = random.Random(f"{seed} {name}")
        self._adapters = {name: AdapterReport(name, f"sim://{name}", name) for name in self.options.adapter_names}
        self._observer: SimObserver | None = None
        self._block_observer: SimObserver | None = None
        self._generating: dict[str, Work] = {}  # by sequence
        self._calls: set[asyncio.Future[Any]] = set()
        self._before = Counters()
        self._usage: EngineUsage | None = None
        self._start()
        network.add(self)

    def _start(self) -> None:
        super()._start()
        blocks = self.options.total_blocks or self.profile.total_blocks
        self.pool = BlockPool(blocks, self.profile.block_size, self.options.prefix_caching)
        self._scheduler = SimScheduler(self._model, self.pool, self.profile.block_size, self.options, self._time)
        limit = int(blocks * self.options.max_lease_share)
        self._leases = SimLeases(self.pool, self.profile.block_size, limit, self._scheduler)
        if self._usage is not None:
            self._scheduler.record_usage(self._usage)
        if self._observer is not None:
            self._observer.cleared()
            self.observe(self._observer)
        if self._block_observer is not None:
            self.pool.observe(self._block_observer)

    def close(self) -> None:
        self.pool.close()

    def observe_blocks(self, observer: SimObserver) -> None:
        """Notify ``observer`` of this engine's cached blocks, now and from now on."""
        self._block_observer = observer
        self.pool.observe(observer)

    def observe(self, observer: SimObserver) -> None:
        """Notify ``observer`` of this engine's load, and of the loss of its cache, from now on."""
        self._observer = observer
        self._scheduler.on_change = LoadReports(self._scheduler.load, observer.load).changed
        self._scheduler.on_change()

    def load(self) -> EngineLoad:
        """Return the engine's load now, in the form that routers receive."""
        return self._scheduler.load()

    # ---- failures --------------------------------------------------------------------------------------------

    def fail(self) -> None:
        """Simulate a crash: all calls, sends and streams end with ``EngineUnreachable``; KV and leases are lost."""
        self._down = True
        self._catch_up()
        error = EngineUnreachable(f"{self.name} went down")
        self._scheduler.stop(error)
        self._leases.drop_all(error)
        for call in self._calls:
            if not call.done():
                call.set_exception(error)
        self._end_sends(error)

    def recover(self) -> None:
        """Restart after :meth:`fail`, with an empty cache. Do nothing if the engine is not down."""
        if self._down:
            self._before = self.all_counters
            self._start()
            self._down = False

    def freeze(self, paused: Paused = "") -> None:
        """Stop the core as SIGSTOP (``paused``: as vLLM's ``/pause``) does: no step ends and no call is answered."""
        self._catch_up()
        self._scheduler.freeze(paused)

    def _catch_up(self) -> None:
        """Deliver the tokens that were produced until now."""
        for work in list(self._generating.values()):
            self._scheduler.catch_up(work)

    def thaw(self) -> None:
        """Continue the core after :meth:`freeze`, as SIGCONT does."""
        self._scheduler.thaw()

    # ---- calls -----------------------------------------------------------------------------------------------

    async def _between_steps(self, action: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Run an action between steps and return its result; pass it to ``undo`` if the caller was cancelled."""
        if self._scheduler.idle:
            result: list[T] = []
            self._scheduler.between_steps(lambda: result.append(action()))
            return result[0]
        done: asyncio.Future[T] = self._loop.create_future()

        def act() -> None:
            if done.done():
                return
            try:
                done.set_result(action())
            except TercetError as error:
                done.set_exception(error)

        self._scheduler.between_steps(act)
        self._calls.add(done)
        try:
            return await done
        except asyncio.CancelledError:
            if undo is not None and done.done() and not done.cancelled() and done.exception() is None:
                undo(done.result())
            raise
        finally:
            self._calls.discard(done)

    # ---- state -----------------------------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        """Counters since the engine's last start."""
        return self._scheduler.counters

    @property
    def all_counters(self) -> Counters:
        """Sum of the counters over all starts of the engine."""
        return self._before.plus(self._scheduler.counters, self.pool.evicted)

    @property
    def computes(self) -> bool:
        """True if a step is running."""
        return not self._scheduler.idle

    @property
    def free_blocks(self) -> int:
        """Number of KV blocks that are free now."""
        return self._scheduler.free_blocks

    def record_usage(self, usage: EngineUsage | None) -> None:
        """Record the used blocks in ``usage`` from now on, also after a restart (None: no longer)."""
        self._usage = usage
        self._scheduler.record_usage(usage)

    def catch_up_usage(self) -> None:
        """Record the blocks that the engine has taken until now."""
        self._scheduler.catch_up_usage()

    @property
    def busy(self) -> bool:
        """True if a step, a sequence, a lease, a reservation or a send exists here."""
        scheduler = self._scheduler
        return not scheduler.idle or bool(scheduler.running or scheduler.waiting or self._leases or self._sends)

    # ---- verbs -----------------------------------------------------------------------------------------------

    async def extend(self, lease: str, request: Request, end: int | None) -> tuple[Reservation, float]:
        await self._arrive(request)
        resolved = resolve_end(request.num_tokens, end)
        prompt = self.network.prompt(request.prompt, request.cache_salt, request.adapter)
        return self._extended(await self._between_steps(lambda: self._leases.extend(lease, request, prompt, resolved)))

    async def _lease(self, request: Request, end: int | None, ttl: float) -> SimLease:
        await self._arrive(request)
        resolved = end_of_reservation(request.num_tokens, end)
        until = self._loop.time() + self.options.reserve_wait

        def reserve() -> SimLease:
            require_unused(request.seq_id, request.seq_id in self._generating)
            prompt = self.network.prompt(request.prompt, request.cache_salt, request.adapter)
            name = f"{self.name}:{next(self._lease_numbers)}"
            return self._leases.reserve(SimLease(prompt, resolved, name=name, seq_id=request.seq_id, ttl=ttl))

        lease = await self._between_steps(reserve, self._leases.end)
        await self._leases.opened(lease, until)
        return lease

    async def remote_send(
        self, request: Request, to: Reservation, begin: int, end: int | None = None, sample: bool = False,
        cached_only: bool = False,
    ) -> Sent:  # fmt: skip
        started = self._loop.time()
        await self._arrive(request)
        begin, end = resolve_range(request.num_tokens, begin, to.end if end is None else end)
        info = to.kv_addr_info
        room = self.pool.total * self.profile.block_size
        check_send(request, info, begin, end, sample, self._layout, room, cached_only)
        first_block = begin // self.profile.block_size * self.profile.block_size
        prompt = self.network.prompt(request.prompt, request.cache_salt, request.adapter)
        send = Send(self, self.network.find(info), info.lease, prompt, first_block, end)
        work = Work(prompt, end, 0, int(sample), request.background, send.computed)
        work.on_chunk = send.chunk
        self._sends[send] = request.seq_id
        scheduler = self._scheduler
        try:
            if cached_only:
                end = await self._between_steps(partial(self._send_longest, work, begin, send))
                if end == begin:
                    return Sent(begin, begin, 0, 0, self._loop.time() - started, Usage())
                work.usage = Usage(cached=end)
            elif not sample and await self._between_steps(partial(self._send_known, work, request, send)):
                work.usage = Usage(cached=end)
            else:
                scheduler.submit(work)
            await send.done
        finally:
            self._sends.pop(send, None)
            self.network.note_preemptions(request.seq_id, work.preempted)
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
        send.all_at_once()
        return True

    def _send_longest(self, work: Work, begin: int, send: Send) -> int:
        """Send the longest cached whole blocks of the range; return their end, or ``begin`` if there are none."""
        blocks = self.pool.match(work.prompt, work.known // self.profile.block_size).blocks
        end = blocks * self.profile.block_size
        if end <= begin:
            return begin
        work.length = send.end = end
        self._scheduler.pin_cached(work)
        send.all_at_once()
        return end

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
            self.network.note_preemptions(request.seq_id, work.preempted)
            if work.state != "left":
                scheduler.between_steps(partial(scheduler.drop, work))

    def works_on(self, seq_id: str) -> bool:
        """True if the sequence has a lease, a reservation, a send or a generation here."""
        return self._leases.of(seq_id) is not None or seq_id in self._generating or seq_id in self._sends.values()

    async def abort(self, seq_id: str) -> None:
        await self._reach()
        self._leases.abort(seq_id)
        for send in [send for send, busy in self._sends.items() if busy == seq_id]:
            send.fail(UnknownSequence(f"{seq_id} was aborted while its KV was being sent", "seq_id"))
        work = self._generating.get(seq_id)
        if work is not None:
            await self._between_steps(partial(self._scheduler.drop, work))
            if work.stream is not None:
                work.stream.put(Output((), "abort"))

    async def status(self) -> EngineStatus:
        await self._reach()
        if self._scheduler.frozen:
            await self._between_steps(lambda: None)  # a frozen core does not answer
        total, free = self.pool.total, self._scheduler.free_blocks
        return self._status(
            total_blocks=total, free_blocks=free, running=self._scheduler.running, waiting=self._scheduler.waiting,
            kv_cache_usage=(total - free) / total, leases=len(self._leases) - len(self._leases.waits),
            counters=self._scheduler.reported, max_adapters=self.options.max_loras if self._adapters else 0,
            adapters=tuple(self._adapters.values()),
        )  # fmt: skip

    async def sequences(self) -> list[SequenceReport]:
        """Return reports on the sequences that are generated here. They do not name the routers that receive tokens."""
        await self._reach()
        return self.reports()

    def reports(self) -> list[SequenceReport]:
        """Return the same as :meth:`sequences`, also if the engine is down or frozen."""
        return [self._report(seq_id, work) for seq_id, work in self._generating.items()]

    def _report(self, seq_id: str, work: Work) -> SequenceReport:
        tokens, blocks = self._scheduler.holding(work)
        running = work.state in ("prefilling", "decoding", "passed over")
        return SequenceReport(seq_id, tokens, blocks, running, self._loop.time() - work.arrived)

    # ---- transfers -------------------------------------------------------------------------------------------

    def take_in(self, lease: str, begin: int, end: int) -> None:
        self._leases.take_in(lease, begin, end)

    def loses_a_transfer(self) -> bool:
        rate = self.options.transfer_failures
        return rate > 0 and self._random.random() < rate

    def require_exchange(self, other: SimEngine) -> None:
        """Raise :class:`~tercet.protocol.LayoutMismatch` unless the two engines can exchange KV."""
        self._layout.require_mappable(other._layout, other.name)

    # ---- checks and helpers ----------------------------------------------------------------------------------

    def _generation(self, request: Request, begin: int, output: Sequence[int]) -> Work:
        length, given = request.num_tokens, len(output)
        check_generation(request.seq_id, begin, length, request.seq_id in self._generating)
        goal = tokens_to_produce(request, given, self.profile, self.pool.total)
        prompt = self.network.prompt(request.prompt, request.cache_salt, request.adapter)
        work = Work(prompt, length, given, goal, request.background)
        lease = self._leases.of(request.seq_id)
        if lease is None or lease.state == "asked":
            return work
        lease.require_same(request, output)
        if lease.valid_end == 0:
            self._leases.end(lease)  # a lease without valid KV ends, as in the plugin
            return work
        self._leases.publish(lease)  # the KV is in the cache as soon as it is here, also if a step runs
        work.holding = self._leases.claim(lease)
        work.computed = min(lease.valid_end, work.known - 1)
        work.usage = usage_of(work.known, work.computed, lease.matched)
        return work

    async def _arrive(self, request: Request) -> None:
        """Wait for the latency of a call, then check its prompt and adapter."""
        if self.profile.call or self._down:
            await self._reach()
        check_prompt(request, self.profile.max_model_len)
        check_adapter(request, self._adapters)
