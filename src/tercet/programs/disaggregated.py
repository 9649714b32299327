"""Prefill-decode disaggregation."""

from tercet.programs.answer import Answer
from tercet.protocol import Engine, Fleet, Request


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
