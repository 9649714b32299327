"""What a program yields: outputs, and streams of outputs that its caller runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Any, Protocol, Union, cast

from tercet.aio import is_cancelled
from tercet.protocol import Output, OutputStream

# Outputs, engines' streams, and what other programs yield. (A union with a name in quotes needs ``Union``.)
Answer = AsyncIterator[Union[Output, OutputStream, "Answer"]]


class OutputSink(Protocol):
    """Where a program's outputs go."""

    @property
    def over(self) -> bool:
        """Whether nothing more is wanted."""
        ...

    def put(self, output: Output) -> object:
        """Pass on the next output."""
        ...

    async def until_asked(self) -> None:
        """Return once the reader waits for more."""
        ...


async def run_program(answer: Answer, sink: OutputSink) -> None:
    """Run a program until it ends or nothing more is wanted; the outputs of streams that it yields go to ``sink``, too.

    While a stream runs, the program waits at its ``yield``: an error of the stream, or a cancellation, is raised there,
    so that it may be caught. Each stream is closed before the program goes on. After its own output it continues once
    the reader has that output. A value that is neither output nor stream is passed on, too.
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
    """The outputs of a program, with those of the streams that it yields in order; see :func:`run_program`."""
    return OutputStream(partial(run_program, answer))
