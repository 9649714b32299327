"""What Tercet's halves tell each other, as plain ints, bytes and strings.

``SeqParams`` and ``SendParams`` travel with a vLLM request in ``kv_transfer_params["tercet"]``, from the HTTP edge to
the scheduler's process. ``StepMetadata`` goes from there to the workers with each engine step.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

KEY = "tercet"


class SendParams(msgspec.Struct, frozen=True):
    """A request whose KV ``[begin, end)`` goes to ``addresses`` (one per rank) while it is computed.

    ``base`` is the token position of the receiver's slot 0 under ``lease``; ``notify`` is where workers report.
    """

    send_id: str
    lease: str
    base: int
    begin: int
    end: int
    addresses: list[str]
    notify: str


class SeqParams(msgspec.Struct, frozen=True):
    """A request that decodes here: its reservation, if any, and what was generated elsewhere."""

    lease: str | None = None
    output: list[int] = []


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


def params_of(kv_transfer_params: Mapping[str, Any] | None, token: str) -> TercetParams | None:
    """Tercet's part of a vLLM request, if it has one that comes from our edge."""
    if not kv_transfer_params or KEY not in kv_transfer_params:
        return None
    try:
        params = msgspec.convert(kv_transfer_params[KEY], TercetParams)
    except msgspec.ValidationError:
        return None
    return params if secrets.compare_digest(params.token.encode(), token.encode()) else None


@dataclass(frozen=True)
class Push:
    """Blocks that are complete after a step: source ``blocks`` go to the receiver's slots from ``slot`` on."""

    send_id: str
    slot: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class SendOpening:
    """Everything a worker needs to begin a send. ``addresses`` has one entry per receiving rank."""

    send_id: str
    lease: str
    base: int
    addresses: tuple[str, ...]
    notify: str


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the workers shall do in one engine step.

    ``pushes`` go out layer by layer during the forward pass. ``finish`` holds ``send_id, begin, end`` of sends of which
    this step computes the last block. ``resumed`` maps vLLM request ids to the output that they start with.
    """

    opened: list[SendOpening] = field(default_factory=list)
    pushes: list[Push] = field(default_factory=list)
    finish: list[tuple[str, int, int]] = field(default_factory=list)
    resumed: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class WorkerHandshake(KVConnectorHandshakeMetadata):
    """A worker's endpoints, collected by vLLM at start.

    KV transport, control channel and the secret that opens it, and the layout (as JSON).
    """

    rank: int
    transport: str
    control: str
    secret: str
    layout: bytes


class SendDone(msgspec.Struct, frozen=True):
    """A worker's report to the edge that its part of a send ended; ``error`` is ``None`` when it is in place."""

    send_id: str
    rank: int
    bytes: int = 0
    pieces: int = 0
    error: str | None = None


class LeaseFilled(msgspec.Struct, frozen=True):
    """A worker's report to its own edge that a sender finished, and how far the lease's KV is valid now."""

    lease: str
    rank: int
    valid_end: int


Report = SendDone | LeaseFilled
