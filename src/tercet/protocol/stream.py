"""The output stream of one sequence, from a producer to observers and to one consumer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

from tercet.protocol.errors import EngineError, TercetError
from tercet.protocol.types import Output

# Maximum number of outputs that wait for an iterating consumer; with more, the sequence fails.
MOST_QUEUED = 64 * 1024


class OutputObserver(Protocol):
    """An observer that receives every output once, in order, before the consumer. Its methods must not raise."""

    def on_start(self, stream: OutputStream) -> None:
        """Handle the start of the work in this stream; the other methods are called only after this one."""

    def on_output(self, output: Output) -> None:
        """Handle an output."""

    def on_end(self, error: BaseException | None) -> None:
        """Handle the end of the work; called once, also after an early close or a cancelled consumer."""


class OutputStream:
    """The outputs of one sequence. ``produce`` is called with the stream when a consumer starts, and fills it.

    There is one consumer. Either it passes an output callback to :meth:`run`; then ``produce`` runs in the consumer's
    task, and an output wakes up no task (that would cost more than all other work for a token). Or it iterates; then
    ``produce`` runs in a separate task, which ends when the ``async for`` is left early.

    The stream is over after the first output that has a finish reason, after an error, and when ``produce`` returns.
    From then on it accepts no outputs. ``produce`` is cancelled when the consumer leaves; it has ended when
    :meth:`aclose` returns, and before an error is raised to the consumer. Another producer may continue the sequence
    without the consumer noticing (:meth:`hand_over`), so tasks that a producer has started must not put outputs into
    the stream after that producer has ended.
    """

    __slots__ = (
        "_begun", "_consume", "_demand", "_failure", "_following", "_interrupted", "_observers", "_over", "_produce",
        "_queue", "_runner", "_stopped", "_task", "_until_consumed", "_until_over", "_waiter", "held_back",
    )  # fmt: skip

    def __init__(self, produce: Callable[[OutputStream], Awaitable[None]]) -> None:
        self._produce: Callable[[OutputStream], Awaitable[None]] = produce
        self._observers: tuple[OutputObserver, ...] = ()
        self._consume: Callable[[Output], object] | None = None
        self._until_consumed: Callable[[], Awaitable[None]] | None = None
        self._queue: deque[Output] = deque()
        self._task: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._demand: asyncio.Future[None] | None = None
        self._until_over: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        self._following: Callable[[], OutputStream] | None = None
        self._runner: asyncio.Task[Any] | None = None  # the task that produces, while it runs
        self._begun = self._over = self._stopped = self._interrupted = False
        # A producer that holds outputs back to put several at once sets this; calling it flushes them.
        self.held_back: Callable[[], object] | None = None

    def subscribe(self, observer: OutputObserver) -> None:
        """Call ``observer`` for all events from the start; observers are called in the order of their subscription."""
        self._observers += (observer,)

    # ---- the producer's side ---------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """True if the stream accepts no more outputs."""
        return self._over

    @property
    def begun(self) -> bool:
        """True if an output has arrived since the start, or since the last :meth:`hand_over`."""
        return self._begun

    @property
    def iterated(self) -> bool:
        """True if the consumer iterates: it may react to each output at once, so do not hold outputs back."""
        return self._task is not None

    def put(self, output: Output) -> None:
        """Pass the next output to observers and consumer; drop it if the stream is over."""
        if self._over:
            return
        self._begun = True
        for observer in self._observers:
            observer.on_output(output)
        if output.finish_reason is not None:
            self._end()
        consume, waiter = self._consume, self._waiter
        if consume is not None:
            try:
                consume(output)
            except Exception as error:  # raised to the consumer, not to this caller
                self._failure = error
                self._end()
                self._interrupt()
        else:
            self._queue.append(output)
            # A consumer that reads nothing must not collect a sequence without end.
            if len(self._queue) > MOST_QUEUED:
                self.give_up(EngineError(f"the consumer has not read the last {MOST_QUEUED} outputs of the sequence"))
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    def fail(self, error: TercetError) -> None:
        if not self._over:
            self._failure = error
            self._end()

    def give_up(self, error: TercetError) -> None:
        """End the sequence with an error, and cancel ``produce`` at once instead of waiting for it."""
        if not self._over:
            self.fail(error)
            self._interrupt()

    def catch_up(self) -> None:
        """Flush the outputs that are held back, for callers that need to know how far the sequence is."""
        if self.held_back is not None and not self._over:
            self.held_back()

    def hand_over(self, following: Callable[[], OutputStream]) -> bool:
        """Let another producer continue the sequence; return False if the stream is already over.

        The current producer is cancelled at any point. ``following`` is called when the old producer can send no more;
        the producer and the observers of the stream that it returns replace those of this stream. The returned stream
        has no other use.
        """
        if self._over:
            return False
        self._following = following
        self._interrupt()
        return True

    async def until_over(self) -> None:
        """Wait until the stream accepts no more outputs: for a producer whose outputs come from elsewhere."""
        if not self._over:
            self._until_over = asyncio.get_running_loop().create_future()
            await self._until_over

    async def until_asked(self) -> None:
        """Wait until the consumer has processed all outputs and waits for more."""
        if self._until_consumed is not None:
            await self._until_consumed()
        while self._consume is None and not self._over and (self._queue or self._waiter is None):
            self._demand = asyncio.get_running_loop().create_future()
            await self._demand

    def _end(self) -> None:
        self._over = True
        for waiting in (self._until_over, self._demand):
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    # ---- the consumer's side ---------------------------------------------------------------------------------

    async def run(
        self, consume: Callable[[Output], object], until_consumed: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Produce in this task until the stream is over; ``consume`` is called with each output.

        Producers that can wait await ``until_consumed`` after each output. Raises the error that ended the stream, or
        an error of ``consume``, which ends the stream at any point of ``produce``.
        """
        if self._task is not None:  # iterated before: continue with the remaining outputs
            async for output in self:
                consume(output)
                if until_consumed is not None:
                    await until_consumed()
        elif not self._over:
            self._consume, self._until_consumed = consume, until_consumed
            await self._run()
            self._raise_failure()

    def __aiter__(self) -> AsyncGenerator[Output, None]:
        return self._outputs()

    async def _outputs(self) -> AsyncGenerator[Output, None]:
        try:
            while (output := await anext(self, None)) is not None:
                yield output
        finally:
            await self.aclose()

    async def __anext__(self) -> Output:
        if self._task is None and not self._over:
            self._task = asyncio.get_running_loop().create_task(self._run_in_task())
            _running.add(self._task)
            self._task.add_done_callback(_running.discard)
        while not self._queue:
            if self._task is None or self._stopped:
                self._raise_failure()
                raise StopAsyncIteration
            await self._wait()
        return self._queue.popleft()

    async def aclose(self) -> None:
        """End the stream at any point: the engine stops working on the sequence. Further calls do nothing."""
        task, was_over = self._task, self._over
        self._end()
        if task is not None and not self._stopped:
            if not was_over:  # if it was, ``produce`` is about to return; do not disturb its clean-up
                task.cancel()
            await asyncio.wait([task])
            self._stopped = True
        self._queue.clear()
        self._failure = None

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        if self._demand is not None and not self._demand.done():
            self._demand.set_result(None)
        try:
            await self._waiter
        except asyncio.CancelledError:
            await self.aclose()
            raise
        finally:
            self._waiter = None

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    # ---- the work --------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Run one producer after another, in this task, until the stream is over."""
        runner, goes_on = asyncio.current_task(), self._failure is None
        while goes_on:
            if self._following is not None:
                following, self._following = self._following(), None
                self._produce, self._observers, self._begun = following._produce, following._observers, False
            for observer in self._observers:
                observer.on_start(self)
            error: BaseException | None = None
            self._runner, self._interrupted = runner, False
            cancelled_before = runner.cancelling() if runner is not None else 0
            try:
                await self._produce(self)
            except BaseException as failure:
                error = failure
            self._runner = None
            if self._interrupted and runner is not None:  # that does not count as a failure of the producer
                if not isinstance(error, asyncio.CancelledError):
                    with suppress(asyncio.CancelledError):  # still pending if nothing was awaited after it
                        await asyncio.sleep(0)
                if runner.uncancel() > cancelled_before:  # another task has cancelled the task as well
                    self._failure = error = asyncio.CancelledError()
                elif isinstance(error, asyncio.CancelledError):
                    error = None
            # A cancelled consumer wants no more output of any producer.
            goes_on = self._following is not None and not self._over and not isinstance(error, asyncio.CancelledError)
            if not goes_on:
                self._failure = self._failure or error  # the first failure is the one that ended it
                self._end()
            for observer in self._observers:
                observer.on_end(error if goes_on else self._failure)

    def _interrupt(self) -> None:
        """Cancel ``produce`` without waiting for it; the cancellation of its task is taken back when it has ended."""
        if self._runner is not None and not self._interrupted:
            self._interrupted = self._runner.cancel()

    async def _run_in_task(self) -> None:
        await self._run()
        self._stopped = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


# The event loop itself keeps only weak references to tasks.
_running: set[asyncio.Task[None]] = set()
