"""The model that a fleet announces to its clients, and the checks that an engine serves the same one. No I/O.

Engines that join or return must match the announced names, context length and weights, and the router's tokenizer and
chat template. A model that all engines replaced in place is accepted after a while: :class:`ReplacedModel`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tercet.protocol import BadRequest, EngineStatus
from tercet.protocol.addresses import TextFingerprint

REPLACED_AFTER_S = 5.0
"""Seconds for which no engine serves and all that answer agree, until the model counts as replaced."""


class ServedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was announced to clients when the fleet began to serve: model names, context length and weights."""

    models: tuple[str, ...]
    max_model_len: int  # in tokens
    fingerprint: str = ""  # of the weights; empty if it is not known

    @classmethod
    def of(cls, statuses: Sequence[EngineStatus]) -> ServedModel:
        """Return the model that these engines (at least one) serve together.

        Only engines with the same weights as the first one count.
        """
        fingerprint = statuses[0].fingerprint
        alike = [status for status in statuses if status.fingerprint == fingerprint]
        models = sorted({status.model for status in alike})
        return cls(tuple(models), min(status.max_model_len for status in alike), fingerprint)

    def of_replaced(self, status: EngineStatus) -> ServedModel | None:
        """Return this model with the weights of ``status``; None if ``status`` differs in the rest.

        The model must have a name that was announced, and a context that is at least as long.
        """
        if status.model not in self.models or status.max_model_len < self.max_model_len:
            return None
        return msgspec.structs.replace(self, fingerprint=status.fingerprint)

    def require_kept(self, status: EngineStatus) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` for an engine that does not serve this model."""
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


def has_same_text(status: EngineStatus, text: TextFingerprint) -> bool:
    """True if an engine has this tokenizer and chat template; what either side does not report is not compared."""
    pairs = (status.text.tokenizer, text.tokenizer), (status.text.chat_template, text.chat_template)
    return all(theirs == ours or not theirs or not ours for theirs, ours in pairs)


def require_same_text(status: EngineStatus, text: TextFingerprint, param: str) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for an engine with another tokenizer or chat template."""
    if has_same_text(status, text):
        return
    if status.text.tokenizer and text.tokenizer and status.text.tokenizer != text.tokenizer:
        what, remedy = "tokenizer", "use the same --model and --tokenizer for the router as for its engines"
        theirs, ours = status.text.tokenizer, text.tokenizer
    else:
        what = "chat template"
        remedy = "give the router the same checkpoint, or the right template by --chat-template"
        theirs, ours = status.text.chat_template, text.chat_template
    raise BadRequest(
        f"{param}: the engine {status.engine} has another {what} (fingerprint {theirs}) than this router "
        f"({ours}), so its token ids have other meanings; {remedy}",
        param,
    )


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
