"""What an engine implements so that the verbs run on it: two protocols, and the records that pass through them.

The verbs run in the process that serves HTTP. They own names, timers, sends and the calls to agents:

    caller ── HTTP ──▶ verbs (this room) ──▶ SchedulerHalf     blocks: reserve, extend, commit, release, pin for a send
                          │                  GenerationHalf    requests: prefill, decode, adopt a lease's blocks
                          └── control ─────▶ agents            bytes: open, push, fence (:mod:`tercet.transport`)

:class:`SchedulerHalf` runs on the scheduler's thread, between two engine steps, and never waits for an agent or a peer:
only that thread may touch blocks. :class:`GenerationHalf` runs ordinary requests of the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import msgspec

from tercet.engine.block_tables import TablePlace
from tercet.protocol import (
    AdapterReport,
    BadRequest,
    Content,
    EngineError,
    KVLayout,
    MultiModalFeature,
    Output,
    TercetError,
    cache_key,
    content_of,
    digest_of_features,
    packed,
)
from tercet.protocol.addresses import RankRegion
from tercet.protocol.content import require_placed
from tercet.protocol.spans import SpanContext
from tercet.transport import Push, SendPlan
from tercet.transport.sockets import LOOPBACK

# ---- what a prompt is ----------------------------------------------------------------------------------------


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter, as the engine needs it: its name, number and path, and the digest of its contents."""

    name: str
    number: int
    path: str
    digest: str
    is_3d: bool = False


def digest_of(adapter: Adapter | None) -> str:
    """Return the digest that identifies an adapter's KV; empty for the base model."""
    return "" if adapter is None else adapter.digest


