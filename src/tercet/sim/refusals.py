"""What a simulated engine refuses."""

from __future__ import annotations

from collections.abc import Sequence

from tercet.protocol import BadRequest, KVAddrInfo, Request
from tercet.sim.block_pool import Lease
from tercet.sim.step_times import Profile

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


def tokens_to_produce(request: Request, given: int, profile: Profile, total_blocks: int) -> int:
    """How many tokens are wanted beyond the ``given`` ones, cut at the model's length.

    Raises :class:`~tercet.protocol.BadRequest` if there is no room for one, or they never fit in ``total_blocks``.
    """
    wanted = max_tokens_of(request)
    if wanted <= given:
        raise BadRequest(
            f"sampling_params.max_tokens: {wanted} is reached by the {given} tokens of output already",
            "sampling_params.max_tokens",
        )
    room = profile.max_model_len - request.num_tokens
    if room <= given:
        raise BadRequest(
            f"output: {request.num_tokens} + {given} tokens leave no room in {profile.max_model_len}", "output"
        )
    goal = min(wanted, room) - given
    tokens = request.num_tokens + given + goal
    if -(-tokens // profile.block_size) > total_blocks:
        raise BadRequest(f"prompt: with its output, {tokens} tokens do not fit in the whole KV cache", "prompt")
    return goal


def check_prompt(request: Request, limit: int) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for a prompt without tokens, or with more than ``limit``."""
    if not request.prompt:
        raise BadRequest("prompt: is empty", "prompt")
    if request.num_tokens > limit:
        raise BadRequest(f"prompt: {request.num_tokens} tokens exceed the model's maximum of {limit}", "prompt")


def check_send(request: Request, info: KVAddrInfo, begin: int, end: int, sample: bool) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` unless the reservation has room for ``[begin, end)``."""
    if begin < info.begin:
        raise BadRequest(f"begin: {begin} is before {info.begin}, where the reservation starts", "begin")
    if end > info.end:
        raise BadRequest(f"end: {end} is past {info.end}, where the reservation ends", "end")
    if sample and end != request.num_tokens:
        raise BadRequest(f"sample: needs the whole prompt, and end {end} is not its length", "sample")


def check_same(lease: Lease, request: Request, output: Sequence[int]) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` unless the lease was taken for this sequence."""
    reserved = lease.prompt.tokens
    if reserved is request.prompt:
        return
    if (*request.prompt, *output)[: lease.end] != reserved[: lease.end]:
        raise BadRequest("prompt: differs from what prep_recv reserved", "prompt")
