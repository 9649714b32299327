"""Running of a program: its outputs, and the streams of outputs that it yields, go to one sink."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Any, Protocol, Union, cast

from tercet.aio import is_cancelled
from tercet.protocol import Output, OutputStream

# Values that a program yields: outputs, engines' streams, other programs. (A union with a quoted name needs ``Union``.)
Answer = AsyncIterator[Union[Output, OutputStream, "Answer"]]


class OutputSink(Protocol):
    """The destination of a program's outputs."""

    @property
    def over(self) -> bool:
        """True if no further output is wanted."""
        ...

    def put(self, output: Output) -> object:
        """Pass on the next output."""
        ...

    async def until_asked(self) -> None:
        """Return once the reader waits for more."""
        ...


async def run_program(answer: Answer, sink: OutputSink) -> None:
    """Run a program until it ends or ``sink`` is over; outputs of the streams that it yields go to ``sink``, too.

    While a stream runs, the program waits at its ``yield``: an error of the stream, or a cancellation, is raised there,
    so that the program can catch it. Each stream is closed before the program continues. After an output that the
    program yields itself, it continues once the reader has taken that output. A value that is neither an output nor a
    stream is passed on, too.
    """
    failure: BaseException | None = None
    parts = cast("AsyncGenerator[Any, None]", answer)
    try:
        while not sink.over:
            try:
                part = await (anext(parts) if failure is None else parts.athrow(failure))
            except StopAsyncIteration:
                break
            if failure is not None and _is_cancellation(failure):
                raise failure  # otherwise the program would continue
            failure = None
            is_stream = isinstance(part, OutputStream)
            if not is_stream and not isinstance(part, AsyncIterator):
                sink.put(part)
                await sink.until_asked()
                continue
            try:
                if is_stream:
                    await part.run(sink.put, sink.until_asked)
                else:
                    await run_program(cast("Answer", part), sink)
            except BaseException as error:
                failure = error
    finally:
        await parts.aclose()
    if failure is not None and _is_cancellation(failure):
        raise failure


def _is_cancellation(error: BaseException) -> bool:
    """True if the task was cancelled from outside, not by the program's own timeout."""
    return isinstance(error, asyncio.CancelledError) and is_cancelled()


def outputs_of(answer: Answer) -> OutputStream:
    """Return the outputs of a program and of the streams that it yields, in order; see :func:`run_program`."""
    return OutputStream(partial(run_program, answer))
