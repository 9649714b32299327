"""Each request takes the route that is predicted to cost least."""

from tercet.programs.answer import Answer
from tercet.protocol import Fleet, Request


async def auto(
    request: Request, fleet: Fleet, *, ttft: float | None = None, tpot: float | None = None, explore: float = 0.01
) -> Answer:
    """One engine, or a pair that may split the prompt; ``ttft`` and ``tpot`` are objectives in seconds."""
    with fleet.route(request, ttft, tpot, explore) as route:
        if route.prefill is None:
            yield route.decode.start_generate(request)
            return
        async with route.decode.prep_recv(request, route.split) as space:
            begin, output = space.matched_len, ()
            if space.missing:
                whole = route.split == request.num_tokens
                sent = await route.prefill.remote_send(request, space, begin, sample=whole)
                begin, output = sent.end, sent.first.token_ids if sent.first is not None else ()
                if sent.first is not None:
                    yield sent.first
                if sent.first is not None and sent.first.finished:
                    return
            yield route.decode.start_generate(request, begin, output)
