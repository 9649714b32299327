"""The built-in programs, each an async generator over a request and a fleet; at the end, how any program runs.

A ``with`` gives back what it took, an engine or a reservation, on every way out of the pattern.
``migrate_context`` copies cached KV and serves no request.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, Protocol, Union, cast

from tercet.aio.tasks import is_cancelled
from tercet.decisions.scheduling.profiles import LoadBasedDecider
from tercet.protocol import BadRequest, Engine, Fleet, Output, OutputStream, Request, Role, Sent, Source, TercetError

# Values that a program yields: outputs, engines' streams, other programs. (A union with a quoted name needs ``Union``.)
Answer = AsyncIterator[Union[Output, OutputStream, "Answer"]]


async def disaggregated(request: Request, fleet: Fleet, *, min_send: int = 32, pick: str = "least_loaded") -> Answer:
    """Prefill on one engine, decode on another, which receives the KV while it is computed.

    The first token comes from the prefill engine. If the decode engine lacks fewer than ``min_send`` tokens, a transfer
    is not worth a second engine: the decode engine prefills them itself.
    """
    with fleet.pick("decode", by=pick, request=request) as decode:
        yield prefilled_for(decode, request, fleet, min_send, pick)


async def prefilled_for(decode: Engine, request: Request, fleet: Fleet, min_send: int, pick: str) -> Answer:
    """Serve as :func:`disaggregated` does, with an engine ``decode`` that has been picked already."""
    async with decode.prep_recv(request) as space:
        begin, output = space.matched_len, ()
        if space.to_send >= min_send:
            with fleet.pick("prefill", by=pick, other_than=decode, request=request) as prefill:
                sent = await prefill.remote_send(request, space, begin, sample=True)
            if sent.first is not None:
                yield sent.first
                if sent.first.finished:
                    return
                begin, output = sent.end, sent.first.token_ids
        yield decode.start_generate(request, begin, output)


async def data_parallel(request: Request, fleet: Fleet, *, pick: str = "round_robin", role: Role = "both") -> Answer:
    """Prefill and decode on one engine of the ``role``, which the picker or profile ``pick`` chooses."""
    with fleet.pick(role, by=pick, request=request) as engine:
        yield engine.start_generate(request)


async def one_engine(request: Request, fleet: Fleet, output: Sequence[int] = ()) -> Answer:
    """Serve a request on the least loaded engine, after the ``output`` so far.

    Engines that decode are preferred: engines that only prefill look idle, since sequences stay there only for their
    prompt.
    """
    with fleet.pick("decode" if fleet.offers("decode") else "both", by="least_loaded", request=request) as engine:
        yield engine.start_generate(request, output=output)


DecodeStart = Callable[[Request], int]


async def balanced(
    request: Request,
    fleet: Fleet,
    *,
    balance_ratio: float = 0.1,
    decode_start: DecodeStart | None = None,
    min_send: int = 32,
    pick: str = "least_loaded",
) -> Answer:
    """Prefill the prompt up to ``decode_start`` on one engine; the decode engine prefills the rest and the first token.

    ``decode_start(request)`` returns a position in tokens; without it, the decode engine prefills the last share
    ``balance_ratio`` (0 to 1) of the prompt. If the decode engine lacks fewer than ``min_send`` tokens before that
    position, it prefills those too.
    """
    if decode_start is None and not 0 <= balance_ratio < 1:
        raise BadRequest(f"balance_ratio: is {balance_ratio}, and must be at least 0 and below 1", "balance_ratio")
    start = max(1, round(request.num_tokens * (1 - balance_ratio))) if decode_start is None else decode_start(request)
    with fleet.pick("decode", by=pick, request=request) as decode:
        async with decode.prep_recv(request, start) as space:
            begin = space.matched_len
            if space.to_send >= min_send:
                with fleet.pick("prefill", by=pick, other_than=decode, request=request) as prefill:
                    begin = (await prefill.remote_send(request, space, begin, start)).end
            yield decode.start_generate(request, begin)


async def conditional(
    request: Request,
    fleet: Fleet,
    *,
    min_prompt: int = 256,
    min_missing: int = 128,
    max_waiting: int = 5,
    decider: str | None = None,
    pick: str = "least_loaded",
) -> Answer:
    """Use two engines for a prompt of ``min_prompt`` tokens or more if the decode engine lacks ``min_missing`` of them.

    The number of missing tokens is an estimate. While every prefill engine has more than ``max_waiting`` waiting
    requests, one engine serves the request. ``decider`` names a decider of the scheduling file that replaces this rule.
    """
    rule = LoadBasedDecider(non_cached_tokens=min_missing, prompt_tokens=min_prompt, max_waiting=max_waiting)
    with fleet.pick("decode", by=pick, request=request) as decode:
        two = fleet.disaggregates(request, decode, decider or rule)
        yield prefilled_for(decode, request, fleet, 1, pick) if two else decode.start_generate(request)


async def cache_bypass(
    request: Request, fleet: Fleet, *, cached_share: float = 0.5, short_prompt: int = 128, pick: str = "least_loaded"
) -> Answer:
    """Serve on the decode engine alone if it has more than ``cached_share`` of the prompt, or if the prompt is short.

    Only tokens that the engine itself finds in its cache count. A prompt of up to ``short_prompt`` tokens is short.
    """
    if request.num_tokens <= short_prompt:
        yield data_parallel(request, fleet, pick=pick, role="decode")
        return
    # The reservation shows what the engine really has: a belief decides nothing here.
    least_missing = math.ceil(request.num_tokens * (1 - cached_share))
    yield disaggregated(request, fleet, min_send=max(1, least_missing), pick=pick)


async def fetch(request: Request, fleet: Fleet, *, pick: str = "least_work", role: Role = "both") -> Answer:
    """Prefill and decode on one engine, which first pulls what another has cached of the prompt, if that is cheaper.

    The picker or profile ``pick`` chooses the engine, of the ``role``.
    """
    with fleet.pick(role, by=pick, request=request) as engine:
        yield after_pull(request, engine, fleet.source(request, engine))


async def after_pull(request: Request, engine: Engine, source: Source | None) -> Answer:
    """Serve on ``engine``, which computes what has not come from the ``source``: a pull that fails costs one call."""
    if source is None:
        yield engine.start_generate(request)
        return
    async with AsyncExitStack() as stack:
        begin = 0
        with suppress(TercetError):
            # Entered by the stack, outside of the suppression: the lease lives until the generation has begun.
            space = await stack.enter_async_context(engine.prep_recv(request, source.end))
            begin = space.matched_len
            if space.to_send:
                # What came counts, not what was expected: the holder may have evicted the end since.
                begin = (await source.engine.remote_send(request, space, begin, cached_only=True)).end
        yield engine.start_generate(request, begin)


async def auto(
    request: Request, fleet: Fleet, *, ttft: float | None = None, tpot: float | None = None, explore: float = 0.01
) -> Answer:
    """Serve a request on one engine, or on two that may split the prompt, whichever is predicted to cost less.

    ``ttft`` and ``tpot`` are latency objectives in seconds, None for no objective; ``explore`` is the share (0 to 1)
    of requests that may try another route, so that its costs become known.
    """
    with fleet.route(request, ttft, tpot, explore) as route:
        if route.prefill is None:
            yield after_pull(request, route.decode, route.source)
            return
        async with route.decode.prep_recv(request, route.split) as space:
            begin, output = space.matched_len, ()
            if space.to_send:
                # Only who has the whole prompt can sample: the first token then comes with the send's answer.
                whole = route.split == request.num_tokens
                sent = await route.prefill.remote_send(request, space, begin, sample=whole)
                begin, output = sent.end, sent.first.token_ids if sent.first is not None else ()
                if sent.first is not None:
                    yield sent.first
                if sent.first is not None and sent.first.finished:
                    return
            yield route.decode.start_generate(request, begin, output)


async def migrate_context(fleet: Fleet, prefix: Request, source: str, destination: str) -> Sent | None:
    """Copy the KV of ``prefix`` from ``source`` into the cache of ``destination``; return None if all is there already.

    ``source`` sends the KV that it has cached, and computes the rest. Afterwards the prefix is ordinary prefix cache of
    ``destination``, in full blocks. Raises :class:`~tercet.protocol.UnknownEngine` and
    :class:`~tercet.protocol.NoSpace` if ``destination`` has no room.
    """
    if source == destination:
        raise BadRequest(
            f"destination: is {destination}, the same as source; name two different engines", "destination"
        )
    with fleet.engine(source) as sender, fleet.engine(destination) as receiver:
        async with receiver.prep_recv(prefix) as space:
            # The whole prefix is there: a call of the sender would only take its time.
            if not space.missing:
                return None
            return await sender.remote_send(prefix, space, space.matched_len)


# ---- how a program runs ---------------------------------------------------------------------------------------


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
