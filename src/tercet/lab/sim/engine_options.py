"""Options of a simulated engine's scheduling, caching and failures, and checks of its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from tercet.lab.sim.leases import Lease
from tercet.lab.sim.step_times import Profile
from tercet.protocol import AdapterReport, BadRequest, KVAddrInfo, Request, UnknownAdapter
from tercet.settings.declaration import complaint


class EngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine's settings, with vLLM's names where they exist.

    - ``schedule``: ``chunked`` runs decodes and chunks of prompts in one step, as vLLM does; ``prefill_first`` runs
      steps of prompts alone while there are any, as MLC-LLM does.
    - ``max_num_batched_tokens``: tokens of one step; ``max_num_seqs``: sequences that run at once.
    - ``prefix_caching``: whether KV of earlier sequences is found again.
    - ``total_blocks``: replaces the profile's.
    - ``lease_ttl`` (seconds), ``reserve_wait`` (seconds), ``max_lease_share`` (of the pool): as in the plugin's
      settings.
    - ``stream_every``: tokens after which a stream is woken. 0 wakes a stream that a program yields for the first token
      and for the last, and hands over what came in between at the end: first and last arrive on time, at a fraction of
      the cost. A program that iterates over a stream itself gets each token when it comes.
    - ``prefill_scale``, ``decode_scale``: multiply the profile's times.
    - ``transfer_failures``: probability that a ``remote_send`` loses its KV on the way.
    - ``adapters``: names of the LoRA adapters that it has, with commas between; ``max_loras`` of them may be in one
      batch, and one that is not yet there takes ``lora_load`` seconds.
    """

    schedule: Literal["chunked", "prefill_first"] = "chunked"
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    prefix_caching: bool = True
    total_blocks: int | None = None
    lease_ttl: float = 60.0
    reserve_wait: float = 1.0
    max_lease_share: float = 0.8
    stream_every: int = 0
    prefill_scale: float = 1.0
    decode_scale: float = 1.0
    transfer_failures: float = 0.0
    adapters: str = ""
    max_loras: int = 1
    lora_load: float = 0.0

    def __post_init__(self) -> None:
        """Raises :class:`~tercet.protocol.BadRequest` naming the first invalid value."""
        for field in ("max_num_batched_tokens", "max_num_seqs", "max_loras"):
            _require(getattr(self, field) >= 1, field, getattr(self, field), "at least 1")
        # Every running decode has a token in each step, which keeps equal steps equal.
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        _require(seqs <= tokens, "max_num_seqs", seqs, f"at most max_num_batched_tokens, {tokens}")
        _require(self.total_blocks is None or self.total_blocks >= 1, "total_blocks", self.total_blocks, "at least 1")
        _require(self.stream_every >= 0, "stream_every", self.stream_every, "0 or more")
        _require(self.lora_load >= 0, "lora_load", self.lora_load, "0 or more")
        for field in ("lease_ttl", "reserve_wait", "prefill_scale", "decode_scale"):
            _require(getattr(self, field) > 0, field, getattr(self, field), "positive")
        for field in ("max_lease_share", "transfer_failures"):
            _require(0 <= getattr(self, field) <= 1, field, getattr(self, field), "between 0 and 1")

    @property
    def adapter_names(self) -> list[str]:
        """The names in ``adapters``."""
        return [name for name in self.adapters.split(",") if name]


def options_from(base: EngineOptions, changes: Mapping[str, Any]) -> EngineOptions:
    """Options with some replaced; text is converted. Raises :class:`~tercet.protocol.BadRequest` naming the field."""
    merged = {**msgspec.to_builtins(base), **changes}
    try:
        return msgspec.convert(merged, EngineOptions, strict=False)
    except msgspec.ValidationError as error:
        raise complaint("engine options", EngineOptions, changes, error, "options") from error


def _require(fine: bool, field: str, value: object, rule: str) -> None:
    if not fine:
        raise BadRequest(f"{field}: is {value}, and must be {rule}", field)


# vLLM's default.
MAX_TOKENS = 16


def max_tokens_of(request: Request) -> int:
    """Number of requested output tokens; raises :class:`~tercet.protocol.BadRequest`."""
    wanted = request.sampling_params.get("max_tokens", MAX_TOKENS)
    if not isinstance(wanted, int) or wanted < 1:
        raise BadRequest(
            f"sampling_params.max_tokens: is {wanted!r}, and must be an integer of at least 1",
            "sampling_params.max_tokens",
        )
    return wanted


def tokens_to_produce(request: Request, given: int, profile: Profile, total_blocks: int) -> int:
    """Number of output tokens beyond the ``given`` ones, limited by the model's length.

    Raises :class:`~tercet.protocol.BadRequest` if there is no room for one, or they never fit in ``total_blocks``.
    """
    wanted = max_tokens_of(request)
    if wanted <= given:
        raise BadRequest(
            f"sampling_params.max_tokens: {wanted} is already reached by the {given} tokens of output",
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
    if request.mm_features:
        raise BadRequest("mm_features: a simulated engine takes text only", "mm_features")
    if request.num_tokens > limit:
        raise BadRequest(f"prompt: {request.num_tokens} tokens exceed the model's maximum of {limit}", "prompt")


def check_adapter(request: Request, known: Mapping[str, AdapterReport]) -> None:
    """Raise :class:`~tercet.protocol.UnknownAdapter` unless the request's adapter is known here, if it has one."""
    if request.adapter is not None and request.adapter not in known:
        said = ", ".join(known) or "none"
        raise UnknownAdapter(f"adapter: this engine has no adapter {request.adapter!r}; it has {said}", "adapter")
    if request.adapter is not None:
        known[request.adapter].require(request.adapter_digest)


def check_send(request: Request, info: KVAddrInfo, begin: int, end: int, sample: bool, room: int) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` unless the reservation has room for ``[begin, end)``.

    Also unless it is for the same adapter, and this engine's whole KV cache, of ``room`` tokens, can hold ``end``.
    """
    if end > room:
        raise BadRequest(f"prompt: {end} tokens do not fit in the whole KV cache of {room}", "prompt")
    if info.adapter != (request.adapter or ""):
        raise BadRequest(f"adapter: is {request.adapter!r}, and prep_recv was for {info.adapter!r}", "adapter")
    if begin < info.begin:
        raise BadRequest(f"begin: {begin} is before {info.begin}, where the reservation starts", "begin")
    if end > info.end:
        raise BadRequest(f"end: {end} is past {info.end}, where the reservation ends", "end")
    if sample and end != request.num_tokens:
        raise BadRequest(f"sample: needs the whole prompt, and end {end} is not its length", "sample")


def check_same(lease: Lease, request: Request, output: Sequence[int], end: int | None = None) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` unless the lease was taken for this sequence, and its cache salt."""
    reserved = lease.prompt.tokens
    if lease.prompt.adapter != request.adapter:
        raise BadRequest("adapter: differs from that of prep_recv for this sequence", "adapter")
    if not lease.prompt.has_salt(request.cache_salt):
        raise BadRequest("cache_salt: differs from that of prep_recv for this sequence", "cache_salt")
    if reserved is request.prompt and (end is None or end >= lease.end):
        return
    if (*request.prompt, *output)[:end][: lease.end] != reserved[: lease.end]:
        raise BadRequest("prompt: differs from the prompt of prep_recv", "prompt")
