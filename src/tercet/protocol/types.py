"""Requests, outputs, and the reports of engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from tercet.protocol.addresses import KVLayout, RankRegion, Revision, TextFingerprint
from tercet.protocol.content import MultiModalFeature
from tercet.protocol.errors import BadRequest, UnknownAdapter
from tercet.protocol.wire import TokenId

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
# Finite, because JSON lacks infinity and NaN, and NaN does not compare with any number.
NotNegativeNumber = Annotated[float, msgspec.Meta(ge=0, le=1e300)]
FinishReason = Literal["stop", "length", "abort", "error", "repetition"]
Paused = Literal["", "new", "all"]
"""Sequences that an engine does not advance: none, those that have not begun, or all (for example during an update)."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to serve, as programs see it.

    ``seq_id`` names it on every engine that works on it. ``prompt`` are token ids. ``sampling_params`` hold vLLM's
    ``SamplingParams`` by field name; missing ones have vLLM's default. ``headers`` are the client's HTTP headers, in
    lower case; ``user`` is the field ``user`` of its OpenAI request, ``session`` the session that its body names.
    ``adapter`` is the name of the requested LoRA adapter, None for the base model; programs can ignore it, since the
    request carries it. ``adapter_digest`` identifies the contents of that adapter when the request arrived
    (:class:`AdapterReport`): an engine with other contents refuses the request; empty means any contents. A
    ``background`` request, such as one of a batch, gets what others leave of an engine's steps and blocks.
    ``mm_features`` are the images and other features for which the prompt has placeholder tokens, in the order of the
    prompt; programs can ignore them, too.
    """

    seq_id: str
    prompt: tuple[int, ...]
    sampling_params: Mapping[str, Any] = {}
    priority: int = 0
    background: bool = False
    cache_salt: str | None = None
    headers: Mapping[str, str] = {}
    user: str | None = None
    session: str | None = None
    adapter: str | None = None
    adapter_digest: str = ""
    mm_features: tuple[MultiModalFeature, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.prompt)


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probability (natural) of one token at one position; ``rank`` is its 1-based place in the vocabulary."""

    token_id: int
    logprob: float
    rank: int | None = None


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Work of an engine for a sequence, in tokens; sent once, with the first output."""

    cached: Count = 0
    received: Count = 0
    computed: Count = 0


class Output(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one sequence. The last output of a stream has a ``finish_reason``, the others have None.

    ``logprobs`` has one entry per token: the sampled token first, then the requested top ones.
    """

    token_ids: tuple[TokenId, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    prompt_logprobs: tuple[tuple[TokenLogprob, ...] | None, ...] | None = None
    usage: Usage | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def broken_off(self) -> bool:
        """True if the engine ended the sequence too early."""
        return self.finish_reason in ("abort", "error")


class Sent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result of ``remote_send``, returned when every byte is in place and acknowledged by every rank.

    ``[begin, end)`` are the token positions that the receiver now holds; none after a send with ``cached_only`` of KV
    that the sender does not have. ``chunks`` is the number of parts in which the
    KV was sent, ``bytes`` their size. ``seconds`` runs from the call's arrival to the last acknowledgement. ``first``
    is the first output token, if the caller asked the sender to sample it. ``transport`` names the transport that
    carried the KV, such as ``host`` or ``tcp``; different ones of several ranks are joined by ``+``.
    """

    begin: int
    end: int
    bytes: int
    chunks: int
    seconds: float
    usage: Usage
    first: Output | None = None
    transport: str = ""


class KVEvents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Publisher of an engine's KV events: vLLM's events about stored and dropped blocks, sent by ZeroMQ.

    ``endpoint`` is the publisher's address; ``replay`` is the address that repeats events, or None. A host of
    ``0.0.0.0`` or ``[::]`` stands for the engine's host. ``epoch`` changes with each start of the engine.
    """

    endpoint: str
    replay: str | None = None
    topic: str = ""
    epoch: str = ""


class AdapterReport(msgspec.Struct, frozen=True):
    """A LoRA adapter that an engine serves: its ``name``, and the path of its files.

    ``digest`` identifies its config and weights: two engines that report different digests for one name do not use each
    other's KV.
    """

    name: str
    path: str
    digest: str

    def require(self, digest: str) -> None:
        """Raise :class:`~tercet.protocol.UnknownAdapter` if another digest is required; empty means any digest."""
        if digest and digest != self.digest:
            raise UnknownAdapter(
                f"adapter: {self.name!r} has the digest {self.digest} here, but the request requires {digest}",
                "adapter",
            )


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of one engine: identity, load, and the blocks that it holds for others.

    ``free_blocks`` counts blocks that can be allocated now, cached but unused ones included. ``kv_events`` is None for
    an engine that publishes none. ``incarnation`` changes with each start, and calls may be addressed to it;
    ``fingerprint`` identifies the model's config and weights. ``dtype`` is the type of its KV, ``model_dtype`` the type
    in which it computes, empty if not reported. ``stalled_s`` as in :class:`EngineLoad`. ``text`` identifies its
    tokenizer and chat template, ``layout`` is that of its KV, None if not reported. ``max_adapters`` is the number of
    LoRA adapters that one step may serve, 0 if it serves none; ``adapters`` are those that it has. ``paused`` as in
    :class:`EngineLoad`. ``regions`` are the memories of its ranks' KV, empty if not reported. ``is_store``: it keeps KV
    and computes nothing.
    """

    engine: str
    model: str
    version: str
    vllm_version: str
    block_size: int
    total_blocks: int
    free_blocks: int
    running: int
    waiting: int
    kv_cache_usage: float
    max_model_len: int
    leases: int
    sends: int
    counters: Mapping[str, int] = {}
    kv_events: KVEvents | None = None
    incarnation: str = ""
    fingerprint: str = ""
    text: TextFingerprint = TextFingerprint()
    layout: KVLayout | None = None
    dtype: str = ""
    model_dtype: str = ""
    stalled_s: NotNegativeNumber = 0.0
    max_adapters: int = 0
    adapters: tuple[AdapterReport, ...] = ()
    paused: Paused = ""
    regions: tuple[RankRegion, ...] = ()
    is_store: bool = False

    @property
    def revision(self) -> Revision:
        return Revision(self.version, self.vllm_version, self.fingerprint, self.text, self.layout)


class SequenceReport(msgspec.Struct, frozen=True):
    """One sequence that an engine generates, as the engine reports it.

    ``seq_id`` is its caller's name for it. ``tokens`` counts prompt and output so far, ``blocks`` the KV blocks that it
    holds there. ``running`` is False while it waits in the engine's queue, also after a preemption. ``age`` is in
    seconds since it arrived there. ``router`` is the address of the router that receives its tokens by stream; empty if
    it was requested over plain HTTP.
    """

    seq_id: str
    tokens: Count
    blocks: Count
    running: bool
    age: NotNegativeNumber
    router: str = ""


class MoveProposal(msgspec.Struct, frozen=True, array_like=True):
    """Proposal to move a sequence to the engine ``destination``, for the given ``reason``.

    ``seq_id`` is its id on the engine that generates it. Only the router that runs the sequence can move it.
    """

    seq_id: str
    destination: str
    reason: str


class AdapterLoad(msgspec.Struct, frozen=True, array_like=True):
    """The LoRA adapters that an engine's sequences use: in its batch (``running``) and in its queue (``waiting``).

    One step serves at most ``max`` of them. This is vLLM's ``vllm:lora_requests_info``. ``stamp`` changes when the
    engine's adapters change; its status then lists them.
    """

    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    max: Count = 0
    stamp: Count = 0


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Load of an engine.

    ``waiting`` and ``running`` count requests, ``tokens`` those that the engine still has to process, ``kv_usage`` is
    the share (0 to 1) of the KV cache in use, ``step_time`` the seconds of recent steps. None means not reported.
    ``stalled_s`` is the number of seconds since the last progress of its slowest process (core, workers, agents). An
    engine that is ``stopping`` ends when it is empty, or soon: its sequences must move elsewhere. ``adapters`` is None
    for an engine that serves none. ``paused`` names the sequences that get no tokens until its operator resumes it.
    """

    waiting: Count
    running: Count
    kv_usage: NotNegativeNumber
    tokens: Count | None = None
    step_time: NotNegativeNumber | None = None
    stalled_s: NotNegativeNumber = 0.0
    stopping: bool = False
    adapters: AdapterLoad | None = None
    paused: Paused = ""


def resolve_end(length: int, end: int | None) -> int:
    """Return the absolute end of ``prompt[:end]``: None means the whole prompt, a negative end counts from its end.

    Raises :class:`BadRequest` if it is outside ``[0, length]``.
    """
    resolved = length if end is None else end + length if end < 0 else end
    if not 0 <= resolved <= length:
        raise BadRequest(f"end: {end} is outside the prompt, which has {length} tokens", "end")
    return resolved


def resolve_range(length: int, begin: int, end: int | None) -> tuple[int, int]:
    """Return the absolute ``[begin, end)`` within a prompt of ``length`` tokens.

    Raises :class:`BadRequest` for a negative ``begin`` or an empty or backward range.
    """
    resolved = resolve_end(length, end)
    if begin < 0:
        raise BadRequest(f"begin: {begin} is negative; only end may count from the prompt's end", "begin")
    if begin >= resolved:
        raise BadRequest(f"begin: {begin} must be less than the end, which is {resolved}", "begin")
    return begin, resolved
