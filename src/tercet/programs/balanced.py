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
    """Prefill the prompt up to ``decode_start`` on one engine; the decode engine prefills the rest and the first token.

    ``decode_start(request)`` returns a position in tokens; without it, the decode engine prefills the last share
    ``balance_ratio`` (0 to 1) of the prompt. If the decode engine lacks fewer than ``min_send`` tokens before that
    position, it prefills those too.
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
    """Return the position (tokens, at least 1) after which the share ``balance_ratio`` of the prompt remains.

    Raises :class:`~tercet.protocol.BadRequest` for a ratio that is not in ``[0, 1)``.
    """
    if not 0 <= balance_ratio < 1:
        raise BadRequest(f"balance_ratio: is {balance_ratio}, and must be at least 0 and below 1", "balance_ratio")
    return max(1, round(request.num_tokens * (1 - balance_ratio)))
