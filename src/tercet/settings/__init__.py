"""Settings: each is one field of a frozen struct, from which its flag, key, variable, help, bounds and docs follow."""

from tercet.settings.declaration import SECRET_VARIABLE, Declared, Setting, Settings, declared, key_values
from tercet.settings.decoding import Source, decode_settings, encode_settings, from_environment, read_yaml
from tercet.settings.discovery_settings import DiscoverySettings
from tercet.settings.engine_addresses import EngineAddress
from tercet.settings.limit_settings import Limits
from tercet.settings.move_settings import MoveSettings, RescheduleSettings
from tercet.settings.process_settings import EngineTLS
from tercet.settings.rescheduler_config import ReschedulerConfig
from tercet.settings.retry_settings import RetryBudget
from tercet.settings.router_config import RouterConfig
from tercet.settings.router_settings import RouterSettings
from tercet.settings.urls import require_engine_url, require_url

__all__ = [
    "SECRET_VARIABLE",
    "Declared",
    "DiscoverySettings",
    "EngineAddress",
    "EngineTLS",
    "Limits",
    "MoveSettings",
    "RescheduleSettings",
    "ReschedulerConfig",
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
