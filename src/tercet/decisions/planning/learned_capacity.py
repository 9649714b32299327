"""The capacity of one engine as a router has learned it from the engines of its fleet, without a profile."""

from __future__ import annotations

from collections.abc import Callable

from tercet.decisions.planning.candidates import most_decodes

MOST_DECODES = 4096
"""Largest number of sequences for which a step is predicted: the fit knows little about such a batch."""


class LearnedCapacity:
    """The capacity of one engine; implements :class:`~tercet.decisions.planning.candidates.EngineCapacity`.

    ``prefill_s`` returns the predicted seconds of a prompt of this number of tokens, and ``step_s`` those of a step of
    this number of sequences with this number of tokens of KV in total, which must not be less for more of either.
    ``kv_tokens`` is the size of the KV cache in tokens, 0 if unknown.
    """

    def __init__(
        self, prefill_s: Callable[[int], float], step_s: Callable[[float, float], float], kv_tokens: int = 0
    ) -> None:
        self._prefill_s, self._step_s, self._kv_tokens = prefill_s, step_s, kv_tokens

    def prefill_s(self, tokens: int) -> float:
        """Return the predicted seconds of a prompt of ``tokens`` tokens alone."""
        return self._prefill_s(tokens)

    def decodes(self, context: float, tpot: float) -> int:
        """Return the most sequences with ``context`` tokens of KV whose step takes at most ``tpot`` s; at least 1."""
        room = int(self._kv_tokens / max(1.0, context)) if self._kv_tokens else MOST_DECODES
        return most_decodes(lambda number: self._step_s(number, number * context), tpot, min(room, MOST_DECODES))
