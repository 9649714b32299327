"""Observers of the sequences of a service: the page that shows them, and the record of requests for planners."""

from __future__ import annotations

from typing import Literal, Protocol

from tercet.fleet import RunningSequence, Trace

Outcome = Literal["served", "failed", "left"]
"""The end of a sequence: ``left`` if its client left or caused the error."""


class SequenceObserver(Protocol):
    """A receiver of the start and the end of each sequence; for a sequence that began earlier, only of the end."""

    def begins(self, sequence: RunningSequence, trace: Trace) -> None:
        """Record a sequence that begins; its trace is still empty."""
        ...

    def ends(self, sequence: RunningSequence, trace: Trace, outcome: Outcome) -> None:
        """Record a sequence that has ended."""
        ...


class SequenceObservers:
    """All observers of a service, in the order in which they were added."""

    def __init__(self) -> None:
        self._observers: list[SequenceObserver] = []

    def __contains__(self, observer: SequenceObserver) -> bool:
        return observer in self._observers

    def __len__(self) -> int:
        return len(self._observers)

    def add(self, observer: SequenceObserver) -> None:
        """Notify an observer from now on."""
        self._observers.append(observer)

    def remove(self, observer: SequenceObserver) -> None:
        """Stop notifying an observer; an unknown observer is ignored."""
        if observer in self._observers:
            self._observers.remove(observer)

    def begins(self, sequence: RunningSequence, trace: Trace) -> ObservedSequence:
        """Notify all observers of a sequence that begins; return the object to notify of its end."""
        for observer in self._observers:
            observer.begins(sequence, trace)
        return ObservedSequence(sequence, trace, self._observers)


class ObservedSequence:
    """One observed sequence; observers are notified only of its first end."""

    __slots__ = ("_is_over", "_observers", "_sequence", "_trace")

    def __init__(self, sequence: RunningSequence, trace: Trace, observers: list[SequenceObserver]) -> None:
        self._sequence = sequence
        self._trace = trace
        self._observers = observers
        self._is_over = False

    def ends(self, outcome: Outcome) -> None:
        """Notify the observers that the sequence has ended; later calls have no effect."""
        if not self._is_over:
            self._is_over = True
            for observer in tuple(self._observers):
                observer.ends(self._sequence, self._trace, outcome)
