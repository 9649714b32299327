"""A program whose first step is a migration of context: who decodes finds what the other engine has computed."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from msgspec import structs

from tercet.programs import migrate_context
from tercet.protocol import Fleet, OutputStream, Request


async def context_first(request: Request, fleet: Fleet) -> AsyncGenerator[OutputStream, None]:
    """Have the prompt in the cache of one engine, from the other one; then ask the former, which has no lease."""
    context = structs.replace(request, seq_id=f"context-{request.seq_id}")
    await migrate_context(fleet, context, "prefill-0", "decode-0")
    with fleet.engine("decode-0") as engine:
        yield engine.start_generate(request)
