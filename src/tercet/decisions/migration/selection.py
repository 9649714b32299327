"""Selection of an engine's sequences to move, in order and number: Llumnix' rules, by their names there, and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Order = Literal["FIT", "SR", "LR", "FCR", "LCR", "FCW", "FCWSR"]
Measure = Literal["num_req", "num_tokens", "block_ratio"]


@dataclass(frozen=True)
class SequenceView:
    """One sequence on an engine, as policies see it.

    ``tokens`` is the number of tokens of its prompt and output, ``share`` the part of the engine's KV cache (0 to 1)
    that they take; ``age`` is in seconds. ``running`` is True once it has a token; it waits before.
    """

    seq_id: str
    tokens: int
    share: float
    running: bool
    age: float


@dataclass(frozen=True)
class Selection:
    """At most ``value`` of an engine's sequences, in an order.

    The unit of ``value`` is the measure: sequences (``num_req``), their total tokens (``num_tokens``), or their total
    share of the KV cache (``block_ratio``). Sequences that no longer fit are skipped.

    | order | |
    | --- | --- |
    | ``FIT`` | running ones, first the one whose share is closest to the share to move |
    | ``SR`` | running ones, the shortest first |
    | ``LR`` | running ones, the longest first |
    | ``FCR`` | running ones, in order of arrival |
    | ``LCR`` | running ones, the latest arrival first |
    | ``FCW`` | waiting ones, in order of arrival |
    | ``FCWSR`` | ``FCW``, then ``SR`` |
    """

    order: Order = "FIT"
    measure: Measure = "num_req"
    value: float = 1.0

    def of(self, sequences: Sequence[SequenceView], wanted: float = 0.0) -> Iterator[SequenceView]:
        """Yield the chosen sequences in order; ``wanted`` is the part of the KV cache that should be moved."""
        taken, size = 0.0, SIZES[self.measure]
        in_order = _closest(sequences, wanted) if self.order == "FIT" else ORDERS[self.order](sequences)
        for sequence in in_order:
            if taken + size(sequence) <= self.value:
                taken += size(sequence)
                yield sequence


SIZES: Mapping[Measure, Callable[[SequenceView], float]] = {
    "num_req": lambda sequence: 1.0,
    "num_tokens": lambda sequence: float(sequence.tokens),
    "block_ratio": lambda sequence: sequence.share,
}


def _sorted(
    sequences: Iterable[SequenceView], running: bool, by: Callable[[SequenceView], float]
) -> list[SequenceView]:
    return sorted((each for each in sequences if each.running is running), key=by)


def _closest(sequences: Sequence[SequenceView], wanted: float) -> list[SequenceView]:
    return _sorted(sequences, True, lambda each: abs(each.share - wanted))


def _shortest(sequences: Sequence[SequenceView]) -> list[SequenceView]:
    return _sorted(sequences, True, lambda each: each.tokens)


def _longest_waiting(sequences: Sequence[SequenceView]) -> list[SequenceView]:
    return _sorted(sequences, False, lambda each: -each.age)


ORDERS: Mapping[str, Callable[[Sequence[SequenceView]], list[SequenceView]]] = {
    "SR": _shortest,
    "LR": lambda sequences: _sorted(sequences, True, lambda each: -each.tokens),
    "FCR": lambda sequences: _sorted(sequences, True, lambda each: -each.age),
    "LCR": lambda sequences: _sorted(sequences, True, lambda each: each.age),
    "FCW": _longest_waiting,
    "FCWSR": lambda sequences: _longest_waiting(sequences) + _shortest(sequences),
}
