"""The scheduler of a simulated engine: the tokens of each step, and their effects on sequences and blocks.

While prompts are computed, each step has its own timer. When only decodes are left, steps differ only by the growth of
their contexts, so one timer stands for a run of many steps; an arrival cuts the run at the end of the current step.
Blocks change only between steps, as on a real engine.
"""

from __future__ import annotations

from collections.abc import Callable

from tercet.protocol import EngineLoad, TercetError
from tercet.protocol.types import Paused
from tercet_lab.sim.block_pool import BlockPool
from tercet_lab.sim.engine_options import EngineOptions
from tercet_lab.sim.kv_usage import EngineUsage
from tercet_lab.sim.step_selection import Chunk, DecodeRun, DecodingBatch, StepSelection, Work
from tercet_lab.sim.step_times import Alarm, EngineTime, Kind, SharedTime, StepModel, pairs_of

NEWEST = 0.2
"""Weight of the latest step in the reported step time."""


class SimScheduler(StepSelection):
    """The step loop of one engine: select tokens, wait for the end of the step, account for its effects."""

    __slots__ = (
        "_between", "_chunks", "_computes", "_ends", "_frozen_since", "_model", "_noted", "_run", "_shared",
        "_step_began", "_step_time", "_ticks", "_timer", "_usage", "on_change", "paused",
    )  # fmt: skip

    def __init__(
        self, model: StepModel, pool: BlockPool, block_size: int, options: EngineOptions, time: EngineTime
    ) -> None:
        super().__init__(pool, block_size, options, time)
        self._model = model
        self._between: list[Callable[[], None]] = []
        self._timer: Alarm | None = None
        self._ends = 0.0
        self._frozen_since: float | None = None
        self._step_began = 0.0
        self._chunks: list[Chunk] = []
        self._run: DecodeRun | None = None
        self._ticks = 0
        self._step_time: float | None = None
        self._computes: Kind | None = None
        self._usage: EngineUsage | None = None
        # Of the present step, if there are background sequences: whether it has prompts of others, the others that
        # decode, and the tokens of the background.
        self._shared: tuple[bool, int, int] | None = None
        self._noted = 0  # steps of the present run whose blocks are recorded in it
        self.on_change: Callable[[], None] | None = None
        self.paused: Paused = ""

    # ---- calls from outside ----------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """True if no step is running."""
        return self._timer is None

    @property
    def free_blocks(self) -> int:
        """Number of free blocks now, also within a run of steps."""
        run = self._run
        if run is None:
            return self.pool.free
        return self.pool.free - self._decoding.blocks_for(run.steps_at(self._now))

    @property
    def reported(self) -> dict[str, int]:
        """Counters for the engine's status."""
        counters, evicted = self.counters, self.pool.evicted
        done = {"steps": counters.steps, "preemptions": counters.preemptions, "evicted": evicted}
        return {**done, "adapter_loads": self.slots.loads}

    def record_usage(self, usage: EngineUsage | None) -> None:
        """Record the used blocks in ``usage`` from now on (None: no longer)."""
        self._usage = usage
        self._noted = 0 if self._run is None else self._run.steps_at(self._now)
        if isinstance(self._time, SharedTime):
            self._time.before_change = self.catch_up_usage
        if usage is not None:
            usage.note(self.free_blocks)

    def catch_up_usage(self) -> None:
        """Record the blocks that the present run of steps has taken until now."""
        if self._run is not None and self._usage is not None:
            steps = self._run.steps_at(self._now)
            self._note_run(self._usage, self._run, steps, self._decoding.blocks_for(steps))

    def _note_run(self, usage: EngineUsage, run: DecodeRun, steps: int, taken: int) -> None:
        """Record the steps that are not recorded yet; all ``steps`` so far took ``taken`` blocks."""
        noted, decoding = self._noted, self._decoding
        if steps <= noted:
            return
        self._noted = steps
        if noted:
            taken -= decoding.blocks_for(noted)
        if taken:
            begin, first, growth = run.begin, run.first, run.growth
            if isinstance(self._time, SharedTime):
                begin = self._time.on_loop(begin)
                first = self._time.on_loop(run.begin + first) - begin
                growth *= first / run.first
            usage.note_run(begin, first, growth, (noted, steps), decoding.tick, decoding.phases, taken)

    @property
    def _now(self) -> float:
        """The engine's time, which stands still while it is frozen."""
        return self._time.time() if self._frozen_since is None else self._frozen_since

    def holding(self, work: Work) -> tuple[int, int]:
        """Return a sequence's number of tokens and of blocks now, also within a run of steps."""
        if work.state != "decoding":
            return work.known, work.holding.blocks
        begun = 0 if self._run is None else self._run.steps_at(self._now)
        # A step takes its blocks when it begins, and produces its tokens when it ends.
        return self._decoding.after(work, max(0, begun - 1))[0], self._decoding.after(work, begun)[1]

    def load(self) -> EngineLoad:
        """Return the load: known ``tokens`` without KV but the background's; ``step_time`` weighs later steps more."""
        total = self.pool.total
        return EngineLoad(
            waiting=self.waiting,
            running=self.running,
            kv_usage=(total - self.free_blocks) / total,
            tokens=sum(work.todo for some in (self._waiting, self._prefilling) for work in some if not work.background),
            step_time=self._step_time,
            stalled_s=0.0 if self._frozen_since is None or self.paused else self._time.time() - self._frozen_since,
            adapters=self.slots.load(work.prompt.adapter for work in self._waiting),
            paused=self.paused,
        )

    def submit(self, work: Work) -> None:
        """Queue a sequence. It may join at the end of the current step.

        An idle engine begins its step after all other events of this moment, because vLLM reads its whole queue before
        a step: requests that arrive at one moment are computed together.
        """
        self._waiting.add(work)
        if work.background:
            if not self._background:
                self._share.resume(self._time.time())
            self._background[id(work)] = work
        if self._timer is None:
            self._await_moment()
        else:
            self._cut()
        self.tell()

    def _await_moment(self) -> None:
        """Begin a step without work or duration: what arrives meanwhile waits for its end."""
        now = self._time.time()
        self._ends, self._step_began = now, self._time.on_loop(now)
        self._timer = self._time.call_at(now, self._step_over, now)

    def tell(self) -> None:
        """Report the load to ``on_change``, if it is set."""
        if self.on_change is not None:
            self.on_change()

    def between_steps(self, action: Callable[[], None]) -> None:
        """Run a function when no step is running: now, or at the end of the current step."""
        if self._timer is None:
            action()
            self._boundary(self._time.time())
        else:
            self._between.append(action)
            self._cut()

    def settle(self, work: Work) -> None:
        """Update a sequence's counts to now. Call this between steps."""
        if work.state == "decoding":
            self._decoding.settle(work)

    def catch_up(self, work: Work) -> None:
        """Deliver a sequence's tokens from steps that have ended. The running step continues as planned."""
        ahead = self.holding(work)[0] - work.known
        if work.produced + ahead > work.delivered:
            work.deliver(ahead)

    def follow(self, work: Work) -> None:
        """Deliver each token of a sequence when it is produced, from now on. Call this between steps."""
        work.each_token = True
        self.catch_up(work)
        if work.state == "decoding":
            self.settle(work)
            self._decoding.wake(work, 1)

    def drop(self, work: Work) -> None:
        """Remove a sequence and free its blocks. Call this between steps."""
        if work.state == "left":
            return
        if work.state != "waiting":
            self._stop_running(work)
        elif work in self._waiting:
            self._waiting.queue_of(work).remove(work)
        self._give_back(work)
        if self.reservations is not None:
            self.reservations.admit()

    def stop(self, error: TercetError) -> None:
        """Drop all sequences and end their streams with ``error``."""
        self.catch_up_usage()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._count_until_now()
        self._frozen_since, self.paused = None, ""
        self._time.end()
        self._computes = None
        works = [*self._waiting, *self._prefilling, *self._decoding.works(), *self._passed_over]
        for work in works:
            self.slots.leave(id(work))
        self._waiting.clear()
        self._prefilling.clear()
        self._passed_over.clear()
        self._background.clear()
        self._between.clear()
        self._chunks, self._run, self._ticks = [], None, 0
        self._decoding = DecodingBatch(self._block_size)
        if self._usage is not None:
            self._usage.note(self.pool.free)
        for work in works:
            work.state = "left"
            if work.stream is not None:
                work.stream.fail(error)

    def _count_until_now(self) -> None:
        """Count the ended steps of a run, and the engine's busy time. The running step is lost."""
        now = self._now
        self.counters.busy += max(0.0, self._time.on_loop(min(now, self._ends)) - self._step_began)
        if self._run is not None:
            done = max(0, self._run.steps_at(now) - 1)
            self.counters.steps += done
            self.counters.decode_tokens += done * self._decoding.size

    @property
    def frozen(self) -> bool:
        """True from :meth:`freeze` until :meth:`thaw`."""
        return self._frozen_since is not None

    def freeze(self, paused: Paused = "") -> None:
        """Stop as a process stops after SIGSTOP: the running step and all calls continue after :meth:`thaw`."""
        self.paused = paused
        if self._frozen_since is None:
            self.catch_up_usage()
            self._frozen_since = self._time.time()
            if self._timer is None:
                self._await_moment()
            if self._timer is not None:
                self._timer.cancel()
        self.tell()

    def thaw(self) -> None:
        """Continue from the state at :meth:`freeze`."""
        since, self._frozen_since, self.paused = self._frozen_since, None, ""
        self.tell()
        if since is not None:
            passed = self._time.time() - since
            if self._run is not None:
                self._run.begin += passed
            self._end_at(self._ends + passed)
            self._cut()  # sequences may have arrived in the meantime

    def _cut(self) -> None:
        """Shorten the current run of steps, so that it ends with the running step."""
        run = self._run
        if run is None or self._frozen_since is not None:
            return
        steps = run.steps_at(self._time.time())
        if steps < run.steps and self._timer is not None:
            self._timer.cancel()
            run.steps = steps
            self._ticks = steps
            self._end_at(run.after(steps))

    # ---- the loop --------------------------------------------------------------------------------------------

    def _step_over(self, ended: float) -> None:
        """End a step, or a run of steps, that was due to end at ``ended`` (seconds of the engine's time).

        In real time this call is late. The next step begins at ``ended``, so delays do not add up.
        """
        self._timer = None
        passed = self._time.on_loop(ended) - self._step_began
        self.counters.busy += passed
        steps = 1 if self._run is None else self._ticks
        if steps and passed:  # not a run that was frozen before its first step ended, nor a step without work
            mean = passed / steps  # weighted as by a real engine
            before = mean if self._step_time is None else self._step_time
            self._step_time = mean + (before - mean) * (1 - NEWEST) ** steps
        if self._shared is not None and passed:
            self._share.ended(passed, *self._shared)
        self._advance()
        self._boundary(ended)

    def _boundary(self, now: float) -> None:
        if self._between:
            actions, self._between = self._between, []
            for action in actions:
                action()
        if self._timer is None:
            self._plan(now)
        if self._usage is not None and self._run is None:
            self._usage.note(self.pool.free)
        if self.on_change is not None:
            self.on_change()

    def _plan(self, now: float) -> None:
        chunks, decodes = self._select()
        if self.reservations is not None and self.reservations.waits:
            self.reservations.admit(self._decoding.blocks_for(1) if decodes else 0)
        kind = "prefill" if chunks else "decode" if decodes else None
        if kind != self._computes:  # set the speed of the engine's time before a step is timed
            self._computes = kind
            self._time.compute(kind)
        self._shared = self._share_of(chunks) if self._background else None
        if self.slots.most:
            now += self.slots.owed()
        if chunks:
            self._start_step(now, chunks, decodes)
        elif decodes:
            self._start_run(now)

    def _share_of(self, chunks: list[Chunk]) -> tuple[bool, int, int]:
        decodes = sum(work.state == "decoding" for work in self._background.values())
        tokens = sum(count for work, count in chunks if work.background)
        others = any(not work.background for work, _ in chunks)
        return others, self._decoding.size - decodes, decodes + tokens

    def _start_step(self, now: float, chunks: list[Chunk], decodes: bool) -> None:
        tokens, pairs = 0, 0.0
        for work, count in chunks:
            tokens += count
            pairs += pairs_of(work.computed, work.computed + count)
        batch, contexts = (self._decoding.size, self._decoding.contexts) if decodes else (0, 0)
        end = now + self._model.step(tokens, pairs, batch, contexts)
        if self._options.send_time:
            end += self._options.send_time * sum(count for work, count in chunks if work.on_computed is not None)
        self._step_began = self._time.on_loop(now)
        for work, count in chunks:
            if work.on_chunk is not None:
                work.on_chunk(work.computed, work.computed + count, self._step_began, self._time.on_loop(end))
        self._chunks, self._ticks = chunks, int(decodes)
        self.counters.steps += 1
        self.counters.prefill_tokens += tokens
        self._end_at(end)

    def _start_run(self, now: float) -> None:
        decoding = self._decoding
        batch = decoding.size
        steps = 1 if self._background else decoding.ticks_within(self.pool.free, decoding.ticks_to_due())
        per_context = self._model.per_context
        first = self._model.decode_base(batch) + per_context * decoding.contexts
        self._step_began = self._time.on_loop(now)
        if self._usage is not None:
            self._usage.note(self.pool.free)
        self._noted = 0
        self._run = DecodeRun(now, steps, first, per_context * batch)
        self._ticks = steps
        self._end_at(self._run.after(steps))

    def _end_at(self, end: float) -> None:
        self._ends = end
        self._timer = self._time.call_at(end, self._step_over, end)

    def _advance(self) -> None:
        """Account for the step, or run of steps, that has ended."""
        decoding, ticks, run = self._decoding, self._ticks, self._run
        chunks, self._chunks = self._chunks, []
        if ticks:
            blocks = decoding.blocks_for(ticks)
            if run is not None:
                self.counters.steps += ticks
                if self._usage is not None:
                    self._note_run(self._usage, run, ticks, blocks)
            self.pool.take_plain(blocks)
            decoding.tick += ticks
            self.counters.decode_tokens += ticks * decoding.size
            self._ticks = 0
        self._run = None
        for work, count in chunks:
            self._computed(work, count)
        for work in decoding.pop_due():
            self._due(work)
