"""The options of a simulated engine (scheduling, caching, failures) or store, and the checks of calls to an engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from tercet.engine.leases import check_range
from tercet.protocol import AdapterReport, BadRequest, KVAddrInfo, KVLayout, Request, UnknownAdapter
from tercet.settings.declaration import complaint
from tercet_lab.sim.step_times import Profile


class EngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of one simulated engine. Settings that vLLM also has keep vLLM's names.

    - ``schedule``: ``chunked`` runs decodes and chunks of prompts in one step, as vLLM does, and MLC-LLM in its default
      ``hybrid`` mode; ``prefill_first`` runs steps of prompts alone while any prompt is left.
    - ``max_num_batched_tokens``: maximum of tokens in one step; ``max_num_seqs``: maximum of running sequences.
    - ``prefix_caching``: True to reuse KV of earlier sequences.
    - ``total_blocks``: number of KV blocks, instead of the profile's.
    - ``lease_ttl`` (seconds), ``reserve_wait`` (seconds), ``max_lease_share`` (of the pool): as in the plugin's
      settings.
    - ``stream_every``: number of tokens after which a stream delivers. With 0, a stream that a program yields delivers
      the first token on time, and all others with the last token: the times of the first and the last token are right,
      at a fraction of the cost. A program that iterates over a stream itself gets each token on time.
    - ``prefill_scale``, ``decode_scale``: factors of the profile's times. ``host_time``: seconds that each step takes
      in addition, for a profile without host time between steps. ``send_time``: seconds that a step takes in addition
      for each token that it computes for a ``remote_send``, where sending slows computing.
    - ``transfer_failures``: probability that a ``remote_send`` loses its KV on the way.
    - ``adapters``: names of the engine's LoRA adapters, separated by commas. At most ``max_loras`` of them are in one
      batch. Loading an adapter into a batch takes ``lora_load`` seconds.
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
    host_time: float = 0.0
    send_time: float = 0.0
    transfer_failures: float = 0.0
    adapters: str = ""
    max_loras: int = 1
    lora_load: float = 0.0

    def __post_init__(self) -> None:
        """Raise :class:`~tercet.protocol.BadRequest`, which names the field, for the first invalid value."""
        for field in ("max_num_batched_tokens", "max_num_seqs", "max_loras"):
            _require(getattr(self, field) >= 1, field, getattr(self, field), "at least 1")
        # Every running decode has a token in each step; this keeps equal steps equal.
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        _require(seqs <= tokens, "max_num_seqs", seqs, f"at most max_num_batched_tokens, {tokens}")
        _require(self.total_blocks is None or self.total_blocks >= 1, "total_blocks", self.total_blocks, "at least 1")
        _require(self.stream_every >= 0, "stream_every", self.stream_every, "0 or more")
        _require(self.lora_load >= 0, "lora_load", self.lora_load, "0 or more")
        for field in ("host_time", "send_time"):
            _require(0 <= getattr(self, field) < math.inf, field, getattr(self, field), "0 or more")
        for field in ("lease_ttl", "reserve_wait", "prefill_scale", "decode_scale"):
            _require(getattr(self, field) > 0, field, getattr(self, field), "positive")
        for field in ("max_lease_share", "transfer_failures"):
            _require(0 <= getattr(self, field) <= 1, field, getattr(self, field), "between 0 and 1")

    @property
    def adapter_names(self) -> list[str]:
        """Names of the adapters, from ``adapters``."""
        return [name for name in self.adapters.split(",") if name]


class StoreSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A store with room for the KV of ``tokens`` in memory and of ``disk_tokens`` on a disk, 0 for none.

    The disk reads and writes ``disk_rate`` bytes per second.
    """

    tokens: int
    disk_tokens: int = 0
    disk_rate: float = 5e9

    def __post_init__(self) -> None:
        """Raise :class:`~tercet.protocol.BadRequest`, which names the field, for the first invalid value."""
        fine = {"tokens": self.tokens >= 1, "disk_tokens": self.disk_tokens >= 0, "disk_rate": self.disk_rate > 0}
        for name in (name for name, good in fine.items() if not good):
            raise BadRequest(f"fleet: stores: {name}: is {getattr(self, name)}, and is too small", "fleet")


