"""Settings of ``tercet rescheduler``."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tercet.settings.declaration import Port, Seconds, Setting, Settings
from tercet.settings.discovery_settings import DiscoverySettings
from tercet.settings.move_settings import MoveSettings, RescheduleSettings
from tercet.settings.process_settings import AdminKey, AdminKeyFile, EngineSecret, EngineTLS, LeastLogged, LogLines


class ReschedulerConfig(Settings, frozen=True):
    """Settings of one rescheduler for all routers of a fleet; ``moves``, ``reschedule`` and others are groups."""

    url: Annotated[
        str, Setting("URL of a router, which lists the engines; not used if engines are found in Kubernetes.")
    ] = "http://127.0.0.1:8000"
    discovery: DiscoverySettings = DiscoverySettings()
    stream_port: Annotated[
        Port, Setting("Port to which engines connect to report their load.", default="any free port")
    ] = 0
    admin_key: AdminKey = ""
    admin_key_file: AdminKeyFile = None
    secret: EngineSecret = ""
    stuck_after_s: Annotated[
        Seconds, Setting("Time without progress after which an engine counts as lost.", unit="seconds")
    ] = msgspec.field(default=5.0, name="stuck-after")  # fmt: skip
    moves: MoveSettings = MoveSettings()
    reschedule: RescheduleSettings = RescheduleSettings()
    engine_tls: EngineTLS = EngineTLS()
    log_level: LeastLogged = "info"
    log_format: LogLines = "text"
