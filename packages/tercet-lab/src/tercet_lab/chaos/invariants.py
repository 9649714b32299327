"""The invariants of clients' answers and of a fleet's resources after a run, as functions that find violations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from tercet_lab.chaos.tricks import PlayedTrick

Piece = int | str
"""A part of an answer: a token, or the text of one event if clients do not receive tokens."""
Outcome = Literal["answered", "failed", "left", "pending"]


class ClientRecord(msgspec.Struct, kw_only=True):
    """The record of one request by its client. Times are in seconds from the run's begin.

    ``question`` identifies the right answer. ``received`` has the time and the content of each event. ``outcome`` is
    ``left`` if the client left before the end, and ``pending`` if the request has not ended. ``error`` is a code.
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
        """Content of all events, in order; text is joined to one piece."""
        pieces = tuple(piece for _, part in self.received for piece in part)
        return ("".join(map(str, pieces)),) if pieces and isinstance(pieces[0], str) else pieces

    @property
    def longest_gap(self) -> float:
        """Longest time, in seconds, between two events, or between the last event and the end."""
        times = [time for time, _ in self.received] + ([] if self.ended is None else [self.ended])
        return max((later - sooner for sooner, later in pairwise(times)), default=0.0)

    @property
    def ttft(self) -> float | None:
        """Seconds from the begin to the first event; None without an event."""
        return self.received[0][0] - self.began if self.received else None


class Leftover(msgspec.Struct, frozen=True):
    """``count`` resources of one kind (blocks, leases, processes, ...) that ``holder`` did not release."""

    holder: str
    what: str
    count: float


class Violation(msgspec.Struct, frozen=True):
    """The violation of an invariant: its ``rule``, the affected client or holder, and the details."""

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
    """Return all violations of a run.

    ``calm`` has the answers to all questions without faults. ``patience`` is the longest time, in seconds, that a
    client may wait for an event.
    """
    return [
        *unanswered(records),
        *stalled(records, patience),
        *wrong_answers(records, calm),
        *left_behind(left),
    ]


def unanswered(records: Sequence[ClientRecord]) -> Iterator[Violation]:
    """Yield the requests that failed or have not ended. At any time, at least one engine can answer."""
    for record in records:
        had = f"{len(record.received)} events" if record.received else "no event"
        if record.outcome == "pending":
            since = record.received[-1][0] if record.received else record.began
            detail = f"({record.program}) began at {record.began:.3f} s, received {had}, and waits since {since:.3f} s"
            yield Violation("every request ends", record.name, detail)
        elif record.outcome == "failed":
            detail = (
                f"({record.program}) received {had}, and failed at {record.ended or 0.0:.3f} s with {record.error}: "
                f"{record.message}"
            )
            yield Violation("every request is answered", record.name, detail)


def stalled(records: Sequence[ClientRecord], patience: float) -> Iterator[Violation]:
    """Yield the clients that waited longer than ``patience`` seconds for the first token, the next one or the end."""
    for record in records:
        wait = max(record.longest_gap, record.ttft if record.ttft is not None else (record.ended or 0.0) - record.began)
        if record.outcome != "pending" and wait > patience:
            detail = f"({record.program}) {record.outcome}, after {wait:.3f} s without an event"
            yield Violation(f"no client waits longer than {patience:g} s", record.name, detail)


def wrong_answers(records: Sequence[ClientRecord], calm: Mapping[int, tuple[Piece, ...]]) -> Iterator[Violation]:
    """Yield the answers that differ from those without faults. An incomplete answer may end early."""
    for record in records:
        found, expected = record.answer, calm[record.question]
        whole = record.outcome == "answered"
        why = difference(found, expected, whole)
        if why is not None:
            yield Violation("answers equal those without faults", record.name, f"({record.program}) {why}")


def difference(found: tuple[Piece, ...], expected: tuple[Piece, ...], whole: bool) -> str | None:
    """Return the difference between an answer and the expected one, or None. Not ``whole``: compare its begin only."""
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
            return f"{unit} {from_there} is repeated at {at}"
        return f"{from_there - at} {unit}s are missing at {at}"
    return f"{unit} {at} is {found[at]!r} instead of {expected[at]!r}"


def left_behind(left: Sequence[Leftover]) -> Iterator[Violation]:
    """Yield the resources that were not released: blocks, leases, sequences, tasks, processes, file descriptors, ..."""
    for each in left:
        yield Violation("nothing is left behind", each.holder, f"{each.what}: {each.count:g}")


def hostile(tricks: Sequence[PlayedTrick]) -> Iterator[Violation]:
    """Yield the tricks of a hostile client that the router did not end in time, or answered wrongly."""
    for trick in tricks:
        if trick.wrong:
            subject = f"trick {trick.planned.number} ({trick.planned.kind})"
            yield Violation("a hostile client is cut off", subject, f"at {trick.began:.3f} s: {trick.wrong}")