def options_from(base: EngineOptions, changes: Mapping[str, Any]) -> EngineOptions:
    """Return ``base`` with ``changes``; values may be text. Raise ``BadRequest``, which names an invalid field."""
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
LIMIT = "sampling_params.max_tokens"


def max_tokens_of(request: Request) -> int:
    """Return the number of requested output tokens. Raise :class:`~tercet.protocol.BadRequest` if it is invalid."""
    wanted = request.sampling_params.get("max_tokens", MAX_TOKENS)
    if not isinstance(wanted, int) or wanted < 1:
        raise BadRequest(f"{LIMIT}: is {wanted!r}, and must be an integer of at least 1", LIMIT)
    return wanted


def tokens_to_produce(request: Request, given: int, profile: Profile, total_blocks: int) -> int:
    """Return the number of output tokens to produce after the ``given`` tokens, limited by the model's length.

    Raise :class:`~tercet.protocol.BadRequest` if not one more token is allowed, or if ``total_blocks`` cannot hold all.
    """
    wanted = max_tokens_of(request)
    if wanted <= given:
        raise BadRequest(f"{LIMIT}: is {wanted}, and must exceed the {given} output tokens that the call gives", LIMIT)
    room = profile.max_model_len - request.num_tokens
    if room <= given:
        raise BadRequest(
            f"output: a prompt of {request.num_tokens} and an output of {given} tokens reach the model's maximum of "
            f"{profile.max_model_len}; send fewer tokens",
            "output",
        )
    goal = min(wanted, room) - given
    tokens = request.num_tokens + given + goal
    if -(-tokens // profile.block_size) > total_blocks:
        raise BadRequest(f"prompt: {tokens} tokens with the output do not fit in the whole KV cache", "prompt")
    return goal


def check_prompt(request: Request, limit: int) -> None:
    """Raise ``BadRequest`` for an empty prompt, one of more than ``limit`` tokens, or one with multimodal features."""
    if not request.prompt:
        raise BadRequest("prompt: is empty; send at least one token", "prompt")
    if request.mm_features:
        raise BadRequest("mm_features: a simulated engine accepts text only", "mm_features")
    if request.num_tokens > limit:
        raise BadRequest(f"prompt: {request.num_tokens} tokens exceed the model's maximum of {limit}", "prompt")


def check_adapter(request: Request, known: Mapping[str, AdapterReport]) -> None:
    """Raise :class:`~tercet.protocol.UnknownAdapter` if the request names an adapter that is not in ``known``."""
    if request.adapter is not None and request.adapter not in known:
        said = ", ".join(known) or "none"
        raise UnknownAdapter(f"adapter: this engine has no adapter {request.adapter!r}; it has {said}", "adapter")
    if request.adapter is not None:
        known[request.adapter].require(request.adapter_digest)


def check_send(
    request: Request, info: KVAddrInfo, begin: int, end: int, sample: bool, layout: KVLayout, room: int,
    cached_only: bool = False,
) -> None:  # fmt: skip
    """Raise ``BadRequest`` or ``LayoutMismatch`` unless the tokens ``[begin, end)`` can be sent into the reservation.

    The reservation must have the request's adapter, and this engine's whole KV cache, ``room`` tokens, hold ``end``
    tokens; other rules are those of every engine.
    """
    if end > room:
        raise BadRequest(f"prompt: {end} tokens do not fit in the whole KV cache of {room}", "prompt")
    if info.adapter != (request.adapter or ""):
        raise BadRequest(f"adapter: is {request.adapter!r}, and prep_recv was for {info.adapter!r}", "adapter")
    check_range(info, begin, end, request.num_tokens, sample, layout, cached_only)
