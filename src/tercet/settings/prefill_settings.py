"""Which engines may be asked to prefill because a header names them, and for how long; each setting declared once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tercet.settings.declaration import Seconds, Setting

PREFILL_HOSTS_VARIABLE = "TERCET_PREFILL_HOSTS"
PrefillHosts = Annotated[
    str,
    Setting(
        "Engines that x-prefiller-host-port may name: HOST:PORT, with commas; HOST may be a network (10.0.0.0/8) or "
        "have *, PORT may be a range or *.",
        env=PREFILL_HOSTS_VARIABLE,
        default="none: the header is ignored",
    ),
]
PrefillTimeout = Annotated[
    Seconds, Setting("For how long a request may wait for others to prefill, until that is done here.", unit="seconds")
]
PrefillStuckAfter = Annotated[
    Seconds, Setting("Time without a heartbeat after which a prefilling engine is given up.", unit="seconds")
]
TIMEOUT_S, STUCK_AFTER_S = 60.0, 5.0


@dataclass(frozen=True)
class PrefillBudget:
    """How long others may take to prefill for one request, all of them together, and how long one may be silent."""

    timeout_s: float = TIMEOUT_S
    stuck_after_s: float = STUCK_AFTER_S
