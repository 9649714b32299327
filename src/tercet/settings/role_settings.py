"""What requests should get, and who gives engines their roles: operators or the router."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tercet.protocol import BadRequest
from tercet.settings.declaration import Seconds, Setting, Settings

OBJECTIVES = "Objectives and roles"
Share = Annotated[float, Meta(gt=0, le=1)]
RolesBy = Annotated[
    Literal["auto", "fixed"],
    Setting(
        "Engines' roles prefill and decode: `fixed` as given, or `auto`: the router changes them when their load does. "
        "It needs both objectives.",
        panel=OBJECTIVES,
    ),
]


class Objectives(Settings, frozen=True):
    """What a share of the requests must get: limits of their latencies, in seconds; None means no limit.

    :func:`tercet.decisions.objectives.meets` is the rule.
    """

    ttft: Annotated[
        Seconds | None,
        Setting("Objective: longest time to the first token.", unit="seconds", default="none", panel=OBJECTIVES),
    ] = msgspec.field(default=None, name="objective-ttft")
    tpot: Annotated[
        Seconds | None,
        Setting("Objective: longest mean time per further token.", unit="seconds", default="none", panel=OBJECTIVES),
    ] = msgspec.field(default=None, name="objective-tpot")
    share: Annotated[
        Share, Setting("Share of the requests that must meet the objectives.", panel=OBJECTIVES)
    ] = msgspec.field(default=0.99, name="objective-share")  # fmt: skip

    @property
    def any(self) -> bool:
        """Whether there is a limit."""
        return self.ttft is not None or self.tpot is not None


def require_objectives(roles: str, objectives: Objectives) -> None:
    """Raises :class:`~tercet.protocol.BadRequest` if roles are to follow objectives that were not given."""
    if roles == "auto" and (objectives.ttft is None or objectives.tpot is None):
        raise BadRequest("roles: auto needs --objective-ttft and --objective-tpot", "roles")
