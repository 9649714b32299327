"""The promise of a fleet to its clients, and the check that an engine keeps it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tercet.protocol import BadRequest, EngineStatus


class Promise(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The announcement to clients when the fleet began to serve: model names, context length and weights.

    Engines that join or return later must match it. ``max_model_len`` is in tokens; ``fingerprint`` is that of the
    weights, empty if it is not known.
    """

    models: tuple[str, ...]
    max_model_len: int
    fingerprint: str = ""

    @classmethod
    def of(cls, statuses: Sequence[EngineStatus]) -> Promise:
        """Return the promise that these engines (at least one) keep together.

        Only engines with the same weights as the first one count.
        """
        fingerprint = statuses[0].fingerprint
        alike = [status for status in statuses if status.fingerprint == fingerprint]
        models = sorted({status.model for status in alike})
        return cls(tuple(models), min(status.max_model_len for status in alike), fingerprint)

    def of_replaced(self, status: EngineStatus) -> Promise | None:
        """Return the promise with the weights of ``status``; None if ``status`` does not keep the rest of the promise.

        The model must have a name that was announced, and a context that is at least as long.
        """
        if status.model not in self.models or status.max_model_len < self.max_model_len:
            return None
        return msgspec.structs.replace(self, fingerprint=status.fingerprint)

    def require_kept(self, status: EngineStatus) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` for an engine that does not match the promise."""
        if status.model not in self.models:
            ours = ", ".join(self.models)
            raise BadRequest(
                f"url: the engine at this URL serves the model {status.model}, and this fleet serves {ours}", "url"
            )
        if self.fingerprint and status.fingerprint != self.fingerprint:
            raise BadRequest(
                f"url: the engine at this URL serves other weights (fingerprint {status.fingerprint or 'not reported'}"
                f") than this fleet ({self.fingerprint})",
                "url",
            )
        if status.max_model_len < self.max_model_len:
            raise BadRequest(
                f"url: the engine at this URL has max_model_len {status.max_model_len}, and this router has announced "
                f"{self.max_model_len} to its clients",
                "url",
            )
