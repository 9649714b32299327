"""Attempts to serve a sequence: by its program, and after a failure by one engine that continues after its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from tercet.aio import is_cancelled
from tercet.fleet import RunningSequence
from tercet.programs import Answer, run_program
from tercet.protocol import EngineError, Fleet, Output, OutputStream, Request, TercetError

# The program that continues a sequence whose program failed.
ONE_ENGINE = "data_parallel"


class ProgramFault(Exception):
    """Raised if a program breaks the rules for programs."""


class BrokenOff(EngineError):
    """Raised if an engine ended a sequence too early, without a request of this process.

    ``begun`` has the tokens of the last output, and ``output`` its finish reason.
    """

    def __init__(self, output: Output, engine: str) -> None:
        super().__init__(f"{engine or 'the program'} ended the sequence: {output.finish_reason}")
        self.begun = msgspec.structs.replace(output, finish_reason=None, stop_reason=None)
        self.output = Output((), output.finish_reason, output.stop_reason)


class Attempts:
    """The attempts for one sequence: programs run one after another, and their outputs go to ``stream``."""

    def __init__(
        self, sequence: RunningSequence, stream: OutputStream, on_finish: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._sequence = sequence
        self._clock = clock
        self._stream = stream
        self._on_finish = on_finish
        self._fault: ProgramFault | BrokenOff | None = None

    async def run(self, program: Callable[[], Answer]) -> BaseException | None:
        """Run one program to its end; return its failure if another attempt may serve the sequence, otherwise None."""
        self._fault = None
        try:
            await run_program(program(), self)
            failure: BaseException = self._fault or ProgramFault("the program ended before its sequence")
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            failure = ProgramFault("the program was cancelled, but not because its client left")
            failure.__cause__ = error
        except (Exception, SystemExit) as error:  # a user's program may raise anything
            failure = self._fault or first_cause(error)
        if self._stream.over:
            return None
        if is_cancelled():  # the program ended, or replaced its cancellation by another error
            raise asyncio.CancelledError from failure
        return failure

    @property
    def over(self) -> bool:
        """True if the running program must stop."""
        return self._fault is not None or self._stream.over

    def put(self, output: Any) -> None:
        """Take an output that the program yields, or that a stream of its engines has."""
        if not isinstance(output, Output):
            self._fault = ProgramFault(f"the program yielded a {type(output).__name__} instead of an Output")
        elif output.finish_reason is None:
            self._sequence.record(output, self._clock())
            self._stream.put(output)
        elif output.broken_off:
            self._fault = BrokenOff(output, self._sequence.engine)
            if self._sequence.generation is not None:
                self._sequence.generation.engine.failed(self._fault)
            if output.token_ids:
                self.put(self._fault.begun)
        else:
            self.finish(output)

    def finish(self, output: Output) -> None:
        """End the sequence with this output."""
        if not self._stream.over:
            self._sequence.record(output, self._clock())
            self._on_finish()
            self._stream.put(output)

    async def until_asked(self) -> None:
        await self._stream.until_asked()


def first_cause(error: BaseException) -> BaseException:
    """Return the error to report for a group of tasks: an error of the program if there is one, else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast("BaseExceptionGroup[BaseException]", error)
    causes = [first_cause(each) for each in group.exceptions]
    return next((cause for cause in causes if not isinstance(cause, TercetError)), causes[0])


def is_fallback(sequence: RunningSequence, program: str) -> bool:
    """True if the attempt that begins is the first one on one engine after ``program`` failed, not a further retry."""
    return sequence.attempt == 1 and program != ONE_ENGINE


async def one_engine(request: Request, fleet: Fleet, output: Sequence[int] = ()) -> Answer:
    """Serve a request on the least loaded engine, after the ``output`` so far.

    Engines that decode are preferred: engines that only prefill look idle, since sequences stay there only for their
    prompt.
    """
    with fleet.pick("decode" if fleet.offers("decode") else "both", by="least_loaded", request=request) as engine:
        yield engine.start_generate(request, output=output)
