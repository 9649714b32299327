"""Settings: each is one field of a frozen struct, from which its flag, key, variable, help, bounds and docs follow."""

from tercet.settings.declaration import (
    SECRET_VARIABLE,
    Declared,
    Setting,
    Settings,
    Source,
    declared,
    decode_settings,
    encode_settings,
    from_environment,
    key_values,
    read_yaml,
)
from tercet.settings.engine_addresses import DiscoverySettings, EngineAddress, require_engine_url, require_url
from tercet.settings.fleet_settings import MoveSettings, RescheduleSettings
from tercet.settings.process_settings import EngineTLS
from tercet.settings.router_settings import Limits, RetryBudget, RouterConfig, RouterSettings

__all__ = [
    "SECRET_VARIABLE",
    "Declared",
    "DiscoverySettings",
    "EngineAddress",
    "EngineTLS",
    "Limits",
    "MoveSettings",
    "RescheduleSettings",
    "RetryBudget",
    "RouterConfig",
    "RouterSettings",
    "Setting",
    "Settings",
    "Source",
    "declared",
    "decode_settings",
    "encode_settings",
    "from_environment",
    "key_values",
    "read_yaml",
    "require_engine_url",
    "require_url",
]
