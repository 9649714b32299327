"""Messages between Tercet's parts in an engine, as plain ints, bytes and strings.

``SeqParams`` and ``SendPlan`` travel with a vLLM request in ``kv_transfer_params["tercet"]``, from the HTTP edge to
the scheduler's process. ``StepMetadata`` goes from there to the workers with each engine step.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from tercet.engine.interface import SeqParams
from tercet.protocol import KVLayout
from tercet.protocol.addresses import RankRegion
from tercet.transport import Push, SendComplete, SendPlan

KEY = "tercet"
REQUEST_PREFIX, BACKGROUND_PREFIX = "tercet-", "tercet-background-"
"""Beginnings of the ids that this engine's edge gives to vLLM's requests, and to those in the background."""


class TercetParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The value of ``kv_transfer_params["tercet"]``: either ``send`` or ``seq``, and whether it is in the background.

    vLLM lets any client of its API set ``kv_transfer_params``; ``token``, which only this engine's edge knows,
    identifies the requests of that edge.
    """

    token: str
    send: SendPlan | None = None
    seq: SeqParams | None = None
    background: bool = False

    def to_kv_transfer_params(self) -> dict[str, Any]:
        return {KEY: msgspec.to_builtins(self)}


def params_of(kv_transfer_params: Any, token: str) -> TercetParams | None:
    """Return Tercet's part of a vLLM request; None unless this engine's edge has set it.

    Clients may send anything, also text and lists (by ``vllm_xargs``): an exception here would end the engine's core.
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
    """Orders for the workers in one engine step."""

    opened: list[SendPlan] = field(default_factory=list)  # sends that begin
    pushes: list[Push] = field(default_factory=list)  # sent layer by layer during the forward pass
    finish: list[SendComplete] = field(default_factory=list)  # sends whose last block this step computes
    resumed: dict[str, list[int]] = field(default_factory=dict)  # output that vLLM's requests start with, by id


def step_in(metadata: object) -> StepMetadata | None:
    """Return Tercet's part of a step's metadata, which may be one of several connectors'; None without one."""
    parts: tuple[object, ...] = (metadata, *getattr(metadata, "metadata", ()))
    return next((part for part in parts if isinstance(part, StepMetadata)), None)


@dataclass
class WorkerHandshake(KVConnectorHandshakeMetadata):
    """A worker's endpoints, collected by vLLM at start."""

    transports: list[str]  # its agent's addresses
    agent: tuple[str, str]  # address and secret of the agent's control channel
    life: tuple[str, str]  # address and secret of the worker's liveness channel
    layout: KVLayout  # of its KV, which is that of every rank
    region: RankRegion  # the memory of its KV
    # The place of the core's words in the rank's region: a file, valid on this machine while the worker lives; offset.
    words: tuple[str, int]
