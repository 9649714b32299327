"""The plugin's settings: ``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from tercet.protocol import BadRequest

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class PluginConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of one engine's Tercet plugin.

    ``lease_ttl``: seconds until an unused reservation ends by itself. ``max_lease_share``: share of the block pool
    that reservations may pin together, since they cannot be preempted. ``host``: address that the transport listens
    on. ``port``: its first port, rank r listens on ``port + r``; 0 picks free ones. ``send_timeout``: seconds without
    progress after which a push fails.
    """

    lease_ttl: Seconds = 60.0
    max_lease_share: Share = 0.8
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    send_timeout: Seconds = 30.0


def parse_config(extra: Mapping[str, Any]) -> PluginConfig:
    """Validate ``kv_connector_extra_config``; raises :class:`~tercet.protocol.BadRequest` naming the key."""
    try:
        return msgspec.convert(dict(extra), PluginConfig, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(f"kv_connector_extra_config: {error}", "kv_connector_extra_config") from error
