"""The core of a simulated engine: its steps, KV blocks and leases, and the calls that wait for the end of a step."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

from tercet.protocol import EngineLoad, EngineUnreachable, TercetError
from tercet.protocol.types import Paused
from tercet_lab.sim.block_pool import BlockPool, SimObserver
from tercet_lab.sim.engine_options import EngineOptions
from tercet_lab.sim.hosts import Host, time_on
from tercet_lab.sim.leases import Leases
from tercet_lab.sim.living_leases import Address, LivingLeases
from tercet_lab.sim.load_reports import LoadReports
from tercet_lab.sim.network import Send
from tercet_lab.sim.scheduler import SimScheduler
from tercet_lab.sim.sequence_work import Work
from tercet_lab.sim.step_selection import Counters
from tercet_lab.sim.step_times import Profile, StepModel

T = TypeVar("T")


class SimCore:
    """The core of a :class:`~tercet_lab.sim.sim_engine.SimEngine`, which can fail, restart and freeze.

    Verbs add generations and sends to it. The parameters are those of the engine.
    """

    def __init__(
        self, name: str, profile: Profile, options: EngineOptions | None, host: Host | None, address: str | None
    ) -> None:
        self.name = name
        self.profile = profile
        self.options = options or EngineOptions()
        self._loop = asyncio.get_running_loop()
        self._layout = profile.layout()
        self._model = StepModel(profile.steps, self.options.prefill_scale, self.options.decode_scale)
        self._time = time_on(host, profile)
        self._lease_numbers = count(1)  # continues after a failure: no new lease matches a late message
        self._told_by = Address(name, address or f"sim://{name}", self._layout)
        self._down = False
        self._observer: SimObserver | None = None
        self._block_observer: SimObserver | None = None
        self._generating: dict[str, Work] = {}  # by sequence
        self._sends: dict[Send, str] = {}  # with their sequences
        self._calls: set[asyncio.Future[Any]] = set()
        self._before = Counters()
        self._start()

    def _start(self) -> None:
        self.incarnation = uuid.uuid4().hex
        blocks = self.options.total_blocks or self.profile.total_blocks
        self.pool = BlockPool(blocks, self.profile.block_size, self.options.prefix_caching)
        self._scheduler = SimScheduler(self._model, self.pool, self.profile.block_size, self.options, self._time)
        limit = int(blocks * self.options.max_lease_share)
        self._leases = Leases(self.pool, self.profile.block_size, limit)
        self._living_leases = LivingLeases(self._told_by, self._leases, self._scheduler, self._lease_numbers)
        if self._observer is not None:
            self._observer.cleared()
            self.observe(self._observer)
        if self._block_observer is not None:
            self.pool.observe(self._block_observer)

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
        self._leases.drop_all()
        self._living_leases.queue.drop_all(error)
        for call in self._calls:
            if not call.done():
                call.set_exception(error)
        for send in list(self._sends):
            send.fail(error)

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

    async def _reach(self) -> None:
        if self.profile.call:
            await asyncio.sleep(self.profile.call)
        if self._down:
            raise EngineUnreachable(f"{self.name} is down")

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
    def down(self) -> bool:
        """True after :meth:`fail`, until :meth:`recover`."""
        return self._down

    @property
    def computes(self) -> bool:
        """True if a step is running."""
        return not self._scheduler.idle

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use now, 0 to 1."""
        total = self.pool.total
        return (total - self._scheduler.free_blocks) / total

    @property
    def busy(self) -> bool:
        """True if a step, a sequence, a lease, a reservation or a send exists here."""
        scheduler = self._scheduler
        reserved = len(self._leases) + len(self._living_leases.queue)
        return not scheduler.idle or bool(scheduler.running or scheduler.waiting or reserved or self._sends)
