"""A router's calls to one engine, recorded so that all can be ended when the engine is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType

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


class UntilLost:
    """A context that is cancelled as soon as one of ``engines`` is lost, and then raises that engine's error.

    A class and not a generator, which costs more: a request enters such a context several times.
    """

    __slots__ = ("_engines", "_loss", "_noted", "_patience")

    def __init__(self, engines: Sequence[CallsInFlight]) -> None:
        self._engines = engines
        self._noted: list[object] = []
        self._loss: TercetError | None = None
        self._patience = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._patience.__aenter__()
        self._noted = [engine.note(self._give_up) for engine in self._engines]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for engine, noted in zip(self._engines, self._noted, strict=True):
            engine.forget(noted)
        try:
            await self._patience.__aexit__(kind, error, at)
        except TimeoutError as expired:
            error = expired
        if isinstance(error, TimeoutError) and self._loss is not None and self._patience.expired():
            raise self._loss from None

    def _give_up(self, error: TercetError) -> None:
        if self._loss is None:
            self._loss = error
            self._patience.reschedule(asyncio.get_running_loop().time())


def until_lost(*engines: CallsInFlight) -> UntilLost:
    """Cancel the code inside the context as soon as one of the engines is lost, and raise that engine's error."""
    return UntilLost(engines)
