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
    """Use two engines for a prompt of ``min_prompt`` tokens or more if the decode engine lacks ``min_missing`` of them.

    The number of missing tokens is an estimate. While every prefill engine has more than ``max_waiting`` waiting
    requests, one engine serves the request. ``decider`` names a decider of the scheduling file that replaces this rule.
    """
    rule = LoadBasedDecider(non_cached_tokens=min_missing, prompt_tokens=min_prompt, max_waiting=max_waiting)
    with fleet.pick("decode", by=pick, request=request) as decode:
        two = fleet.disaggregates(request, decode, decider or rule)
        yield prefilled_for(decode, request, fleet, 1, pick) if two else decode.start_generate(request)
