"""Settings of retries: how many a failed sequence gets, and for how long."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tercet.settings.declaration import NotNegative, Seconds, Setting, Settings
from tercet.settings.panels import FAILURES


class RetryBudget(Settings, frozen=True):
    """Limits of the retries of one sequence; after them its client gets the error."""

    retries: Annotated[
        NotNegative, Setting("Most retries of a failed sequence in a row without a new token.", panel=FAILURES)
    ] = 2
    within_s: Annotated[
        Seconds,
        Setting(
            "Longest time for retries after the last token that the client got, or after the request if it got none.",
            unit="seconds",
            in_file=True,
            panel=FAILURES,
        ),
    ] = msgspec.field(default=600.0, name="retry-within")
