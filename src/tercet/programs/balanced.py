"""Prefill-decode disaggregation in which the decode engine prefills the end of the prompt."""

from collections.abc import Callable

from tercet.programs.answer import Answer
from tercet.protocol import BadRequest, Fleet, Request

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
    """One engine prefills the prompt up to ``decode_start``, the decode engine the rest and with it the first token.

    ``decode_start(request)`` returns the position; without it, the last ``balance_ratio`` of the prompt is left. With
    fewer than ``min_send`` tokens missing before it, the decode engine prefills those too.
    """
    start = split_of(request, balance_ratio) if decode_start is None else decode_start(request)
    with fleet.pick("decode", by=pick, request=request) as decode:
        async with decode.prep_recv(request, start) as space:
            begin = space.matched_len
            if space.missing >= min_send:
                with fleet.pick("prefill", by=pick, other_than=decode, request=request) as prefill:
                    begin = (await prefill.remote_send(request, space, begin, start)).end
            yield decode.start_generate(request, begin)


def split_of(request: Request, balance_ratio: float) -> int:
    """The position that leaves ``balance_ratio`` of the prompt behind it, at least 1.

    Raises :class:`~tercet.protocol.BadRequest` for a ratio that is not in ``[0, 1)``.
    """
    if not 0 <= balance_ratio < 1:
        raise BadRequest(f"balance_ratio: is {balance_ratio}, and must be at least 0 and below 1", "balance_ratio")
    return max(1, round(request.num_tokens * (1 - balance_ratio)))
