"""One engine or two, decided for each request."""

from tercet.decisions.scheduling.profiles import LoadBasedDecider
from tercet.programs.answer import Answer
from tercet.programs.disaggregated import prefilled_for
from tercet.protocol import Fleet, Request


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
    """Two engines for a prompt of ``min_prompt`` tokens if the decode engine probably lacks ``min_missing`` of them.

    One engine while every prefill engine has more than ``max_waiting`` requests waiting. ``decider`` names a decider of
    the scheduling file, which then decides instead.
    """
    rule = LoadBasedDecider(non_cached_tokens=min_missing, prompt_tokens=min_prompt, max_waiting=max_waiting)
    with fleet.pick("decode", by=pick, request=request) as decode:
        two = fleet.disaggregates(request, decode, decider or rule)
        yield prefilled_for(decode, request, fleet, 1, pick) if two else decode.start_generate(request)
