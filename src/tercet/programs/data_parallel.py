"""Data parallel: every request runs on one engine."""

from collections.abc import AsyncGenerator

from tercet.fleet import Fleet, Role
from tercet.protocol import Output, Request


async def data_parallel(
    request: Request, fleet: Fleet, *, pick: str = "round_robin", role: Role = "both"
) -> AsyncGenerator[Output, None]:
    """One engine prefills and decodes; ``pick`` names a picker or a profile, ``role`` those that it is picked from."""
    with fleet.pick(role, by=pick, request=request) as engine:
        async for output in engine.start_generate(request):
            yield output
