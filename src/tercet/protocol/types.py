"""Requests, outputs and reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from tercet.protocol.errors import UnknownAdapter
from tercet.protocol.multimodal import MultiModalFeature
from tercet.protocol.wire import TokenId

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
# Finite: no number compares with one that is none, and JSON has no word for the other.
NotNegativeNumber = Annotated[float, msgspec.Meta(ge=0, le=1e300)]
FinishReason = Literal["stop", "length", "abort", "error", "repetition"]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to serve, as programs see it.

    ``seq_id`` names it on every engine that works on it. ``prompt`` are token ids. ``sampling_params`` hold vLLM's
    ``SamplingParams`` by field name; what is left out has vLLM's default. ``headers`` are the client's HTTP headers,
    lower case; ``user`` is what its OpenAI request called its end user. ``adapter`` is the name of the LoRA adapter
    that it asks for, None for the base model; programs need not look at it, since it goes wherever the request does.
    ``adapter_digest`` says which contents that name stood for when the request came (:class:`AdapterReport`): an
    engine with other ones refuses. Empty: whatever an engine has under the name.
    So do ``mm_features``, the images and the like that the prompt has placeholder tokens for, in their order there.
    """

    seq_id: str
    prompt: tuple[int, ...]
    sampling_params: Mapping[str, Any] = {}
    priority: int = 0
    cache_salt: str | None = None
    headers: Mapping[str, str] = {}
    user: str | None = None
    adapter: str | None = None
    adapter_digest: str = ""
    mm_features: tuple[MultiModalFeature, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.prompt)


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probability (natural) of one token at one position; ``rank`` is its 1-based place in the vocabulary."""

    token_id: int
    logprob: float
    rank: int | None = None


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an engine did for a sequence, in tokens; sent once, with the first output.

    ``prompt + output`` = ``cached`` (found in the prefix cache) + ``received`` (pushed under a lease) + ``computed``
    (run through the model here).
    """

    cached: Count = 0
    received: Count = 0
    computed: Count = 0


class Output(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one sequence. The last output of a stream has a ``finish_reason``, no other has.

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
        """Whether the sequence ends with this output."""
        return self.finish_reason is not None

    @property
    def broken_off(self) -> bool:
        """Whether the engine ended the sequence before its end."""
        return self.finish_reason in ("abort", "error")


class Sent(msgspec.Struct, frozen=True, omit_defaults=True):
    """What ``remote_send`` did; it is returned when every byte is in place and acknowledged by every rank.

    ``[begin, end)`` are the token positions that the receiver now holds. ``chunks`` counts the parts that the KV went
    in and ``bytes`` the KV in them. ``seconds`` runs from the call's arrival to the last acknowledgement. ``first`` is
    the first output token, when the caller asked the sender to sample it. ``transport`` names what the KV really went
    over, such as ``host`` or ``tcp``; several, between several ranks, are joined by ``+``.
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
    """Where an engine says which blocks it stores and drops: vLLM's own events, by ZeroMQ.

    ``endpoint`` is its publisher's address and ``replay`` that of the one that repeats events, if there is one; a host
    of ``0.0.0.0`` or ``[::]`` stands for the engine's own. ``epoch`` is another one after each start of the engine.
    """

    endpoint: str
    replay: str | None = None
    topic: str = ""
    epoch: str = ""


class AdapterReport(msgspec.Struct, frozen=True):
    """A LoRA adapter that an engine serves: its ``name``, and where its files are.

    ``digest`` stands for its config and weights: of two engines that say another one for a name, none takes the
    other's KV.
    """

    name: str
    path: str
    digest: str

    def require(self, digest: str) -> None:
        """Raises :class:`~tercet.protocol.UnknownAdapter` if somebody wants another digest; empty stands for any."""
        if digest and digest != self.digest:
            raise UnknownAdapter(
                f"adapter: this engine's {self.name!r} has other contents (digest {self.digest}) than the request is "
                f"for ({digest})",
                "adapter",
            )


class TextFingerprint(msgspec.Struct, frozen=True):
    """What stands for a model's ``tokenizer``, its vocabulary included, and its ``chat_template``; empty if unknown."""

    tokenizer: str = ""
    chat_template: str = ""


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's state: who it is, how loaded it is, and what it holds for others.

    ``free_blocks`` counts blocks that can be allocated now, cached but unused ones included. ``kv_events`` is None
    for an engine that publishes none. ``incarnation`` is another one after each start, and is what calls may be
    addressed to; ``fingerprint`` stands for the model's config and weights, ``dtype`` is that of its KV, and
    ``model_dtype`` that in which it computes, empty if it has not said. ``stalled_s`` as in :class:`EngineLoad`.
    ``text`` stands for its tokenizer and chat template.
    ``max_adapters`` is how many LoRA adapters one step may serve, 0 if it serves none; ``adapters`` are those that it
    has.
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
    dtype: str = ""
    model_dtype: str = ""
    stalled_s: NotNegativeNumber = 0.0
    max_adapters: int = 0
    adapters: tuple[AdapterReport, ...] = ()


class SequenceReport(msgspec.Struct, frozen=True):
    """One sequence that an engine generates, as the engine knows it.

    ``seq_id`` is its caller's name for it. ``tokens`` counts prompt and output so far, ``blocks`` the KV blocks that it
    holds there. It is ``running`` unless it waits in the engine's queue, where preempted ones wait, too. ``age`` is
    in seconds since it arrived there. ``door`` is the address of the front door that its tokens go to by stream; empty
    if it was asked for over plain HTTP.
    """

    seq_id: str
    tokens: Count
    blocks: Count
    running: bool
    age: NotNegativeNumber
    door: str = ""


class MoveProposal(msgspec.Struct, frozen=True, array_like=True):
    """Somebody would have a sequence on another engine: ``destination`` is that one's name, ``reason`` says why.

    ``seq_id`` is its id on the engine that generates it. Only the front door that runs it can move it.
    """

    seq_id: str
    destination: str
    reason: str


class AdapterLoad(msgspec.Struct, frozen=True, array_like=True):
    """The LoRA adapters of an engine: which its sequences use, in its batch (``running``) and in its queue.

    One step serves ``max`` of them at most. This is vLLM's ``vllm:lora_requests_info``. ``stamp`` is another number
    when the engine has other adapters than before: then its status says which.
    """

    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    max: Count = 0
    stamp: Count = 0


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How busy an engine is.

    ``waiting`` and ``running`` count requests, ``tokens`` those that the engine has still to work on, ``kv_usage`` is
    the share (0 to 1) of the KV cache in use, ``step_time`` the seconds of recent steps. None means not said.
    ``stalled_s`` is for how many seconds at least one of its processes (core, workers, agents) has shown no progress.
    An engine that is ``stopping`` ends when it is empty, or soon: what runs there is to go elsewhere.
    ``adapters`` is None of an engine that serves none.
    """

    waiting: Count
    running: Count
    kv_usage: NotNegativeNumber
    tokens: Count | None = None
    step_time: NotNegativeNumber | None = None
    stalled_s: NotNegativeNumber = 0.0
    stopping: bool = False
    adapters: AdapterLoad | None = None
