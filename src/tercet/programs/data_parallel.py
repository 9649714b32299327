"""Data parallel: every request runs on one engine."""

from tercet.programs.answer import Answer
from tercet.protocol import Fleet, Request, Role


async def data_parallel(request: Request, fleet: Fleet, *, pick: str = "round_robin", role: Role = "both") -> Answer:
    """One engine prefills and decodes; ``pick`` names a picker or a profile, ``role`` those that it is picked from."""
    with fleet.pick(role, by=pick, request=request) as engine:
        yield engine.start_generate(request)
