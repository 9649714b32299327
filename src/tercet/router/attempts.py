"""What is tried for a sequence: its program first, then one engine that goes on from the tokens so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tercet.programs import Answer
from tercet.protocol import EngineError, Fleet, Output, Request
from tercet.router.recovery import Recovery


class ProgramFault(Exception):
    """A program broke the rules for programs."""


class BrokenOff(EngineError):
    """An engine ended the sequence before its end, and nobody here had asked it to.

    ``begun`` has the tokens that came with it, ``output`` tells how it ended.
    """

    def __init__(self, output: Output) -> None:
        super().__init__(f"the engine ended the sequence: {output.finish_reason}")
        self.begun = msgspec.structs.replace(output, finish_reason=None, stop_reason=None)
        self.output = Output((), output.finish_reason, output.stop_reason)


def require_whole(output: Any) -> None:
    """Raises :class:`ProgramFault` for what is no output, :class:`BrokenOff` for one that is not the end it claims."""
    if not isinstance(output, Output):
        raise ProgramFault(f"it yielded a {type(output).__name__} instead of an Output")
    if output.broken_off:
        raise BrokenOff(output)


def again(request: Request, recovery: Recovery) -> Request:
    """The request of another attempt: under an id of its own, so that nothing late of an earlier one is taken for it.

    Log probabilities of the prompt came with the first token.
    """
    params = request.sampling_params
    if recovery.answered:
        params = {name: value for name, value in params.items() if name != "prompt_logprobs"}
    return msgspec.structs.replace(request, seq_id=f"{request.seq_id}.{recovery.attempts}", sampling_params=params)


async def one_engine(request: Request, fleet: Fleet, output: Sequence[int] = ()) -> Answer:
    """The least loaded engine serves the request, after ``output`` that there is already.

    Of those that decode, if one is left: the others look idle, since sequences stay with them for their prompt only.
    """
    with fleet.pick("decode" if fleet.offers("decode") else "both", by="least_loaded", request=request) as engine:
        yield engine.start_generate(request, output=output)
