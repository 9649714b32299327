"""The program that sends each request along the route with the least predicted cost."""

from tercet.programs.answer import Answer
from tercet.protocol import Fleet, Request


async def auto(
    request: Request, fleet: Fleet, *, ttft: float | None = None, tpot: float | None = None, explore: float = 0.01
) -> Answer:
    """Serve a request on one engine, or on two that may split the prompt, whichever is predicted to cost less.

    ``ttft`` and ``tpot`` are latency objectives in seconds, None for no objective; ``explore`` is the share (0 to 1)
    of requests that may try another route, so that its costs become known.
    """
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
