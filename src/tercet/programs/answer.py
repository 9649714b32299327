"""What a program yields: outputs, and streams of them that it leaves to whoever runs it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Union, cast

from tercet.protocol import Output, Stream, Take

# Outputs, engines' streams, and what other programs yield. (A union with a name in quotes needs ``Union``.)
Answer = AsyncIterator[Union[Output, Stream, "Answer"]]


async def outputs_of(answer: Answer, take: Take | None = None) -> AsyncGenerator[Output, None]:
    """The outputs of a program, those of the streams that it yields in their places.

    While a stream runs, the program waits at its ``yield``: an error of the stream, or a cancellation, is raised there,
    so that it may be caught. Each stream is closed before the program goes on. ``take`` is offered what can be tapped
    (:meth:`~tercet.protocol.Stream.tap`). What is neither output nor stream is passed on.
    """
    failure: BaseException | None = None
    async with aclosing(cast("AsyncGenerator[Any, None]", answer)) as parts:
        while True:
            try:
                part = await (anext(parts) if failure is None else parts.athrow(failure))
            except StopAsyncIteration:
                return
            failure = None
            if not isinstance(part, AsyncIterator):
                yield part
                continue
            try:
                async with aclosing(_outputs(cast("Answer", part), take)) as outputs:
                    async for output in outputs:
                        yield output
            except GeneratorExit:
                raise
            except BaseException as error:
                failure = error


def _outputs(part: Stream | Answer, take: Take | None) -> Stream | AsyncGenerator[Output, None]:
    if not isinstance(part, Stream):
        return outputs_of(part, take)
    if take is not None:
        part.tap(take)
    return part
