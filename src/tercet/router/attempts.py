"""Attempts at a sequence: its program, and after a failure one engine that goes on from the tokens so far."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from tercet.aio import is_cancelled
from tercet.fleet import RunningSequence
from tercet.programs import Answer, run_program
from tercet.protocol import EngineError, Fleet, Output, OutputStream, Request, TercetError

# The program that goes on where another one failed.
ONE_ENGINE = "data_parallel"


class ProgramFault(Exception):
    """A program broke the rules for programs."""


class BrokenOff(EngineError):
    """An engine ended the sequence before its end, and this process had not asked for it.

    ``begun`` has the tokens that came with it, ``output`` tells how it ended.
    """

    def __init__(self, output: Output) -> None:
        super().__init__(f"the engine ended the sequence: {output.finish_reason}")
        self.begun = msgspec.structs.replace(output, finish_reason=None, stop_reason=None)
        self.output = Output((), output.finish_reason, output.stop_reason)


class Attempts:
    """Runs programs for a sequence, one after another: each passes outputs on to ``stream`` until it ends or fails."""

    def __init__(
        self, sequence: RunningSequence, stream: OutputStream, on_finish: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._sequence = sequence
        self._clock = clock
        self._stream = stream
        self._on_finish = on_finish
        self._fault: ProgramFault | BrokenOff | None = None

    async def run(self, program: Callable[[], Answer]) -> BaseException | None:
        """Run one to its end; returns what failed, if the sequence may still be served by another attempt."""
        self._fault = None
        try:
            await run_program(program(), self)
            failure: BaseException = self._fault or ProgramFault("it ended before its sequence did")
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            failure = ProgramFault("it was cancelled, but not by its client")
            failure.__cause__ = error
        except (Exception, SystemExit) as error:  # a user's program may raise anything
            failure = self._fault or first_cause(error)
        if self._stream.over:
            return None
        if is_cancelled():  # the program ended, or turned its cancellation into another error
            raise asyncio.CancelledError from failure
        return failure

    @property
    def over(self) -> bool:
        """Whether the program that runs is to go no further."""
        return self._fault is not None or self._stream.over

    def put(self, output: Any) -> None:
        """What the program yields, or a stream of its engines has."""
        if not isinstance(output, Output):
            self._fault = ProgramFault(f"it yielded a {type(output).__name__} instead of an Output")
        elif output.finish_reason is None:
            self._sequence.record(output, self._clock())
            self._stream.put(output)
        elif output.broken_off:
            self._fault = BrokenOff(output)
            if output.token_ids:
                self.put(self._fault.begun)
        else:
            self.finish(output)

    def finish(self, output: Output) -> None:
        """The sequence ends with this output."""
        if not self._stream.over:
            self._sequence.record(output, self._clock())
            self._on_finish()
            self._stream.put(output)

    async def until_asked(self) -> None:
        await self._stream.until_asked()


def first_cause(error: BaseException) -> BaseException:
    """What went wrong in a group of tasks: what is the program's own fault before what is the fleet's."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast("BaseExceptionGroup[BaseException]", error)
    causes = [first_cause(each) for each in group.exceptions]
    return next((cause for cause in causes if not isinstance(cause, TercetError)), causes[0])


def is_fallback(sequence: RunningSequence, program: str) -> bool:
    """Whether the attempt that begins takes another way than ``program``, for the first time: no mere retry."""
    return sequence.attempt == 1 and program != ONE_ENGINE


async def one_engine(request: Request, fleet: Fleet, output: Sequence[int] = ()) -> Answer:
    """The least loaded engine serves the request, after the ``output`` so far.

    Of those that decode, if one is left: the others look idle, since sequences stay with them for their prompt only.
    """
    with fleet.pick("decode" if fleet.offers("decode") else "both", by="least_loaded", request=request) as engine:
        yield engine.start_generate(request, output=output)
