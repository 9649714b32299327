"""What a simulated engine refuses."""

from __future__ import annotations

from collections.abc import Sequence

from tercet.protocol import BadRequest, Request
from tercet.sim.leases import Lease

# vLLM's default.
MAX_TOKENS = 16


def max_tokens_of(request: Request) -> int:
    """How many tokens are wanted; raises :class:`~tercet.protocol.BadRequest`."""
    wanted = request.sampling_params.get("max_tokens", MAX_TOKENS)
    if not isinstance(wanted, int) or wanted < 1:
        raise BadRequest(
            f"sampling_params.max_tokens: is {wanted!r}, and must be an integer of at least 1",
            "sampling_params.max_tokens",
        )
    return wanted


def check_same(lease: Lease, request: Request, output: Sequence[int]) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` unless the lease was taken for this sequence."""
    reserved = lease.prompt.tokens
    if reserved is request.prompt:
        return
    if (*request.prompt, *output)[: lease.end] != reserved[: lease.end]:
        raise BadRequest("prompt: differs from what prep_recv reserved", "prompt")
