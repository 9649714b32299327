"""Invariants of clients' answers and a fleet's resources after a run: functions that find violations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from tercet.lab.chaos.tricks import PlayedTrick

Piece = int | str
"""Parts of answers: tokens, or the text of one event if clients do not get tokens."""
Outcome = Literal["answered", "failed", "left", "pending"]


class ClientRecord(msgspec.Struct, kw_only=True):
    """One request as its client saw it. Times are seconds from the run's begin.

    ``question`` identifies the right answer. ``received`` has the time and content of each event. ``outcome`` is
    ``left`` for a client that left by itself, ``pending`` without an end. ``error`` is a code.
    """

    name: str
    question: int
    began: float
    program: str = ""
    received: list[tuple[float, tuple[Piece, ...]]] = []
    outcome: Outcome = "pending"
    ended: float | None = None
    error: str = ""
    message: str = ""

    @property
    def answer(self) -> tuple[Piece, ...]:
        """All content in order; text as one piece."""
        pieces = tuple(piece for _, part in self.received for piece in part)
        return ("".join(map(str, pieces)),) if pieces and isinstance(pieces[0], str) else pieces

    @property
    def longest_gap(self) -> float:
        """The longest time, in seconds, between two events, or between the last one and the end."""
        times = [time for time, _ in self.received] + ([] if self.ended is None else [self.ended])
        return max((later - sooner for sooner, later in pairwise(times)), default=0.0)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first event."""
        return self.received[0][0] - self.began if self.received else None


class Leftover(msgspec.Struct, frozen=True):
    """``count`` extra things of a kind (blocks, leases, processes, ...) at ``holder`` at the end."""

    holder: str
    what: str
    count: float


class Violation(msgspec.Struct, frozen=True):
    """A violated invariant: the ``rule``, the affected client or holder, and the event."""

    rule: str
    subject: str
    detail: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.subject}: {self.detail}"


def violations_of(
    records: Sequence[ClientRecord],
    calm: Mapping[int, tuple[Piece, ...]],
    left: Sequence[Leftover],
    patience: float,
) -> list[Violation]:
    """All violations of a run.

    ``calm`` are the answers to every question without faults, ``patience`` the longest allowed silence for a client, in
    seconds.
    """
    return [
        *unanswered(records),
        *stalled(records, patience),
        *wrong_answers(records, calm),
        *left_behind(left),
    ]


def unanswered(records: Sequence[ClientRecord]) -> Iterator[Violation]:
    """Every request is answered: at any time there is an engine that could."""
    for record in records:
        had = f"{len(record.received)} events" if record.received else "nothing"
        if record.outcome == "pending":
            since = record.received[-1][0] if record.received else record.began
            detail = f"({record.program}) began at {record.began:.3f} s, got {had}, and waits since {since:.3f} s"
            yield Violation("every request ends", record.name, detail)
        elif record.outcome == "failed":
            detail = (
                f"({record.program}) got {had}, and at {record.ended or 0.0:.3f} s {record.error}: {record.message}"
            )
            yield Violation("every request is answered", record.name, detail)


def stalled(records: Sequence[ClientRecord], patience: float) -> Iterator[Violation]:
    """No client waits longer than ``patience`` for its first token, its next one, or the end."""
    for record in records:
        wait = max(record.longest_gap, record.ttft if record.ttft is not None else (record.ended or 0.0) - record.began)
        if record.outcome != "pending" and wait > patience:
            detail = f"({record.program}) {record.outcome}, after {wait:.3f} s in which nothing came"
            yield Violation(f"no client hears nothing for {patience:g} s", record.name, detail)


def wrong_answers(records: Sequence[ClientRecord], calm: Mapping[int, tuple[Piece, ...]]) -> Iterator[Violation]:
    """Each token once, in order, and equal to the run without faults; of an incomplete answer, its part."""
    for record in records:
        found, expected = record.answer, calm[record.question]
        whole = record.outcome == "answered"
        why = difference(found, expected, whole)
        if why is not None:
            yield Violation("answers are those of a calm run", record.name, f"({record.program}) {why}")


def difference(found: tuple[Piece, ...], expected: tuple[Piece, ...], whole: bool) -> str | None:
    """How an answer, or the beginning of one, differs from the right one; None if it does not."""
    if found and isinstance(found[0], str):
        return _difference("".join(map(str, found)), "".join(map(str, expected)), whole, "character")
    return _difference(found, expected, whole, "token")


def _difference(found: Sequence[Piece], expected: Sequence[Piece], whole: bool, unit: str) -> str | None:
    if found == expected or (not whole and found == expected[: len(found)]):
        return None
    at = next((i for i, (one, other) in enumerate(zip(found, expected, strict=False)) if one != other), None)
    if at is None:
        few = "too few" if len(found) < len(expected) else "too many"
        return f"{few}: {len(found)} {unit}s instead of {len(expected)}"
    rest = found[at:]
    from_there = next((k for k in range(len(expected)) if expected[k : k + len(rest)] == rest), None)
    if from_there is not None:
        if from_there < at:
            return f"{unit} {from_there} comes again at {at}"
        return f"{from_there - at} {unit}s are missing at {at}"
    return f"{unit} {at} is {found[at]!r} instead of {expected[at]!r}"


def left_behind(left: Sequence[Leftover]) -> Iterator[Violation]:
    """All resources are given back: no block, lease, pin, sequence, task, process or file descriptor is left."""
    for each in left:
        yield Violation("nothing is left behind", each.holder, f"{each.what}: {each.count:g}")


def hostile(tricks: Sequence[PlayedTrick]) -> Iterator[Violation]:
    """Each trick of a hostile client ends soon, with an error for this client alone."""
    for trick in tricks:
        if trick.wrong:
            subject = f"trick {trick.planned.number} ({trick.planned.kind})"
            yield Violation("a hostile client is cut off", subject, f"at {trick.began:.3f} s: {trick.wrong}")
