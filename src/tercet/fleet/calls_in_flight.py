"""A router's calls to one engine, recorded so that all can be ended when the engine is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager

from tercet.protocol import TercetError

Fail = Callable[[TercetError], object]
Waits = Callable[[], bool]


class CallsInFlight:
    """The calls and streams that wait for one engine, each with the function that makes it fail."""

    def __init__(self) -> None:
        self._fails: dict[object, tuple[Fail, Waits]] = {}

    def __len__(self) -> int:
        return len(self._fails)

    def lose(self, error: TercetError) -> None:
        """End every call to the engine with ``error``."""
        for fail, _ in list(self._fails.values()):
            fail(error)

    def lose_waiting(self, error: TercetError) -> None:
        """End with ``error`` every call that has no output yet."""
        for fail, waits in list(self._fails.values()):
            if waits():
                fail(error)

    @contextmanager
    def noted(self, fail: Fail) -> Generator[None]:
        """Register ``fail`` while entered; :meth:`lose` calls it."""
        key = self.note(fail)
        try:
            yield
        finally:
            self.forget(key)

    def note(self, fail: Fail, waits: Waits = lambda: True) -> object:
        """Register ``fail``, which :meth:`lose` calls; pass the returned value to :meth:`forget` to end that.

        ``waits`` returns True while the call has no output.
        """
        key = object()
        self._fails[key] = fail, waits
        return key

    def forget(self, noted: object) -> None:
        """Unregister the function for which :meth:`note` returned ``noted``."""
        del self._fails[noted]


@asynccontextmanager
async def until_lost(*engines: CallsInFlight) -> AsyncGenerator[None]:
    """Cancel the code inside the context as soon as one of the engines is lost, and raise that engine's error."""
    loop = asyncio.get_running_loop()
    losses: list[TercetError] = []
    patience = asyncio.timeout(None)

    def give_up(error: TercetError) -> None:
        if not losses:
            losses.append(error)
            patience.reschedule(loop.time())

    try:
        async with patience:
            with ExitStack() as stack:
                for calls in engines:
                    stack.enter_context(calls.noted(give_up))
                yield
    except TimeoutError:
        if losses and patience.expired():
            raise losses[0] from None
        raise
