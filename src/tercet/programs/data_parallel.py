"""Data parallel: every request runs on one engine."""

from tercet.programs.answer import Answer
from tercet.protocol import Fleet, Request, Role


async def data_parallel(request: Request, fleet: Fleet, *, pick: str = "round_robin", role: Role = "both") -> Answer:
    """Prefill and decode on one engine of the ``role``, which the picker or profile ``pick`` chooses."""
    with fleet.pick(role, by=pick, request=request) as engine:
        yield engine.start_generate(request)
