"""The results of a run, as numbers and tables."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from tercet.router.serve.moves import MoveRecord
from tercet_lab.chaos.fault_schedule import KINDS, PlannedFault
from tercet_lab.chaos.invariants import ClientRecord, Leftover, Piece, Violation, hostile, violations_of
from tercet_lab.chaos.tricks import TRICKS, PlayedTrick

HEADINGS = ["fault", "process", "planned", "injected", "skipped", "requests hit", "of these failed", "longest gap"]
MOVE_HEADINGS = ["moves", "outcome", "number", "KV sent, MB", "recomputed", "pause, median", "longest"]
TRICK_HEADINGS = ["a hostile client's", "played", "answered with", "longest"]
MOST_SHOWN = 20
ORPHANS = "orphan generations"


class InjectedFault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault and its result.

    ``began`` and ``ended`` are seconds of the run, or None if the fault was not injected; ``why`` is the reason for
    that, or an error. ``hit`` are the requests that the engine generated when the fault began.
    """

    planned: PlannedFault
    began: float | None = None
    ended: float | None = None
    why: str = ""
    hit: tuple[str, ...] = ()


class ChaosResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run of an arena.

    ``calm`` has the answers without faults, by question. ``patience`` is the longest time, in seconds, that a client
    may wait for an event. ``complaints`` are the unhandled failures that the arena found. ``moves`` are the router's,
    ``tricks`` those of the hostile client; ``retries`` counts further attempts of sequences. ``memory`` is the largest
    growth of the router, in bytes; in a simulated fleet, it is the size of the clients' bodies only.
    """

    seed: int
    seconds: float
    wall_seconds: float
    faults: Sequence[InjectedFault]
    records: Sequence[ClientRecord]
    calm: Mapping[int, tuple[Piece, ...]]
    left: Sequence[Leftover]
    patience: float
    complaints: Sequence[str] = ()
    moves: Sequence[MoveRecord] = ()
    tricks: Sequence[PlayedTrick] = ()
    retries: int = 0
    memory: int = 0

    @property
    def orphans(self) -> int:
        """Number of sequences that engines still ran at the end, although the router did not have them."""
        return round(sum(each.count for each in self.left if each.what == ORPHANS))

    @property
    def violations(self) -> list[Violation]:
        """All violations of invariants."""
        unhandled = [Violation("no failure goes unhandled", "the run", text) for text in self.complaints]
        found = violations_of(self.records, self.calm, self.left, self.patience)
        return [*found, *hostile(self.tricks), *self._blamed(), *unhandled]

    def _blamed(self) -> list[Violation]:
        """Return a violation if sequences were retried in a run without faults: no request may make an engine fail."""
        if self.faults or not self.retries:
            return []
        return [Violation("no engine is blamed for what clients send", "the run", f"{self.retries} further attempts")]


def fault_rows(result: ChaosResult) -> list[list[str]]:
    """Return one row for each kind of fault and process, with counts and the results of the affected requests."""
    groups: defaultdict[tuple[str, str], list[InjectedFault]] = defaultdict(list)
    for fault in result.faults:
        groups[fault.planned.kind, fault.planned.process].append(fault)
    by_name = {record.name: record for record in result.records}
    rows: list[list[str]] = []
    for (kind, process), faults in sorted(groups.items(), key=lambda item: (KINDS.index(item[0][0]), item[0][1])):  # type: ignore[arg-type]
        injected = [fault for fault in faults if fault.began is not None]
        hit = {name for fault in injected for name in fault.hit if name in by_name}
        failed = sum(by_name[name].outcome in ("failed", "pending") for name in hit)
        gap = max((by_name[name].longest_gap for name in hit), default=0.0)
        counts = [len(faults), len(injected), len(faults) - len(injected), len(hit), failed]
        rows.append([kind, process, *map(str, counts), f"{gap:.2f} s"])
    return rows


def move_rows(result: ChaosResult) -> list[list[str]]:
    """Return one row for each reason and outcome of moves: their number, KV, recomputed tokens, and clients' pauses."""
    groups: defaultdict[tuple[str, str], list[MoveRecord]] = defaultdict(list)
    for move in result.moves:
        groups[move.reason, move.outcome].append(move)
    rows: list[list[str]] = []
    for (reason, outcome), moves in sorted(groups.items()):
        pauses = [move.pause for move in moves if move.pause is not None]
        waited = [f"{pause * 1000:.0f} ms" for pause in (statistics.median(pauses), max(pauses))] if pauses else []
        sent, recomputed = sum(move.bytes for move in moves) / 1e6, sum(move.recomputed for move in moves)
        rows.append([reason, outcome, str(len(moves)), f"{sent:.0f}", str(recomputed), *(waited or ["-", "-"])])
    return rows


def trick_rows(result: ChaosResult) -> list[list[str]]:
    """Return one row for each kind of trick: their number, the statuses of answers, and the longest duration."""
    rows: list[list[str]] = []
    for kind in TRICKS:
        played = [trick for trick in result.tricks if trick.planned.kind == kind]
        counts = Counter(status for trick in played for status in trick.statuses)
        said = ", ".join(f"{count} {status or 'closed'}" for status, count in sorted(counts.items()))
        if played:
            longest = max(trick.ended - trick.began for trick in played)
            rows.append([kind, str(len(played)), said or "-", f"{longest:.2f} s"])
    return rows


def figures(result: ChaosResult) -> list[str]:
    """Return the lines below the tables."""
    outcomes = Counter(record.outcome for record in result.records)
    errors = Counter(record.error for record in result.records if record.outcome == "failed")
    gaps = max(((record.longest_gap, record.name) for record in result.records), default=(0.0, "none"))
    ttfts = max(((record.ttft or 0.0, record.name) for record in result.records), default=(0.0, "none"))
    injected = sum(fault.began is not None for fault in result.faults)
    tokens = sum(len(part) for record in result.records for _, part in record.received)
    per_minute = injected / result.seconds * 60 if result.seconds else 0.0
    codes = ", ".join(f"{count} {code}" for code, count in errors.most_common())
    failed = f" ({codes})" if codes else ""
    return [
        f"{result.seconds:.0f} s of load in {result.wall_seconds:.0f} s; {injected} faults ({per_minute:.0f} a minute)",
        f"{len(result.records)} requests, {tokens} pieces: {outcomes['answered']} answered, {outcomes['left']} left by "
        f"their clients, {outcomes['failed']} failed{failed}, {outcomes['pending']} without an end",
        f"longest gap in a stream {gaps[0]:.2f} s ({gaps[1]})",
        f"longest wait for a first token {ttfts[0]:.2f} s ({ttfts[1]})",
        f"{sum(move.outcome == 'moved' for move in result.moves)} of {len(result.moves)} moves succeeded, "
        f"{result.orphans} {ORPHANS}, {result.retries} retries of sequences",
        f"the router's memory grew by at most {result.memory / 2**20:.0f} MiB",
    ]


def violation_lines(violations: Sequence[Violation], seed: int, replay: str) -> list[str]:
    """Return the violations by rule, the first ones of each rule in full, and the command that repeats the run."""
    if not violations:
        return ["no violations"]
    lines = [f"{len(violations)} violations with seed {seed}; again: {replay}"]
    for rule, count in Counter(violation.rule for violation in violations).most_common():
        of_rule = [violation for violation in violations if violation.rule == rule]
        lines.append(f"  {rule}: {count}")
        lines += [f"    {each.subject}: {each.detail}" for each in of_rule[:MOST_SHOWN]]
        if count > MOST_SHOWN:
            lines.append(f"    and {count - MOST_SHOWN} more")
    return lines
