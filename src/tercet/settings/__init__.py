"""Settings: each is one field of a frozen struct, from which its flag, key, variable, help, bounds and docs follow."""

from tercet.settings.declaration import SECRET_VARIABLE as SECRET_VARIABLE
from tercet.settings.declaration import Declared as Declared
from tercet.settings.declaration import Setting as Setting
from tercet.settings.declaration import Settings as Settings
from tercet.settings.declaration import Source as Source
from tercet.settings.declaration import declared as declared
from tercet.settings.declaration import decode_settings as decode_settings
from tercet.settings.declaration import encode_settings as encode_settings
from tercet.settings.declaration import from_environment as from_environment
from tercet.settings.declaration import key_values as key_values
from tercet.settings.declaration import read_yaml as read_yaml
from tercet.settings.declaration import settings_from_parent as settings_from_parent
from tercet.settings.engine_addresses import DiscoverySettings as DiscoverySettings
from tercet.settings.engine_addresses import EngineAddress as EngineAddress
from tercet.settings.engine_addresses import require_engine_url as require_engine_url
from tercet.settings.engine_addresses import require_url as require_url
from tercet.settings.fleet_settings import MoveSettings as MoveSettings
from tercet.settings.fleet_settings import RescheduleSettings as RescheduleSettings
from tercet.settings.process_settings import EngineTLS as EngineTLS
from tercet.settings.router_settings import Limits as Limits
from tercet.settings.router_settings import RetryBudget as RetryBudget
from tercet.settings.router_settings import RouterConfig as RouterConfig
from tercet.settings.router_settings import RouterSettings as RouterSettings
