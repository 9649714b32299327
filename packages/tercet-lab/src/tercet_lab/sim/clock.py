"""An asyncio event loop in virtual time: when no callback is ready, the clock jumps to the next timer.

The loop runs callbacks, timers, tasks and async generators, in an order that depends on the program only. It does not
support sockets, threads, processes or signals: they need real time, which virtual time does not wait for.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from typing import Any, NoReturn, TypeVar

import msgspec

from tercet.protocol import EngineError

T = TypeVar("T")
# Cancelled timers stay until they are due, or until their number exceeds this and half the number of moments.
FEW_TIMERS = 1024
LONGEST_S = 1e10
"""The latest virtual time, in seconds (three centuries). A float resolves microseconds up to it."""


class _Callback(msgspec.Struct, eq=False):
    """A callback that is due at ``due`` (virtual seconds): an :class:`asyncio.TimerHandle` without debugging aids.

    ``loop`` is set while the callback waits for its time.
    """

    due: float
    callback: Callable[..., object]
    args: tuple[Any, ...]
    context: Context
    loop: VirtualLoop | None = None
    is_cancelled: bool = False

    def when(self) -> float:
        return self.due

    def cancelled(self) -> bool:
        return self.is_cancelled

    def cancel(self) -> None:
        if not self.is_cancelled:
            self.is_cancelled = True
            self.args = ()  # what they refer to does not wait for the time of the callback
            if self.loop is not None:
                self.loop.timer_cancelled()


class VirtualLoop(asyncio.AbstractEventLoop):
    """An event loop whose :meth:`time` starts at 0 seconds and advances only by jumps to the next timer."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ready: deque[_Callback] = deque()
        # A heap of numbers only: comparing tuples took more time than all other work for a timer.
        self._moments: list[float] = []
        self._timers: dict[float, list[_Callback]] = {}
        self._cancelled_timers = 0
        self._closed = False
        self._failure: BaseException | None = None

    # ---- time and callbacks ----------------------------------------------------------------------------------

    def time(self) -> float:
        """Return the seconds since the loop was created, in virtual time."""
        return self._now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        """Run a callback before time advances, after the callbacks that are already ready."""
        found = _Callback(self._now, callback, args, copy_context() if context is None else context)
        self._ready.append(found)
        return found  # pyright: ignore[reportReturnType]

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run a callback at virtual time ``when`` (seconds). Callbacks of equal times run in the order of the calls."""
        timer = _Callback(when, callback, args, copy_context() if context is None else context, self)
        beside = self._timers.get(when)
        if beside is None:
            self._timers[when] = [timer]
            heappush(self._moments, when)
        else:
            beside.append(timer)
        return timer  # pyright: ignore[reportReturnType]

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run a callback after ``delay`` seconds of virtual time."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def timer_cancelled(self) -> None:
        """Count a waiting timer that was cancelled."""
        self._cancelled_timers += 1
        if self._cancelled_timers > FEW_TIMERS and self._cancelled_timers * 2 > len(self._moments):
            left = {when: [each for each in timers if not each.is_cancelled] for when, timers in self._timers.items()}
            # Objects that are freed with a dropped timer may cancel others, and call this: it finds nothing to do.
            self._cancelled_timers = 0
            self._timers = {when: timers for when, timers in left.items() if timers}
            self._moments = list(self._timers)
            heapify(self._moments)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], *, name: object = None, context: Any = None
    ) -> asyncio.Task[T]:
        return asyncio.Task(coro, loop=self, name=None if name is None else str(name), context=context)

    # ---- running ---------------------------------------------------------------------------------------------

    def run_until_complete(self, future: Any) -> Any:
        """Run until a future or coroutine is done. Return its result or raise its exception.

        Raise :class:`~tercet.protocol.EngineError` if every task waits and no timer is set.
        """
        task: asyncio.Future[Any] = asyncio.ensure_future(future, loop=self)
        ready, hooks = self._ready, sys.get_asyncgen_hooks()
        outer = asyncio._get_running_loop()  # pyright: ignore[reportPrivateUsage]
        sys.set_asyncgen_hooks(finalizer=self._finalize)
        asyncio._set_running_loop(self)  # pyright: ignore[reportPrivateUsage]
        try:
            while not task.done():
                if not ready:
                    self._jump()
                found = ready.popleft()
                if not found.is_cancelled:
                    found.context.run(found.callback, *found.args)
                    if self._failure is not None:
                        failure, self._failure = self._failure, None
                        raise failure
        finally:
            # The caller's loop, such as that of a notebook, which waits for this run to return.
            asyncio._set_running_loop(outer)  # pyright: ignore[reportPrivateUsage]
            sys.set_asyncgen_hooks(*hooks)
        return task.result()

    def _jump(self) -> None:
        """Advance to the time of the next timer, and make all callbacks ready that are due then."""
        ready = self._ready
        while self._moments and (not ready or self._moments[0] <= self._now):
            when = heappop(self._moments)
            # In a separate function: objects that are freed with cancelled timers may set timers before time advances.
            self._make_ready(self._timers.pop(when))
            if ready and when > self._now:
                if when > LONGEST_S:
                    raise EngineError(
                        f"the next event is due at a virtual time of {when:g} s, and the limit is {LONGEST_S:g} s: "
                        "later times lose milliseconds; send more requests per second"
                    )
                self._now = when
        if not ready:
            raise EngineError("the simulation cannot continue: every task waits, and no timer is set")

    def _make_ready(self, timers: list[_Callback]) -> None:
        for timer in timers:
            timer.loop = None  # from now on, cancelling it is not counted
            if timer.is_cancelled:
                self._cancelled_timers -= 1
            else:
                self._ready.append(timer)

    def _finalize(self, generator: AsyncGenerator[Any, None]) -> None:
        if not self._closed:
            self.create_task(generator.aclose())

    def close(self) -> None:
        """Drop all callbacks and timers. The loop cannot run again."""
        self._closed = True
        self._ready.clear()
        self._moments.clear()
        self._timers.clear()

    # ---- errors ----------------------------------------------------------------------------------------------

    # ``bool()`` returns False. Each future and task calls this; a built-in runs no Python code.
    get_debug = staticmethod(bool)  # pyright: ignore[reportAssignmentType]

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """End the run with an exception that no task awaits: results after it cannot be trusted."""
        error = context.get("exception")
        self._failure = error if isinstance(error, BaseException) else RuntimeError(str(context.get("message")))


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refused(*_args: object, **_kwargs: object) -> NoReturn:
        raise RuntimeError(f"{name} needs real time, and this event loop runs in virtual time")

    return refused


_REAL = (
    "add_reader", "add_writer", "add_signal_handler", "call_soon_threadsafe", "connect_accepted_socket",
    "connect_read_pipe", "connect_write_pipe", "create_connection", "create_datagram_endpoint", "create_server",
    "create_unix_connection", "create_unix_server", "getaddrinfo", "getnameinfo", "run_in_executor", "sendfile",
    "sock_accept", "sock_connect", "sock_recv", "sock_recv_into", "sock_recvfrom", "sock_recvfrom_into",
    "sock_sendall", "sock_sendfile", "sock_sendto", "start_tls", "subprocess_exec", "subprocess_shell",
)  # fmt: skip
for _name in _REAL:
    setattr(VirtualLoop, _name, _refuse(_name))


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time from second 0, and return its result.

    Tasks that still run when it ends are cancelled before this function returns.
    """
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.close()
