"""Runs a program for each sequence, and knows which program."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import cast

from tercet.fleet import Fleet, Trace
from tercet.programs import BUILT_IN, Program, data_parallel, load_program
from tercet.protocol import (
    BadRequest,
    EngineError,
    EngineUnreachable,
    NoSpace,
    Output,
    Request,
    TercetError,
    TransferFailed,
)
from tercet.router.context import PROGRAM_HEADER
from tercet.router.metrics import Metrics

# Failures of a pattern, not of the request: nothing has been sent to the client, so one engine may still serve it.
PATTERN_FAILED = (NoSpace, TransferFailed, EngineUnreachable)
ONE_ENGINE = "data_parallel"


class Service:
    """The programs of this front door over its fleet."""

    def __init__(self, fleet: Fleet, program: str, program_args: Mapping[str, str], metrics: Metrics) -> None:
        self.fleet = fleet
        self.program = program
        self.program_args = dict(program_args)
        self._metrics = metrics
        self._default = load_program(program, program_args)

    async def run(self, request: Request, trace: Trace) -> AsyncGenerator[Output, None]:
        """Run the request's program; yields its outputs and notes in ``trace`` what happened.

        Raises the program's :class:`~tercet.protocol.TercetError`.
        """
        started, first_at, num_tokens, finished = time.monotonic(), 0.0, 0, False
        with self._metrics.sequence():
            async with aclosing(self._with_fallback(request, trace)) as outputs:
                async for output in outputs:
                    first_at = first_at or time.monotonic()
                    num_tokens += len(output.token_ids)
                    _time(trace, started, first_at, num_tokens)
                    yield output
                    finished = output.finished
                    if finished:
                        break
        if not finished:
            raise EngineError(f"the program {trace.program} ended before its sequence did")
        self._metrics.finished(trace)

    async def _with_fallback(self, request: Request, trace: Trace) -> AsyncGenerator[Output, None]:
        name, program = self._choose(request)
        trace.program = name
        answered = False
        try:
            async with aclosing(self._start(program, request, trace)) as outputs:
                async for output in outputs:
                    answered = True
                    yield output
            return
        except PATTERN_FAILED as error:
            if answered or name == ONE_ENGINE:
                raise
            self._metrics.fell_back(name, error)
        trace.program = f"{name} -> {ONE_ENGINE}"
        async with aclosing(self._start(_one_engine, request, trace)) as outputs:
            async for output in outputs:
                yield output

    def failed(self, error: TercetError) -> None:
        """A sequence ended in an error."""
        self._metrics.failed(error)

    def _choose(self, request: Request) -> tuple[str, Program]:
        if request.sampling_params.get("prompt_logprobs") is not None:
            # Every prompt position must be computed on the engine that answers.
            return ONE_ENGINE, _one_engine
        wanted = request.headers.get(PROGRAM_HEADER, self.program)
        return wanted, self.program_called(wanted)

    def program_called(self, name: str) -> Program:
        """The program that a client may ask for by name: the front door's own, or a built-in one.

        Raises :class:`~tercet.protocol.BadRequest` for any other.
        """
        if name == self.program:
            return self._default
        if name not in BUILT_IN:
            raise BadRequest(
                f"{PROGRAM_HEADER}: there is no program {name!r}; choose {', '.join(sorted(BUILT_IN))}", PROGRAM_HEADER
            )
        return load_program(name)

    def _start(self, program: Program, request: Request, trace: Trace) -> AsyncGenerator[Output, None]:
        return cast("AsyncGenerator[Output, None]", program(request, self.fleet.traced(trace)))


def _one_engine(request: Request, fleet: Fleet) -> AsyncGenerator[Output, None]:
    return cast("AsyncGenerator[Output, None]", data_parallel(request, fleet, pick="least_loaded"))


def _time(trace: Trace, started: float, first_at: float, num_tokens: int) -> None:
    trace.ttft = first_at - started
    if num_tokens > 1:
        trace.tpot = (time.monotonic() - first_at) / (num_tokens - 1)
