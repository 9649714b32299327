"""What Tercet's halves tell each other, as plain ints, bytes and strings.

``SeqParams`` and ``SendParams`` travel with a vLLM request in ``kv_transfer_params["tercet"]``, from the HTTP edge to
the scheduler's process. ``StepMetadata`` goes from there to the workers with each engine step.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from tercet.protocol import Content, KVLayout
from tercet.transport import Push, SendComplete, SendDestination, SendOpening

KEY = "tercet"
REQUEST_PREFIX = "tercet-"
"""How the ids begin that our edge gives to vLLM's requests."""


class SendParams(msgspec.Struct, frozen=True):
    """A request whose KV ``[begin, end)``, of ``content``, goes to other ranks while it is computed.

    ``destinations[rank]`` are the ones that each rank of this engine sends to. ``base`` is the token position of the
    receiver's slot 0 under ``lease``; ``notify`` is where agents report. ``group_begins`` is from which token on the
    receiver wants KV of each group of layers; of all of them all, if empty.
    """

    send_id: str
    lease: str
    content: Content
    base: int
    begin: int
    end: int
    destinations: list[list[SendDestination]]
    notify: str
    group_begins: tuple[int, ...] = ()

    def first_block(self, group: int, block_size: int) -> int:
        """The first of a group's blocks that goes out, by its position in the block table."""
        wanted = self.group_begins[group] if self.group_begins else 0
        return max(self.begin, wanted) // block_size

    def openings(self) -> list[SendOpening]:
        """What each rank's agent must know, by rank."""
        return [
            SendOpening(self.send_id, self.lease, self.content, tuple(each), self.notify) for each in self.destinations
        ]


class SeqParams(msgspec.Struct, frozen=True):
    """A request that decodes here: its reservation, if any, and what was generated elsewhere.

    Nobody writes under ``lease`` any more; its KV is valid up to ``valid_end``. ``number`` is what the edge knows the
    request by, never used twice; 0 if it does not ask.
    """

    lease: str | None = None
    valid_end: int = 0
    output: list[int] = []
    number: int = 0


class ReservedBlocks(msgspec.Struct, frozen=True):
    """What a lease holds: ``matched_len`` cached tokens, a multiple of ``block_size``, and ``blocks`` for the rest.

    ``blocks`` are by group of layers; where a group's do not look back at there is none (``NOWHERE``).
    """

    matched_len: int
    blocks: list[list[int]]
    block_size: int

    def group_begins(self) -> tuple[int, ...]:
        """From which token on each group has blocks."""
        counts = (sum(block < 0 for block in blocks) for blocks in self.blocks)
        return tuple(self.matched_len + count * self.block_size for count in counts)


class TercetParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The value of ``kv_transfer_params["tercet"]``: one of the two.

    vLLM lets any client of its API set ``kv_transfer_params``; ``token``, which only this engine's edge knows, tells
    ours from theirs.
    """

    token: str
    send: SendParams | None = None
    seq: SeqParams | None = None

    def to_kv_transfer_params(self) -> dict[str, Any]:
        """The form in which vLLM carries it to the scheduler."""
        return {KEY: msgspec.to_builtins(self)}


def params_of(kv_transfer_params: Any, token: str) -> TercetParams | None:
    """Tercet's part of a vLLM request, if it has one that comes from our edge.

    Clients may send anything, text and lists too (by ``vllm_xargs``): what is raised here would end the engine's core.
    """
    if not isinstance(kv_transfer_params, Mapping) or KEY not in kv_transfer_params:
        return None
    try:
        params = msgspec.convert(cast("Mapping[str, Any]", kv_transfer_params)[KEY], TercetParams)
    except msgspec.ValidationError:
        return None
    return params if secrets.compare_digest(params.token.encode(), token.encode()) else None


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the workers shall do in one engine step.

    ``opened`` are the sends that begin, each with an opening for every rank. ``pushes`` go out layer by layer during
    the forward pass. ``finish`` holds the sends of which this step computes the last block. ``resumed`` maps vLLM
    request ids to the output that they start with.
    """

    opened: list[list[SendOpening]] = field(default_factory=list)
    pushes: list[Push] = field(default_factory=list)
    finish: list[SendComplete] = field(default_factory=list)
    resumed: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class WorkerHandshake(KVConnectorHandshakeMetadata):
    """A worker's endpoints, collected by vLLM at start.

    Its agent's transport addresses, and address and secret of its control channel; those at which the worker itself
    says that it lives; and the layout of its KV, which is that of every rank. ``words`` is where the core finds its
    words in the rank's region: the file's path, good on this machine while the worker lives, and how far into it.
    """

    transports: list[str]
    agent: tuple[str, str]
    life: tuple[str, str]
    layout: KVLayout
    words: tuple[str, int]
