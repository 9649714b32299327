"""Detection of a model that was replaced in place: all engines at the known addresses serve other weights.

No I/O: the caller passes statuses and times.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tercet.protocol import EngineStatus
from tercet.protocol.revision import TextFingerprint

REPLACED_AFTER_S = 5.0
"""Seconds for which no engine serves and all that answer agree, until the model counts as replaced."""


class ReplacedModel:
    """The statuses of engines that answer and are refused, while no engine serves."""

    def __init__(self) -> None:
        self._agreed: EngineStatus | None = None
        self._since = 0.0

    def seen(self, now: float, refused: Sequence[EngineStatus], any_serves: bool) -> EngineStatus | None:
        """Return a status of the replaced model once all ``refused`` engines have agreed long enough; None until then.

        They agree on model, weights and text for :data:`REPLACED_AFTER_S` seconds. ``max_model_len`` of the returned
        status is the smallest one of these engines.
        """
        alike = len({_identity(status) for status in refused}) == 1
        if any_serves or not alike:
            self._agreed = None
            return None
        if self._agreed is None or _identity(self._agreed) != _identity(refused[0]):
            self._agreed, self._since = refused[0], now
        shortest = min(status.max_model_len for status in refused)
        replaced = msgspec.structs.replace(refused[0], max_model_len=shortest)
        return replaced if now - self._since >= REPLACED_AFTER_S else None


def _identity(status: EngineStatus) -> tuple[str, str, TextFingerprint]:
    return status.model, status.fingerprint, status.text
