"""Data parallel: every request runs on one engine."""

from collections.abc import AsyncIterator

from tercet.fleet import Fleet
from tercet.protocol import Output, Request


async def data_parallel(request: Request, fleet: Fleet, *, pick: str = "round_robin") -> AsyncIterator[Output]:
    """One engine prefills and decodes; ``pick`` names a picker or a profile."""
    with fleet.pick(by=pick, request=request) as engine:
        async for output in engine.start_generate(request):
            yield output
