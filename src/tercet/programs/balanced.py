"""Prefill-decode disaggregation in which the decode engine prefills the end of the prompt."""

from collections.abc import AsyncIterator

from tercet.fleet import Fleet
from tercet.protocol import BadRequest, Output, Request


async def balanced(
    request: Request, fleet: Fleet, *, balance_ratio: float = 0.1, min_send: int = 32, pick: str = "least_loaded"
) -> AsyncIterator[Output]:
    """One engine prefills the prompt up to ``decode_start``, the decode engine the last ``balance_ratio`` of it.

    With fewer than ``min_send`` tokens missing before ``decode_start``, the decode engine prefills those too.
    """
    if not 0 <= balance_ratio < 1:
        raise BadRequest(f"balance_ratio: is {balance_ratio}, and must be at least 0 and below 1", "balance_ratio")
    decode_start = max(1, round(request.num_tokens * (1 - balance_ratio)))
    with fleet.pick("decode", by=pick, request=request) as decode:
        async with decode.prep_recv(request, decode_start) as space:
            begin = space.matched_len
            if space.missing >= min_send:
                with fleet.pick("prefill", by=pick, other_than=decode, request=request) as prefill:
                    begin = (await prefill.remote_send(request, space, begin, decode_start)).end
            async for output in decode.start_generate(request, begin):
                yield output
