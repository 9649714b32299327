"""A sequence's outputs, as a reader waits for them, or as a tap takes them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from tercet.protocol.types import Output

# Whether it has taken the output. One that it leaves goes to who waits for it, as if there were no tap.
Take = Callable[[Output], bool]


def noting(take: Take, note: Callable[[Output], object]) -> Take:
    """As ``take``; ``note`` is told of each output that it takes."""

    def noted(output: Output) -> bool:
        taken = take(output)
        if taken:
            note(output)
        return taken

    return noted


class Tap:
    """Where outputs are offered as they arrive, while somebody waits for them.

    To wake up a task, and all the generators between it and the engine's stream, costs more than all that is done for a
    token. Who only passes outputs on can do that here instead, at once and without waiting for anything.
    """

    __slots__ = ("take",)

    def __init__(self) -> None:
        self.take: Take | None = None

    def offer(self, output: Output) -> bool:
        """Whether it was taken."""
        return self.take is not None and self.take(output)


class Stream:
    """The outputs of ``outputs``, the middle ones of which :meth:`tap` lets somebody else take, if they can be tapped.

    An asynchronous iterator; close it with ``aclose``.
    """

    __slots__ = ("_outputs", "_tap")

    def __init__(self, outputs: AsyncGenerator[Output, None], tap: Tap) -> None:
        self._outputs = outputs
        self._tap = tap

    def tap(self, take: Take) -> None:
        """Offer outputs to ``take`` from now on: not the first one, none that ends the sequence, and no error."""
        self._tap.take = take

    def __aiter__(self) -> AsyncGenerator[Output, None]:
        return self._outputs

    async def __anext__(self) -> Output:
        return await anext(self._outputs)

    async def aclose(self) -> None:
        """End it: the engine stops working on the sequence."""
        await self._outputs.aclose()
