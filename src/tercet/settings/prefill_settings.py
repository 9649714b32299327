"""Settings of prefill by engines that a request's header names: which engines, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tercet.settings.declaration import Seconds, Setting

PREFILL_HOSTS_VARIABLE = "TERCET_PREFILL_HOSTS"
PrefillHosts = Annotated[
    str,
    Setting(
        "Engines that x-prefiller-host-port may name: a list HOST:PORT,HOST:PORT. HOST may be a network (10.0.0.0/8) "
        "or have *, PORT may be a range or *.",
        env=PREFILL_HOSTS_VARIABLE,
        default="none: the header is ignored",
    ),
]
PrefillTimeout = Annotated[
    Seconds, Setting("Longest wait for prefill by other engines; after it this engine prefills itself.", unit="seconds")
]
PrefillStuckAfter = Annotated[
    Seconds, Setting("Time without a heartbeat after which a prefill engine counts as failed.", unit="seconds")
]
TIMEOUT_S, STUCK_AFTER_S = 60.0, 5.0


@dataclass(frozen=True)
class PrefillBudget:
    """Limits of prefill by other engines for one request: seconds in total, and seconds without a heartbeat of one."""

    timeout_s: float = TIMEOUT_S
    stuck_after_s: float = STUCK_AFTER_S
