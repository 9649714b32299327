"""Observers of the sequences of a service: a page that shows them, and what a planner knows of the traffic."""

from __future__ import annotations

from typing import Literal, Protocol

from tercet.fleet import RunningSequence, Trace

Outcome = Literal["served", "failed", "left"]
"""How a sequence ended: ``left`` if its client left, or is to blame for the error."""


class SequenceObserver(Protocol):
    """Receives the beginning and, once, the end of each sequence; of one that began before, only the end."""

    def begins(self, sequence: RunningSequence, trace: Trace) -> None:
        """A sequence begins, and its trace is empty."""
        ...

    def ends(self, sequence: RunningSequence, trace: Trace, outcome: Outcome) -> None:
        """A sequence is over."""
        ...


class SequenceObservers:
    """All observers of a service, in the order in which they came."""

    def __init__(self) -> None:
        self._observers: list[SequenceObserver] = []

    def __contains__(self, observer: SequenceObserver) -> bool:
        return observer in self._observers

    def __len__(self) -> int:
        return len(self._observers)

    def add(self, observer: SequenceObserver) -> None:
        """Notify it of what happens from now on."""
        self._observers.append(observer)

    def remove(self, observer: SequenceObserver) -> None:
        """Notify it no more; one that is not there changes nothing."""
        if observer in self._observers:
            self._observers.remove(observer)

    def begins(self, sequence: RunningSequence, trace: Trace) -> ObservedSequence:
        """A sequence begins; returns what is to be notified of its end."""
        for observer in self._observers:
            observer.begins(sequence, trace)
        return ObservedSequence(sequence, trace, self._observers)


class ObservedSequence:
    """One sequence, whose first end counts."""

    __slots__ = ("_is_over", "_observers", "_sequence", "_trace")

    def __init__(self, sequence: RunningSequence, trace: Trace, observers: list[SequenceObserver]) -> None:
        self._sequence = sequence
        self._trace = trace
        self._observers = observers
        self._is_over = False

    def ends(self, outcome: Outcome) -> None:
        """It is over."""
        if not self._is_over:
            self._is_over = True
            for observer in tuple(self._observers):
                observer.ends(self._sequence, self._trace, outcome)