class KeyedPrompt(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """Tokens, cache salt, LoRA adapter, and features (images and the like) without data, as they go to the core."""

    tokens: list[int]
    salt: str | None = None
    adapter: Adapter | None = None
    features: tuple[MultiModalFeature, ...] = ()

    @cached_property
    def key(self) -> str | None:
        return cache_key(self.salt, digest_of(self.adapter), digest_of_features(self.features))

    def difference(self, other: KeyedPrompt) -> str:
        """Return the name in calls of the field in which ``other`` differs; empty if at most the tokens differ."""
        # vLLM's cache treats an empty salt like None.
        if digest_of_features(self.features) != digest_of_features(other.features):
            return "mm_features"
        if self.adapter != other.adapter:
            return "adapter"
        return "cache_salt" if (self.salt or None) != (other.salt or None) else ""

    def content(self, end: int) -> Content:
        """Return the identity of the KV of the first ``end`` tokens."""
        return content_of(packed(self.tokens), self.key, end)

    def require(self, valid: Content, lease: str) -> None:
        """Raise ``EngineError`` unless ``valid``, of which a lease's agents report the KV, is a part of this prompt.

        Agents report contents and not positions only: KV of another lease's tokens never enters a cache, whatever a
        sender or a late message claims.
        """
        if self.content(valid.end) != valid:
            raise EngineError(f"lease {lease}: the agents report KV of other tokens than those of the lease")

    def first(self, end: int) -> KeyedPrompt:
        return msgspec.structs.replace(self, tokens=self.tokens[:end])

    def with_output(self, output: Sequence[int]) -> KeyedPrompt:
        return msgspec.structs.replace(self, tokens=[*self.tokens, *output])


# ---- the scheduler's half ------------------------------------------------------------------------------------


class EngineDescription(msgspec.Struct, frozen=True):
    """The core's description, read once."""

    transports: list[list[str]]  # each rank's addresses
    agents: list[tuple[str, str]]  # address and secret of each rank's agent
    workers: list[tuple[str, str]]  # address and secret of its worker's liveness channel
    layout: KVLayout
    token: str  # marks requests of this engine's edge
    lease_ttl: float  # seconds, as reserve_wait
    reserve_wait: float
    kv_events: dict[str, Any] | None  # endpoint, replay endpoint and topic
    tables: TablePlace | None = None  # where block tables are published; None if they are not
    host: str = LOOPBACK  # at which agents reach the API server's process
    regions: list[RankRegion] = []  # each rank's memory of KV
    is_store: bool = False  # it has no engine that computes


class ReservedBlocks(msgspec.Struct, frozen=True):
    """Contents of a lease: ``matched_len`` cached tokens, a multiple of ``block_size``, and ``blocks`` for the rest.

    ``blocks`` are by group of layers; tokens that a group does not look back at have none (a negative number).
    """

    matched_len: int
    blocks: list[list[int]]
    block_size: int
    tier_len: int = 0  # tokens that the engine would load from its other connectors instead of computing them

    def group_begins(self) -> tuple[int, ...]:
        """Return the first token for which each group has blocks."""
        counts = (sum(block < 0 for block in blocks) for blocks in self.blocks)
        return tuple(self.matched_len + count * self.block_size for count in counts)


class PinnedPrefix(msgspec.Struct, frozen=True):
    """Cached KV that a send has pinned: ``pushes`` of whole blocks up to ``end``; none if it is the send's begin."""

    end: int
    pushes: list[Push]


class RequestInCore(msgspec.Struct, frozen=True):
    """The scheduler's data about one request of :class:`GenerationHalf`, by its ``request_id``."""

    request_id: str
    blocks: int
    running: bool


class SchedulerHalf(Protocol):
    """Blocks: each method runs between two engine steps, in the order of the calls, and raises ``TercetError``.

    A lease's blocks have no other owner from :meth:`reserve` until :meth:`release`, or until a request adopts them
    (:class:`SeqParams`). The verbs call either only after every agent has confirmed that no peer writes there any more.
    """

    async def reserve(self, lease: str, prompt: KeyedPrompt) -> ReservedBlocks:
        """Match the prompt's prefix and reserve blocks for the rest, in order of arrival; wait until there are some.

        Raises :class:`~tercet.protocol.NoSpace`. Once the call has arrived it is carried out, also if the caller has
        left: then a :meth:`release` follows.
        """
        ...

    async def give_up(self, lease: str) -> None:
        """End the wait of :meth:`reserve`, or of :meth:`extend`, which then raises the reason of the wait."""

    async def extend(self, lease: str, prompt: KeyedPrompt) -> ReservedBlocks:
        """Reserve more blocks for an open lease, for more tokens of its sequence, now or never; return all its blocks.

        Raises :class:`~tercet.protocol.NoSpace`, :class:`~tercet.protocol.UnknownSequence` or
        :class:`~tercet.protocol.BadRequest`; then the lease is unchanged, but blocks in other use stay pinned.
        """
        ...

    async def commit(self, lease: str, valid: Content) -> None:
        """Make received KV an entry of the prefix cache; the lease stays open. Raises ``EngineError`` for other KV."""

    async def release(self, lease: str, valid_end: int) -> int:
        """Free the blocks of a lease, committed up to ``valid_end``; return the number of tokens whose KV is valid.

        Raises :class:`~tercet.protocol.UnknownSequence` if it is not held: a request has adopted it.
        """
        ...

    async def push_cached(self, prompt: KeyedPrompt, send: SendPlan) -> list[Push] | None:
        """Plan a send of KV that is fully here: pin its blocks and return the pushes; None if some of it is missing."""
        ...

    async def push_longest(self, prompt: KeyedPrompt, send: SendPlan) -> PinnedPrefix:
        """Plan a send of the longest cached whole blocks of ``[begin, end)``, which may be none; pin them."""
        ...

    async def end_send(self, send_id: str) -> None:
        """Unpin the blocks of a send, which no agent reads any more; its request, if it arrives later, is refused."""

    async def sequences(self) -> list[RequestInCore]:
        """Return the requests of :class:`GenerationHalf` that the scheduler has."""
        ...


# ---- generation ----------------------------------------------------------------------------------------------


class SeqParams(msgspec.Struct, frozen=True):
    """A request that decodes here: its reservation, if any, and output from other engines.

    No peer writes under ``lease`` any more. The request adopts its blocks, and computes the rest. A lease that has
    ended meanwhile is not an error: then the request computes everything itself.
    """

    lease: str | None = None
    valid_end: int = 0  # up to which the lease's KV is valid
    output: list[int] = []
    number: int = 0  # the edge's unique number of the request, or 0


@dataclass(frozen=True)
class ModelLimits:
    """The limits of the engine's model."""

    vocab_size: int
    max_model_len: int
    # The largest number of images and the like in a prompt, for each kind.
    most_features: Mapping[str, int] = field(default_factory=dict[str, int])
    adapters_change_features: bool = False  # an adapter changes how the model sees them

    def check_prompt(self, tokens: list[int]) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` for a prompt that the model cannot process."""
        if not tokens:
            raise BadRequest("prompt: is empty", "prompt")
        if max(tokens) >= self.vocab_size:
            raise BadRequest(f"prompt: token id {max(tokens)} is outside the vocabulary of {self.vocab_size}", "prompt")
        if len(tokens) > self.max_model_len:
            raise BadRequest(
                f"prompt: {len(tokens)} tokens exceed the model's maximum of {self.max_model_len}", "prompt"
            )  # fmt: skip

    def check_output(self, tokens: list[int], output: list[int]) -> None:
        """Raise as :meth:`check_prompt` does, for output that exists already."""
        if output and max(output) >= self.vocab_size:
            raise BadRequest(f"output: token id {max(output)} is outside the vocabulary", "output")
        if output and len(tokens) + len(output) >= self.max_model_len:
            raise BadRequest(
                f"output: {len(tokens)} + {len(output)} tokens leave no room in the model's {self.max_model_len}",
                "output",
            )

    def check_features(self, tokens: list[int], features: Sequence[MultiModalFeature], adapter: str | None) -> None:
        """Raise as :meth:`check_prompt` does, for the images and the like of a prompt."""
        require_placed(features, len(tokens))
        for modality, count in Counter(feature.modality for feature in features).items():
            most = self.most_features.get(modality)
            if most is None:
                raise BadRequest(
                    f"mm_features: modality: this engine's model does not accept {modality}", "mm_features"
                )
            if count > most:
                raise BadRequest(
                    f"mm_features: {count} of {modality}, and this engine accepts at most {most} in a prompt "
                    "(--limit-mm-per-prompt)",
                    "mm_features",
                )
        if features and adapter is not None and self.adapters_change_features:
            raise BadRequest(
                "mm_features: this engine's adapters change how the model sees images "
                "(enable_tower_connector_lora), so KV of images cannot be identified",
                "mm_features",
            )


class EngineRequest(Protocol):
    """One request of the engine, with Tercet's id and without output in its ``prompt``.

    ``span`` is its span in a distributed trace, or None. ``num_cached`` is the number of tokens that were not
    computed for it, once it has an output.
    """

    span: SpanContext | None

    @property
    def request_id(self) -> str: ...
    @property
    def prompt(self) -> KeyedPrompt: ...
    @property
    def num_cached(self) -> int: ...

    def abort(self) -> None:
        """End the request; its stream then ends with the finish reason ``abort``."""

    async def first(self) -> Output:
        """Compute the prompt and sample one token; its output is not finished if the request continues elsewhere."""
        ...

    def outputs(self) -> AsyncGenerator[Output, None]:
        """Yield outputs until one has a finish reason."""
        ...

    async def start(self, take: Callable[[Output | TercetError], None]) -> None:
        """Submit the request; then ``take`` gets its outputs, or the error that ends it, on the event loop."""


class GenerationHalf(Protocol):
    """Requests: the engine's own scheduling and sampling, and facts about its model.

    ``version`` is the engine's, ``model`` the model's name in its own API, and ``model_dtype`` the type in which the
    model computes.
    """

    @property
    def limits(self) -> ModelLimits: ...
    @property
    def version(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def model_dtype(self) -> str: ...

    def encode(self, text: str) -> list[int]: ...

    def request(
        self, prompt: KeyedPrompt, sampling_params: Mapping[str, Any], work: SeqParams | SendPlan, priority: int = 0,
        features: Sequence[MultiModalFeature] = (), background: bool = False,
    ) -> EngineRequest:  # fmt: skip
        """Return a request that has not started.

        It decodes for a sequence, or it computes the prompt while the KV is sent, layer by layer; the send begins with
        the first step. ``features`` are the prompt's, with their data; ``background`` is that of the call. Raises
        nothing.
        """
        ...


class AdapterTable(Protocol):
    """The LoRA adapters of the engine: at most ``most`` in one step, 0 if it serves none."""

    @property
    def most(self) -> int: ...

    def count_users(self, names: Callable[[], list[str]]) -> None:
        """Register ``names``, which returns the names of adapters in use: their contents are not replaced."""

    async def find(self, name: str | None, digest: str = "") -> Adapter | None:
        """Return the adapter called ``name``; None for the base model. Without a ``digest``, any contents are accepted.

        Raises :class:`~tercet.protocol.UnknownAdapter`, also if the adapter has another digest, and
        :class:`~tercet.protocol.Conflict` if its files have changed.
        """
        ...

    async def reports(self) -> tuple[AdapterReport, ...]: ...
